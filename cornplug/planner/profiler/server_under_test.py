"""Servers that are started for a measurement, and then stopped with all their child processes."""

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

_COMMON_ENV: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Without this, SGLang generates a token for each /health request.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
_CPU_ENV: Final[Mapping[Engine, Mapping[str, str]]] = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}


def engine(
    kind: Engine, model: str, grid: SampleGrid, *, tp: int, pp: int, cores: Sequence[int]
) -> LaunchCommand:
    """Return the command of an engine that computes each prompt of the grid in one iteration, and all
    requests of a batch together.

    `cores` are the CPU cores on which the engine runs, one core per rank. If empty, the engine runs on GPUs.
    """
    # Allow one token more than the longest prompt, for engines that add a token to the prompt.
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
    return _command(
        "engine", argv, {**_COMMON_ENV, **(_core_binding_env(kind, cores) if cores else {})}, port, cores
    )


def encoder(model: str, *, folder: Path, cores: Sequence[int]) -> LaunchCommand:
    """Return the command of an encoder service for this model. The service has no store, and its socket is in
    `folder`. `cores` are the CPU cores on which the service runs. If empty, it runs on a GPU."""
    port = free_port()
    argv = ["cornplug", "encoder", "--model", model, "--no-store", "--port", str(port)]
    argv += ["--socket", str(folder / "encoder.sock")]
    argv += ["--device", "cpu", "--threads", str(len(cores))] if cores else []
    return _command("encoder", argv, {}, port, cores)


@contextmanager
def run_server(command: LaunchCommand, *, log: Path, ready_s: float) -> Iterator[str]:
    """Run a server for the block, and yield its URL.

    Raises ProcessFailed with the end of `log` if the server ends early, or is not ready after `ready_s`
    seconds.
    """
    with CommandProcess(command, log, ready_s=ready_s):
        yield f"http://127.0.0.1:{command.port}"


def _core_binding_env(kind: Engine, cores: Sequence[int]) -> dict[str, str]:
    bind_address = "|".join(map(str, cores))
    return {
        "VLLM_CPU_OMP_THREADS_BIND": bind_address,
        "SGLANG_CPU_OMP_THREADS_BIND": bind_address,
        **_CPU_ENV[kind],
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
