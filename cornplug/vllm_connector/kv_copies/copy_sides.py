"""Devices and streams on which KV is copied: the CPU (synchronously), or a separate GPU stream.

On a CPU, the thread that copies KV must not delay the forward pass. vLLM pins its compute threads, and a
thread that the pinned main thread starts inherits the main thread's core. PyTorch would also split each
larger copy over all compute cores. Therefore the copying thread moves to other cores, and does not use
PyTorch's worker threads.

This module needs torch, but not vLLM.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


def leave_compute_cores() -> None:
    """Move the calling thread to cores of the same NUMA node to which no thread of this process is pinned.
    From then on, PyTorch runs this thread's operations only in this thread."""
    _limit_to_one_thread()
    with suppress(OSError):
        allowed, pinned = os.sched_getaffinity(os.getppid()), _pinned_cores()
        free, nodes = allowed - pinned, {_numa_node(core) for core in pinned}
        os.sched_setaffinity(0, {core for core in free if _numa_node(core) in nodes} or free or allowed)


def _pinned_cores() -> set[int]:
    """Return the cores to which threads of this process are pinned. Threads that may run on several cores are
    ignored."""
    pinned: set[int] = set()
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):
            cores = os.sched_getaffinity(int(thread.name))
            if len(cores) == 1:
                pinned |= cores
    return pinned


def _numa_node(core: int) -> str:
    """Return the name of the NUMA node of a core, or "" if the kernel does not report it."""
    return next((node.name for node in Path(f"/sys/devices/system/cpu/cpu{core}").glob("node[0-9]*")), "")


def _limit_to_one_thread() -> None:
    # torch.set_num_threads would also change the main thread's number of threads, and vLLM replaces that
    # function. PyTorch sets the number of threads of a new thread at the thread's first use of PyTorch. Use
    # PyTorch once before changing the number.
    torch.get_num_threads()
    with suppress(AttributeError):
        ctypes.CDLL(None).omp_set_num_threads(1)


class CopyBackend(Protocol):
    """Interface to the device or stream on which copies run in parallel with the engine's own work."""

    def enter_thread(self) -> None:
        """Set the device of the calling thread. Call this before anything else in that thread."""

    def mark(self) -> Any:
        """Return a mark for the current position in the engine's work, as an argument for `start_after`."""

    def start_after(self, mark: Any) -> AbstractContextManager[None]:
        """Return a context. Copies that start within the context begin after the engine's work has reached
        `mark`."""

    def record_end(self) -> Any:
        """Return an event that occurs when all copies that have been started within `start_after` have
        completed."""

    def wait(self, end: Any) -> None:
        """Wait for the event `end`, which `record_end` returned."""

    def is_done(self, end: Any) -> bool:
        """Return whether the event `end`, which `record_end` returned, has occurred."""

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate host memory that the device can access directly."""


class CpuBackend:
    """Synchronous copies, for a device without streams."""

    def enter_thread(self) -> None:
        leave_compute_cores()

    def mark(self) -> None:
        return None

    @contextmanager
    def start_after(self, mark: None) -> Iterator[None]:
        yield

    def record_end(self) -> None:
        return None

    def wait(self, end: None) -> None:
        """Do nothing, because copies are synchronous."""

    def is_done(self, end: None) -> bool:
        return True

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


class CudaBackend:
    """Asynchronous copies on a separate CUDA stream. `mark` returns an event on the engine's stream."""

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        """Create a stream for copies. If `urgent`, the device runs its kernels before the kernels of other
        streams."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def enter_thread(self) -> None:
        # A new thread uses device 0 by default, and would create a CUDA context on it.
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def start_after(self, mark: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def record_end(self) -> torch.cuda.Event:
        # With a blocking event, the waiting thread sleeps and does not occupy a core that the engine needs.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, end: torch.cuda.Event) -> None:
        end.synchronize()

    def is_done(self, end: torch.cuda.Event) -> bool:
        return end.query()

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


class TokenIndex:
    """Buffers for the block and slot numbers of a slab's tokens, on the host and on the device. They are
    allocated on first use and reused."""

    def __init__(self, backend: CopyBackend, tokens: int) -> None:
        """Prepare buffers for at most `tokens` tokens."""
        self._backend, self._tokens = backend, tokens
        self._device_buffer: torch.Tensor | None = None

    @cached_property
    def _host_buffer(self) -> torch.Tensor:
        return self._backend.allocate_host((2 * self._tokens,), torch.int64)

    def send(
        self, blocks: NDArray[np.int64], slots: NDArray[np.int64], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the block and slot numbers of n tokens to the device, and return both as tensors of shape
        (n,). Call this within `CopyBackend.start_after`. Do not call it again until the slab's copies have
        completed."""
        if self._device_buffer is None:
            self._device_buffer = torch.empty_like(self._host_buffer, device=device)
        n, there = len(blocks), self._device_buffer
        here = self._host_buffer[: 2 * n]
        here.copy_(torch.from_numpy(np.concatenate([blocks, slots])))
        there[: 2 * n].copy_(here, non_blocking=True)
        return there[:n], there[n : 2 * n]
