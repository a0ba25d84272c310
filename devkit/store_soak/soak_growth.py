"""Memory, descriptors, threads and mappings of a process over time, and whether they grow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_PROC: Final = Path("/proc")
_LEAST_S: Final = 40.0
"""Of samples after warm-up: in less time the number of clients that connect decides."""


@dataclass(frozen=True)
class ProcessSample:
    """A look at one process."""

    at_s: float
    private_bytes: int
    """Anonymous memory: the arena, which all clients map, is not in it."""
    descriptors: int
    threads: int
    arenas: int
    """Mappings of memory without a name: those of dead daemons must go."""


@dataclass(frozen=True)
class GrowthBound:
    """The growth that a process may have from its first to its last minutes: of bytes, a start and a rate; of
    the rest, what two clients more make in a daemon."""

    private_bytes: int = 24 << 20
    private_bytes_min: float = 1 << 20
    descriptors: int = 12
    threads: int = 4
    arenas: int = 6


@dataclass(frozen=True)
class GrowthFound:
    """The growth of one process between the first and the last third of its samples after warm-up."""

    minutes: float
    private_bytes: int
    descriptors: int
    threads: int
    arenas: int

    def excess(self, bound: GrowthBound) -> list[str]:
        """A line for each quantity that grew beyond its bound."""
        allowed = bound.private_bytes + bound.private_bytes_min * self.minutes
        lines = []
        if self.private_bytes > allowed:
            grown, most = self.private_bytes / 2**20, allowed / 2**20
            lines.append(f"private memory grew by {grown:.0f} MiB, bound {most:.0f} MiB")
        for name in ("descriptors", "threads", "arenas"):
            if getattr(self, name) > getattr(bound, name):
                lines.append(f"{name} grew by {getattr(self, name)}, bound {getattr(bound, name)}")
        return lines


def sample_process(pid: int, at_s: float) -> ProcessSample | None:
    """A look at a process, or None when it has ended."""
    try:
        status = dict(
            line.split(":", 1) for line in (_PROC / f"{pid}/status").read_text().splitlines() if ":" in line
        )
        descriptors = len(os.listdir(_PROC / f"{pid}/fd"))
        arenas = (_PROC / f"{pid}/maps").read_text().count("/memfd:")
    except (FileNotFoundError, ProcessLookupError):
        return None
    if "RssAnon" not in status:  # a zombie has none
        return None
    private_bytes = int(status["RssAnon"].split()[0]) << 10
    return ProcessSample(at_s, private_bytes, descriptors, int(status["Threads"]), arenas)


def growth(samples: list[ProcessSample], *, warm_up_s: float) -> GrowthFound | None:
    """The growth of the lowest values, or None of too few samples. Copies of large entries come and go, so
    the lowest value of a third is what the process keeps."""
    if not samples:
        return None
    warm = [sample for sample in samples if sample.at_s >= samples[0].at_s + warm_up_s]
    third = len(warm) // 3
    if third < 3 or warm[-1].at_s - warm[0].at_s < _LEAST_S:
        return None
    first, last = warm[:third], warm[-third:]

    def grown(name: str) -> int:
        return int(min(getattr(s, name) for s in last) - min(getattr(s, name) for s in first))

    minutes = (last[0].at_s - first[0].at_s) / 60
    return GrowthFound(
        minutes, grown("private_bytes"), grown("descriptors"), grown("threads"), grown("arenas")
    )
