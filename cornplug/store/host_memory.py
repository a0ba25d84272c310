"""Memory that a store can use: the minimum over the host and all cgroups of this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_CGROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc")


class MemoryBound(NamedTuple):
    """The tightest limit: the host's memory, or the limit of a cgroup."""

    total_bytes: int
    available_bytes: int
    """Available memory. Page cache counts as available, because the kernel can reclaim it."""
    of: str
    """Name of the limit, for messages."""


def host_memory(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> MemoryBound:
    """Return the memory that this process can use now. Raises OSError if /proc is not mounted."""
    return min([_host(proc), *_limits(proc, cgroups)], key=lambda memory: memory.available_bytes)


def _host(proc: Path) -> MemoryBound:
    found = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    total, available = (int(found[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    return MemoryBound(total, available, "this host's memory")


def _limits(proc: Path, cgroups: Path) -> Iterator[MemoryBound]:
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Beyond "high" no process is killed, but all that allocate there are slowed down.
            for limit in ("memory.max", "memory.high"):
                yield from _walk(cgroups, path, limit, "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _walk(cgroups / "memory", path, *names)


def _walk(root: Path, path: str, limit: str, usage: str, cache: str) -> Iterator[MemoryBound]:
    """A group's bound and those of the groups around it. In a container the path may be the host's,
    and only the root, which is the container's own group, is there to see."""
    at = root / path.lstrip("/")
    for group in [at, *at.parents]:
        # No limit reads "max" in version 2, and in version 1 the largest number of pages.
        with contextlib.suppress(OSError, ValueError):
            total = int((group / limit).read_text())
            used = int((group / usage).read_text())
            if total < 1 << 60:
                spare = _field(group / "memory.stat", cache)
                yield MemoryBound(total, max(0, total - used + spare), f"the limit of cgroup {group}")
        if group == root:
            return


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
