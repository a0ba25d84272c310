"""Child processes that are started, awaited, and terminated together with all their descendants.

Each child process leads its own session. All its descendants can therefore be found and terminated, even if
they form process groups. A Ctrl-C in the terminal reaches only the parent, which stops its children in order.
This module is used by `cornplug launch`, `cornplug profile`, tests, benchmarks and the demo.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from cornplug.errors import ProcessFailed
from cornplug.host import tls_context

GRACE_S: Final = 20.0
"""Default time in seconds between SIGTERM and SIGKILL."""
_POLL_S: Final = 0.1
_KILL_S: Final = 30.0
_PR_SET_PDEATHSIG: Final = 1
_libc: Final = ctypes.CDLL(None)

_running: set[ManagedProcess] = set()


class ManagedProcess:
    """Child process and its descendants.

    As a context manager, it starts the process, waits until the process is ready, and stops it on exit.

    Args:
        argv: Program and arguments.
        log: File to which stdout and stderr are appended.
        env: Complete environment of the process, or None for the environment of this process.
        name: Name for messages, or None for the program with its first two arguments.
        health: Function that returns whether the process is ready. None means that it is ready immediately.
            Subclasses may override `is_ready` instead.
        ready_timeout_s: Maximum time in seconds that `start` waits until the process is ready.
        ends_with_parent: Whether the child process gets SIGTERM if this process ends without stopping it,
            even by SIGKILL. The kernel sends the signal when the thread that spawned the child process ends,
            so `spawn` must run in the main thread.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        name: str | None = None,
        health: Callable[[], bool] | None = None,
        ready_timeout_s: float = 30,
        ends_with_parent: bool = False,
    ) -> None:
        self.argv = list(argv)
        self.log = log
        self.env = dict(os.environ if env is None else env)
        self.name = name or " ".join(self.argv[:3])
        self.ready_timeout_s = ready_timeout_s
        self.started_s = time.monotonic()
        self._health = health
        self._process: subprocess.Popen[bytes] | None = None
        self._parent_pid = os.getpid()
        self._ends_with_parent = ends_with_parent

    def is_ready(self) -> bool:
        """Return whether the process is ready."""
        return self._health is None or self._health()

    def start(self) -> Self:
        """Spawn the process and wait until it is ready.

        If the process ends or is not ready in time, stops its session and raises ProcessFailed.
        """
        self.spawn()
        try:
            while not self.check_ready():
                time.sleep(_POLL_S)
        except BaseException:
            self.stop(grace_s=2)
            raise
        return self

    def spawn(self) -> None:
        """Start the process without waiting until it is ready.

        Raises ProcessFailed if it is already running, and OSError in the same cases as `subprocess.Popen`.
        """
        if self.is_alive():
            raise ProcessFailed(f"{self.name} is already running as process {self.pid}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
                preexec_fn=self._child_setup(),
            )
        self.started_s, self._parent_pid = time.monotonic(), os.getpid()
        _running.add(self)

    def check_ready(self) -> bool:
        """Return whether the process is ready. Raises ProcessFailed if it has ended, or after
        `ready_timeout_s`."""
        ready = self.is_ready()
        # Check even if it is ready, because another process may respond at its address.
        if not ready or self._health is not None:
            self.check_alive("before it was ready")
        if not ready and time.monotonic() - self.started_s > self.ready_timeout_s:
            raise ProcessFailed(
                f"{self.name}: not ready after {self.ready_timeout_s:g} s; {self.log_excerpt()}"
            )
        return ready

    def check_alive(self, when: str = "") -> None:
        """Raise ProcessFailed with the end of the log if the leader has ended."""
        status = None if self._process is None else self._process.poll()
        if status is not None:
            moment = f" {when}" if when else ""
            raise ProcessFailed(f"{self.name} ended with status {status}{moment}; {self.log_excerpt()}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the leader. Raises ProcessFailed before `spawn`."""
        if self._process is None:
            raise ProcessFailed(f"{self.name} has not been started")
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether the leader is running."""
        return self._process is not None and self._process.poll() is None

    def pids(self) -> list[int]:
        """Return the ids of all processes in the session except zombies, beginning with the leader."""
        return _session_members(self.pid)

    def stop(self, *, grace_s: float = GRACE_S) -> int | None:
        """Terminate the leader, wait up to `grace_s` seconds, and kill all remaining processes of the
        session.

        Returns the leader's exit status, or None if the process was never started. Raises ProcessFailed if a
        process of the session survives SIGKILL.
        """
        self.terminate()
        return self.wait_until_ended(grace_s)

    def terminate(self) -> None:
        """Send SIGTERM to the leader, so that it finishes its work and ends."""
        if self._process is None:
            return
        self.resume()
        if self.is_alive():
            self._process.terminate()

    def wait_until_ended(self, grace_s: float) -> int | None:
        """Wait up to `grace_s` seconds until the leader ends, then kill all remaining processes of the
        session.

        The result and the errors are the same as for `stop`.
        """
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(grace_s, 0.0))
        return self.kill()

    def kill(self) -> int | None:
        """Send SIGKILL to every process of the session, and wait until they have ended.

        The result and the errors are the same as for `stop`.
        """
        if self._process is None:
            return None
        # The leader's id can be reused after the leader is reaped, so only members of the session are
        # signalled. The session exists as long as it has members.
        deadline = time.monotonic() + _KILL_S
        while members := self.pids():
            if time.monotonic() > deadline:
                raise ProcessFailed(f"{self.name}: processes {members} survive SIGKILL")
            self._signal_all(signal.SIGKILL)
            self._process.poll()
            time.sleep(0.01)
        _running.discard(self)
        return self._process.wait(10)

    def freeze(self) -> None:
        """Send SIGSTOP to every process of the session."""
        self._signal_all(signal.SIGSTOP)

    def resume(self) -> None:
        """Send SIGCONT to every process of the session."""
        self._signal_all(signal.SIGCONT)

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def log_excerpt(self) -> str:
        """Return the log's name and last lines, for an error message."""
        return f"its log {self.log} ends with:\n{self.log_tail()}"

    def kill_at_exit(self) -> None:
        """Kill the session, unless the current process is a fork of the process that started the session."""
        if self._parent_pid == os.getpid():
            self.kill()

    def _child_setup(self) -> Callable[[], None] | None:
        """Return a function that the child runs between fork and exec, or None.

        The function makes only system calls, because another thread of the parent could have held a lock
        during the fork.
        """
        if not self._ends_with_parent:
            return None
        if threading.current_thread() is not threading.main_thread():
            raise ProcessFailed(f"{self.name}: ends_with_parent requires a start from the main thread")
        parent = os.getpid()

        def ask_for_signal() -> None:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

        return ask_for_signal

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def responds_ok(url: str) -> bool:
    """Return whether a GET of `url` returns status 200 within two seconds."""
    try:
        return httpx.get(url, timeout=2, trust_env=False, verify=tls_context()).status_code == 200
    except httpx.TransportError:
        return False


def _session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The format is "pid (name) state ppid pgrp session ...". The name may contain spaces and parentheses.
        state, _, _, sid = stat[stat.rindex(")") + 2 :].split()[:4]
        if int(sid) == session and state not in "ZX":
            members.append(int(entry.name))
    return sorted(members, key=lambda pid: (pid != session, pid))


@atexit.register
def _kill_all() -> None:
    for process in list(_running):
        process.kill_at_exit()
