"""cornplug's own processes for tests, benchmarks and the demo."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

import httpx

from cornplug.config import load
from cornplug.host import free_port, tls_context
from cornplug.processes import ManagedProcess, responds_ok
from cornplug.store.client import PoolStore
from cornplug.store.store_stats import StoreStat

T = TypeVar("T")

# As this module is imported, which tests/conftest.py does first. /proc/self/environ is no source:
# setproctitle, which pytest-xdist calls, writes its title over it.
_STARTED_WITH: Final = dict(os.environ)
_OURS: Final = ("CORNPLUG_", "HF_", "XDG_")


def environment(added: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment that this process was started with, today's `CORNPLUG_*`, `HF_*`, `XDG_*`, and `added`.

    An engine's package writes into os.environ as it is imported: vLLM sets variables of AITER and KMP, OpenCV
    its library path. Keys count such variables, so another engine must not inherit them.
    """
    first = {name: value for name, value in _STARTED_WITH.items() if not name.startswith(_OURS)}
    now = {name: value for name, value in os.environ.items() if name.startswith(_OURS)}
    return {**first, **now, **(added or {})}


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What the calls return, in their order, made side by side: an engine starts on one core, mostly.

    All of them end before the first error, if any, is raised.
    """
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@contextlib.contextmanager
def together(*processes: ManagedProcess) -> Iterator[None]:
    """Start these side by side; the exit ends them all side by side, whichever of them started."""
    try:
        at_once(*(process.start for process in processes))
        yield
    finally:
        at_once(*(process.stop for process in processes))


def cpu_s(process: ManagedProcess) -> float:
    """CPU seconds that a process and its descendants have used so far."""
    ticks = 0
    for pid in process.pids():
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory_bytes(*processes: ManagedProcess) -> int:
    """Resident bytes of these processes and their descendants. A page that several of them map counts
    once."""
    total = 0
    for pid in (pid for process in processes for pid in process.pids()):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Pss:"))
    return total


class StoreProcess(ManagedProcess):
    """`cornplug serve-store` at `socket`, ready when it accepts connections."""

    def __init__(
        self,
        socket: Path,
        *args: str,
        size: str = "256MiB",
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.socket = socket
        self._secret = (env or {}).get("CORNPLUG_STORE_SECRET_FILE")
        command = [*_cornplug("serve-store"), "--socket", str(socket), "--size", size, *args]
        super().__init__(command, log=log or socket.with_suffix(".log"), env=environment(env))

    def is_ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(1)
            return s.connect_ex(str(self.socket)) == 0

    def stat(self) -> StoreStat:
        """What the store holds. Raises StoreUnavailable when it does not answer."""
        settings = {"store.socket": self.socket} | (
            {"store.secret_file": self._secret} if self._secret else {}
        )
        client = PoolStore(load(settings).store, autostart=False, connect_timeout_s=5)
        with contextlib.closing(client):
            return client.stat(deadline_s=5)

    def settle(self, *, quiet_s: float = 1.5, deadline_s: float = 30) -> None:
        """Wait until whatever engines have computed is there: for `quiet_s` nobody wrote. An
        idle SGLang looks once a second at what it still has to write.

        Raises TimeoutError as `wait_until`.
        """
        seen: list[tuple[float, int]] = []

        def quiet() -> bool:
            stat, now = self.stat(), time.monotonic()
            if stat.reservations or (seen and seen[-1][1] != stat.entries):
                seen.clear()
            seen.append((now, stat.entries))
            return not stat.reservations and now - seen[0][0] >= quiet_s

        wait_until(quiet, deadline_s=deadline_s, what="a store that nobody writes to")


class EncoderProcess(ManagedProcess):
    """`cornplug encoder` for `models`, ready when /health answers 200 at `url`.

    `inside` is a command that runs it, in namespaces for example.
    """

    def __init__(
        self,
        models: Sequence[str | Path],
        *args: str,
        socket: Path,
        port: int | None = None,
        dtype: str = "float32",
        log: Path | None = None,
        env: Mapping[str, str] | None = None,
        ready_s: float = 120,
        address: str = "127.0.0.1",
        inside: Sequence[str] = (),
    ) -> None:
        self.socket = socket
        self.port = port or free_port()
        self.url = f"http://{address}:{self.port}"
        command = [*inside, *_cornplug("encoder"), "--socket", str(socket), "--dtype", dtype]
        command += ["--host", address, "--port", str(self.port)]
        for model in models:
            command += ["--model", str(model)]
        super().__init__(
            [*command, *args],
            log=log or socket.with_suffix(".log"),
            # Tests name tenants as a gateway would.
            env=environment({"HF_HUB_OFFLINE": "1", "CORNPLUG_ENCODER_TRUST_SALTS": "true", **(env or {})}),
            ready_timeout_s=ready_s,
        )

    def is_ready(self) -> bool:
        return responds_ok(f"{self.url}/health")

    def tower_passes(self) -> int:
        """Media that the service has run a tower for, since it began."""
        answer = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False, verify=tls_context())
        text = answer.raise_for_status().text
        name = "cornplug_encoder_tower_passes_total"
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        return int(float(line.split()[-1]))


def wait_until(condition: Callable[[], bool], *, deadline_s: float, what: str) -> None:
    """Poll until `condition()` holds. Raises TimeoutError naming `what`."""
    end = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.02)


def _cornplug(command: str) -> list[str]:
    # -P: the cornplug that is installed, or that PYTHONPATH names, whatever lies in the working directory.
    return [sys.executable, "-P", "-m", "cornplug.cli", command]
