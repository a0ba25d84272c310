"""A server started only to be measured: one process group, waited for, ended with what it started."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from cornplug.errors import CornplugError
from cornplug.planner.inputs import Engine
from cornplug.planner.measure_points import Grid

_POLL_S: Final = 0.5
_GRACE_S: Final = 20.0
_QUIET: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Else each /health of SGLang computes a token.
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
}
_CPU: Final[Mapping[Engine, Mapping[str, str]]] = {
    "vllm": {"VLLM_CPU_KVCACHE_SPACE": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"},
}


def engine_command(
    engine: Engine, model: str, grid: Grid, *, port: int, tp: int, pp: int, on_cpu: bool, python: str
) -> list[str]:
    """An engine that computes each prompt in one iteration, all of it, and every batch of the grid."""
    # One more prompt token than asked for is left to engines that count a token of their own.
    most_tokens = max(grid.prompts[-1] + 1, grid.batches[-1] * 32)
    if engine == "vllm":
        return [
            *(str(Path(python).with_name("vllm")), "serve", model, "--host", "127.0.0.1"),
            *("--port", str(port), "--no-enable-prefix-caching"),
            *("--max-num-batched-tokens", str(most_tokens), "--max-num-seqs", str(grid.batches[-1])),
            *("--tensor-parallel-size", str(tp), "--pipeline-parallel-size", str(pp)),
        ]
    cpu = ("--device", "cpu", "--attention-backend", "torch_native", "--mem-fraction-static", "0.1")
    return [
        *(python, "-m", "sglang.launch_server", "--model-path", model, "--host", "127.0.0.1"),
        *("--port", str(port), "--disable-radix-cache", "--chunked-prefill-size", str(most_tokens)),
        *("--max-running-requests", str(grid.batches[-1]), "--tp-size", str(tp), "--pp-size", str(pp)),
        *((*cpu, "--max-total-tokens", "32768", "--sleep-on-idle") if on_cpu else ()),
    ]


def engine_env(engine: Engine, cores: Sequence[int]) -> dict[str, str]:
    """What the engine's environment needs besides this process's own.

    Args:
        cores: where its threads compute, one a rank; empty: on GPUs.
    """
    bind = "|".join(map(str, cores))
    on_cpu = {"VLLM_CPU_OMP_THREADS_BIND": bind, "SGLANG_CPU_OMP_THREADS_BIND": bind, **_CPU[engine]}
    return {**_QUIET, **(on_cpu if cores else {})}


def encoder_command(model: str, *, port: int, socket_path: Path, on_cpu: bool) -> list[str]:
    """The encoder service with this model's tower, in this interpreter, with no store."""
    return [
        *(sys.executable, "-m", "cornplug.cli", "encoder", "--model", model, "--no-store"),
        *("--port", str(port), "--socket", str(socket_path)),
        *(("--device", "cpu", "--threads", "1") if on_cpu else ()),
    ]


@contextlib.contextmanager
def running(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    health: str,
    log: Path,
    ready_s: float,
    cores: Sequence[int] = (),
) -> Iterator[None]:
    """Run a server for the block.

    Args:
        cores: all that it starts is kept to these; empty: anywhere.
        health: answers 200 once the server is ready.
        log: for what it prints.
        ready_s: longest wait for that.

    Raises CornplugError with the end of its log when it ends early or is not ready in time.
    """
    pinned = ["taskset", "--cpu-list", ",".join(map(str, cores))] if cores else []
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*pinned, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
            start_new_session=True,
        )
    try:
        _wait(process, health, log, ready_s)
        yield
    finally:
        _end(process)


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
    return port


def has_gpu() -> bool:
    """Whether the NVIDIA driver names a GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    return listed.stdout.startswith("GPU")


def _wait(process: subprocess.Popen[bytes], health: str, log: Path, ready_s: float) -> None:
    end = time.monotonic() + ready_s
    while not _answers(health):
        status = process.poll()
        if status is not None or time.monotonic() > end:
            why = f"ended with status {status}" if status is not None else f"is not ready after {ready_s:g} s"
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
            raise CornplugError(f"the server {why}:\n{tail}", reason="server")
        time.sleep(_POLL_S)


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the leader, who ends its own; then SIGKILL to whoever of its group is left."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
