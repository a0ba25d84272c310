"""Processes kept to a core, and to a share of one: a CPU's equivalent of a plan's share of a device.

Shares are CPU quotas of a control group (version 1 or 2), which only root may make.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000
"""Short against an engine's iterations: a share is then a slower core and no stutter."""


def pin(pids: Iterable[int], cores: Iterable[int]) -> None:
    """Keep every thread of these processes, and later ones that they start, to `cores`."""
    wanted = set(cores)
    for pid in pids:
        try:
            threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
        except FileNotFoundError:
            continue
        for thread in threads:
            try:
                os.sched_setaffinity(thread, wanted)
            except ProcessLookupError:
                continue


@contextmanager
def share(name: str, pids: Iterable[int], part: float) -> Iterator[None]:
    """Give these processes `part` of one core's time, together, inside the block and until they end.

    Raises PermissionError where that is not allowed.
    """
    group = _controller() / f"cornplug-{os.getpid()}-{name}"
    group.mkdir()
    quota = round(part * _PERIOD_US)
    try:
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        for pid in pids:
            (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        _leave(group)


def descendants(pid: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            parent = int(stat[stat.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    return found


def _controller() -> Path:
    """Where groups with CPU quotas are made: version 1 below our own group, version 2 below the root."""
    if not (_ROOT / "cpu").is_dir():
        return _ROOT
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return _ROOT / "cpu" / path.lstrip("/")
    return _ROOT / "cpu"


def _leave(group: Path) -> None:
    """Processes that still run go back to the group above; then the group goes."""
    for pid in (group / "cgroup.procs").read_text().split():
        try:
            (group.parent / "cgroup.procs").write_text(pid)
        except ProcessLookupError:
            continue
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)
