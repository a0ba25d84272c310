"""Placement of a helper thread on a CPU: on other cores than the engine's compute threads, and without worker
threads.

vLLM pins its compute threads, and a thread that the pinned main thread starts inherits the main thread's
core. PyTorch would also split each larger copy over all compute cores. Both would delay the forward pass.

Needs torch, but not vLLM.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

import torch


def leave_compute_cores() -> None:
    """Move the calling thread to cores of the same NUMA node to which no thread of this process is pinned,
    and run its PyTorch operations only in this thread."""
    _run_alone()
    with suppress(OSError):
        allowed, pinned = os.sched_getaffinity(os.getppid()), _pinned_cores()
        free, nodes = allowed - pinned, {_node(core) for core in pinned}
        os.sched_setaffinity(0, {core for core in free if _node(core) in nodes} or free or allowed)


def _pinned_cores() -> set[int]:
    """Cores to which threads of this process are pinned, one core each."""
    pinned: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            cores = os.sched_getaffinity(int(thread.name))
            if len(cores) == 1:
                pinned |= cores
    return pinned


def _node(core: int) -> str:
    """Name of the NUMA node of a core, or "" if the kernel does not report it."""
    return next((node.name for node in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")), "")


def _run_alone() -> None:
    # torch.set_num_threads would also change the main thread's number, and vLLM replaces it. PyTorch sets a
    # thread's number once, at its first use, so that has to happen first.
    torch.get_num_threads()
    with suppress(AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
