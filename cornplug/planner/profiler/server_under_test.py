"""A server that is started for a measurement and stopped with all its child processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from cornplug.host import free_port
from cornplug.planner.inputs.schema import Engine
from cornplug.planner.launch.command_lines import LaunchCommand
from cornplug.planner.launch.command_process import CommandProcess
from cornplug.planner.profiler.sample_grid import SampleGrid

_QUIET: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Otherwise each /health request to SGLang computes a token.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
_CPU: Final[Mapping[Engine, Mapping[str, str]]] = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}


def engine(
    kind: Engine, model: str, grid: SampleGrid, *, tp: int, pp: int, cores: Sequence[int]
) -> LaunchCommand:
    """Return the command of an engine that computes each prompt in one iteration, and every batch of the grid
    together.

    `cores` are the cores of its threads, one per rank. Empty means GPUs.
    """
    # One token more than the longest prompt, for engines that add a token to the prompt.
    most_tokens, most_requests = max(grid.prompts[-1] + 1, grid.batches[-1] * 32), grid.batches[-1]
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port))
    if kind == "vllm":
        argv = [
            *("vllm", "serve", model, *where, "--no-enable-prefix-caching"),
            *("--max-num-batched-tokens", str(most_tokens), "--max-num-seqs", str(most_requests)),
            *("--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp)),
        ]
    else:
        cpu = ("--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.1")
        argv = [
            *("python", "-m", "sglang.launch_server", "--model-path", model, *where),
            *("--disable-radix-cache", "--chunked-prefill-size", str(most_tokens)),
            *("--max-running-requests", str(most_requests), "--tp-size", str(tp), "--pp-size", str(pp)),
            *((*cpu, "--max-total-tokens", "32768", "--sleep-on-idle") if cores else ()),
        ]
    return _command("engine", argv, {**_QUIET, **(_on_cores(kind, cores) if cores else {})}, port, cores)


def encoder(model: str, *, folder: Path, cores: Sequence[int]) -> LaunchCommand:
    """Return the command of an encoder service for this model, without a store. Its socket is in `folder`."""
    port = free_port()
    argv = ["cornplug", "encoder", "--model", model, "--no-store", "--port", str(port)]
    argv += ["--socket", str(folder / "encoder.sock")]
    argv += ["--device", "cpu", "--threads", str(len(cores))] if cores else []
    return _command("encoder", argv, {}, port, cores)


@contextmanager
def running(command: LaunchCommand, *, log: Path, ready_s: float) -> Iterator[str]:
    """Run a server for the block and yield its URL.

    Raises ProcessFailed with the end of `log` if it ends early or is not ready in time.
    """
    with CommandProcess(command, log, ready_s=ready_s):
        yield f"http://127.0.0.1:{command.port}"


def _on_cores(kind: Engine, cores: Sequence[int]) -> dict[str, str]:
    bind_address = "|".join(map(str, cores))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": bind_address,
        "SGLANG_CPU_OMP_THREADS_BIND": bind_address,
        **_CPU[kind],
    }


def _command(
    kind: Literal["engine", "encoder"],
    argv: Sequence[str],
    env: Mapping[str, str],
    port: int,
    cores: Sequence[int],
) -> LaunchCommand:
    return LaunchCommand(
        group="profile",
        replica=0,
        host="127.0.0.1",
        argv=tuple(argv),
        env=env,
        kind=kind,
        port=port,
        health=f"http://127.0.0.1:{port}/health",
        cores=tuple(cores),
    )
