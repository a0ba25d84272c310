"""Processes of a plan on this host: started, waited for, and ended with all their descendants."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from cornplug.errors import ConfigError, CornplugError
from cornplug.planner.launch.command_lines import LaunchCommand
from cornplug.planner.launch.scripts import name_of

GRACE_S: Final = 20.0
"""Beyond what an engine was given to finish its requests."""
_TAIL_LINES: Final = 40


class ProcessEnded(CornplugError):
    """A process ended by itself, or was not ready in time. The message holds the end of its log."""


@dataclass
class RunningCommand:
    """One command, running. Leads a session of its own, so that Ctrl-C reaches only who started it."""

    command: LaunchCommand
    log: Path
    began_s: float = field(default_factory=time.monotonic)
    _popen: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return name_of(self.command)

    @property
    def pid(self) -> int:
        assert self._popen is not None, "started"
        return self._popen.pid

    def start(self) -> None:
        """Raises ConfigError where its program or its cores are not there."""
        words = [*program(self.command.argv), *self.command.argv[1:]]
        with self.log.open("wb") as out:
            self._popen = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(words[0], self.command.env),
                start_new_session=True,
            )
        self.began_s = time.monotonic()
        if self.command.cores:
            self._keep_to(self.command.cores)

    def ready(self) -> bool:
        """Whether it serves; at once where nobody can be asked. Raises ProcessEnded when it has ended."""
        self.check()
        if self.command.health is not None:
            return _answers(self.command.health)
        return self.command.socket is None or Path(self.command.socket).is_socket()

    def check(self) -> None:
        """Raises ProcessEnded when it runs no more."""
        status = None if self._popen is None else self._popen.poll()
        if status is not None:
            raise ProcessEnded(f"{self.name} has ended with status {status}; {self.tail()}")

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\n".join([f"the end of its log {self.log}:", *lines])

    def terminate(self) -> None:
        """Ask it to finish its work and end."""
        if self._popen is not None and self._popen.poll() is None:
            self._popen.terminate()

    def end(self, deadline_s: float) -> None:
        """Wait for its end until time.monotonic() is `deadline_s`, then kill what is left of it."""
        if self._popen is None:
            return
        try:
            self._popen.wait(max(deadline_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            pass
        try:
            # Its group has its id as long as any descendant lives.
            os.killpg(self._popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._popen.wait()

    def _keep_to(self, cores: Sequence[int]) -> None:
        try:
            os.sched_setaffinity(self.pid, cores)
        except OSError as e:
            self.end(0)
            mine = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
            raise ConfigError(
                f"groups[{self.command.group!r}].placement",
                f"cores {list(cores)} are not for us here ({e.strerror}); these are: {mine}",
                "Plan for as many cores as there are.",
            ) from e


def program(argv: Sequence[str]) -> list[str]:
    """What to run for a command's first word. Raises ConfigError where it is not installed."""
    word = argv[0]
    if word == "cornplug":
        return [sys.executable, "-m", "cornplug.cli"]
    if word == "python":
        return [_python_with(argv[2].partition(".")[0])]
    variable = f"CORNPLUG_{word.upper().replace('-', '_')}"
    beside = Path(sys.executable).with_name(word)
    found = os.environ.get(variable) or shutil.which(word) or (str(beside) if beside.exists() else None)
    if found is None:
        raise ConfigError(word, "not installed here", f"Run: pip install {word}, or name it in {variable}.")
    return [found]


def _python_with(module: str) -> str:
    """The interpreter that has SGLang or its router: its own environment's, else ours."""
    named = os.environ.get("CORNPLUG_SGLANG_PYTHON")
    if named is None and importlib.util.find_spec(module) is None:
        raise ConfigError(
            module,
            "not installed beside cornplug",
            "Name the interpreter of its environment in CORNPLUG_SGLANG_PYTHON.",
        )
    return named or sys.executable


def _environment(program: str, added: Mapping[str, str]) -> dict[str, str]:
    """Ours and the command's. Engines look for compilers' helpers on PATH, beside their interpreter."""
    path = f"{Path(program).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    return {**os.environ, "PATH": path, "PYTHONUNBUFFERED": "1", **added}


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False
