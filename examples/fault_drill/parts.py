"""The parts of the deployment: their processes below the launcher, and the signs that a part works again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentPart:
    """One part that the drill kills."""

    title: str
    pid: Callable[[], int | None]
    """Its process; None while it has none."""
    works: Callable[[float], bool]
    """Whether it has done its work for a client since this time of the monotonic clock. Asked only while
    another process than the killed one runs."""
    restart: Callable[[], None] = lambda: None
    """For a part that the launcher does not look after."""

    def kill(self) -> int:
        """kill -9; returns the process that was killed. Raises RuntimeError where there is none."""
        pid = self.pid()
        if pid is None:
            raise RuntimeError(f"{self.title}: no process to kill")
        os.kill(pid, signal.SIGKILL)
        return pid

    def wait_back(self, killed: int, since_s: float, deadline_s: float) -> float | None:
        """Time at which another process works; None where none does within `deadline_s`."""
        while time.monotonic() - since_s < deadline_s:
            if self.pid() not in (None, killed) and self.works(since_s):
                return time.monotonic()
            time.sleep(0.25)
        return None


def child(parent: int, words: Sequence[str]) -> int | None:
    """The child process with these words in its command line; None where there is none that runs."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            argv = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:  # ended meanwhile
            continue
        if int(ppid) == parent and state != "Z" and set(words) <= set(argv):
            return int(entry.name)
    return None


def total(url: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples with these labels; 0 where the server does not answer."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text
    except httpx.HTTPError:
        return 0.0
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
