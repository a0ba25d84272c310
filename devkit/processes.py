"""Real processes for tests, benchmarks and the demo: started, waited for, and never left behind.

Each process leads a session of its own, so that all its descendants can be found and ended
whatever they do, and a Ctrl-C in the terminal reaches only us, who then end them in order.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

import httpx

from cornplug.config import load
from cornplug.host import free_port
from cornplug.store.base import StoreStat
from cornplug.store.client import PoolStore

T = TypeVar("T")

_running: set[ManagedProcess] = set()

# An engine's package writes into os.environ as it is imported (vLLM sets AITER's and KMP's variables, OpenCV
# its library path). Keys count such variables: another engine must not be started with them.
_STARTED_WITH: Final = dict(os.environ)
_OURS: Final = ("CORNPLUG_", "HF_", "XDG_")


def _inherited() -> dict[str, str]:
    began = {name: value for name, value in _STARTED_WITH.items() if not name.startswith(_OURS)}
    return began | {name: value for name, value in os.environ.items() if name.startswith(_OURS)}


def at_once(*calls: Callable[[], T]) -> list[T]:
    """What the calls return, in their order, made side by side: an engine starts on one core, mostly.

    All of them end before the first error, if any, is raised.
    """
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@contextlib.contextmanager
def together(*processes: ManagedProcess) -> Iterator[None]:
    """Start these side by side; the exit ends them all, the last one first, whichever of them started."""
    with contextlib.ExitStack() as ends:
        for process in processes:
            ends.callback(process.stop)
        at_once(*(process.start for process in processes))
        yield


class ProcessFailed(RuntimeError):
    """A process ended, or was not ready in time. The message holds the tail of its log."""


class ManagedProcess:
    """One process and its descendants. A context manager: enter starts and waits, exit ends all.

    Args:
        command: What to run.
        log: File for stdout and stderr, appended to.
        env: Added to the environment that this process was started with, and to `CORNPLUG_*`, `HF_*`
            and `XDG_*` as they are now.
        ready_s: Longest wait in seconds for `ready` to be true.
    """

    def __init__(
        self, command: Sequence[str], *, log: Path, env: Mapping[str, str] | None = None, ready_s: float = 30
    ) -> None:
        self.command = list(command)
        self.log = log
        self.env = {**_inherited(), **(env or {})}
        self.ready_s = ready_s
        self._process: subprocess.Popen[bytes] | None = None

    def ready(self) -> bool:
        """Whether it serves. Asked about ten times a second while starting."""
        return True

    def start(self) -> Self:
        """Start and wait until ready. Raises ProcessFailed, with nothing left running that was not before."""
        if self.alive():
            raise ProcessFailed(f"runs already, as process {self.pid}: {self.command[:3]}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )
        _running.add(self)
        try:
            self._wait_ready(self._process)
        except BaseException:
            self.stop(grace_s=2)
            raise
        return self

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The leader's process id. Raises ProcessFailed before `start`."""
        if self._process is None:
            raise ProcessFailed(f"not started: {self.command[:3]}")
        return self._process.pid

    def alive(self) -> bool:
        """Whether the leader runs."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Every process of the session that is no zombie, leader first."""
        return _session_members(self.pid)

    def stop(self, *, grace_s: float = 20) -> int | None:
        """End it: SIGTERM to the leader, after `grace_s` SIGKILL to all; the leader's exit status.

        Raises ProcessFailed when a process of the session survives even that.
        """
        if self._process is None:
            return None
        self._signal_all(signal.SIGCONT)
        if self.alive():
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
        return self.kill()

    def kill(self) -> int | None:
        """SIGKILL to every process of the session, as an OOM killer or a crash would."""
        if self._process is None:
            return None
        # The leader's id may belong to another once it is reaped, but a session lives on while
        # members do, and only members are signalled.
        deadline = time.monotonic() + 30
        while members := self.pids():
            if time.monotonic() > deadline:
                raise ProcessFailed(f"processes {members} survive SIGKILL")
            self._signal_all(signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)
        _running.discard(self)
        return self._process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP to every process: alive, but silent."""
        self._signal_all(signal.SIGSTOP)

    def cont(self) -> None:
        """SIGCONT to every process."""
        self._signal_all(signal.SIGCONT)

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self.pids():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self.ready_s
        while not self.ready():
            if process.poll() is not None:
                problem = f"ended with status {process.returncode} before it was ready"
            elif time.monotonic() > deadline:
                problem = f"not ready after {self.ready_s:g} s"
            else:
                time.sleep(0.1)
                continue
            raise ProcessFailed(
                f"{' '.join(self.command)}\n{problem}; its log {self.log}:\n{self.log_tail()}"
            )


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
        command = [*_cornplug("serve-store"), "--socket", str(socket), "--size", size, *args]
        super().__init__(command, log=log or socket.with_suffix(".log"), env=env)

    def ready(self) -> bool:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(1)
            return s.connect_ex(str(self.socket)) == 0

    def stat(self) -> StoreStat:
        """What the store holds. Raises StoreUnavailable when it does not answer."""
        client = PoolStore(load({"store.socket": self.socket}).store, autostart=False, connect_timeout_s=5)
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
    """`cornplug encoder` for `models`, ready when /health answers 200 at `url`."""

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
    ) -> None:
        self.socket = socket
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [*_cornplug("encoder"), "--socket", str(socket), "--port", str(self.port), "--dtype", dtype]
        for model in models:
            command += ["--model", str(model)]
        super().__init__(
            [*command, *args],
            log=log or socket.with_suffix(".log"),
            # Tests name tenants as a gateway would.
            env={"HF_HUB_OFFLINE": "1", "CORNPLUG_ENCODER_TRUST_SALTS": "true", **(env or {})},
            ready_s=ready_s,
        )

    def ready(self) -> bool:
        return answers(f"{self.url}/health")

    def tower_passes(self) -> int:
        """Media that the service has run a tower for, since it began."""
        text = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).raise_for_status().text
        name = "cornplug_encoder_tower_passes_total"
        (line,) = [line for line in text.splitlines() if line.startswith(name)]
        return int(float(line.split()[-1]))


def answers(url: str) -> bool:
    """Whether a GET of `url` gives 200 within two seconds."""
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


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


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # "pid (name) state ppid pgrp session ...": the name may hold spaces and brackets.
        state, _, _, sid = stat[stat.rindex(")") + 2 :].split()[:4]
        if int(sid) == session and state not in "ZX":
            members.append(int(entry.name))
    return sorted(members, key=lambda pid: (pid != session, pid))


@atexit.register
def _end_all() -> None:
    for process in list(_running):
        process.kill()
