"""Where copies of KV run: on the CPU at once, or on a GPU's stream beside the engine's.

Needs torch and nothing of vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.vllm_connector.kv_copies.helper_thread import leave_compute_cores


class CopySide(Protocol):
    """Where copies run beside the engine's own work."""

    def enter_thread(self) -> None:
        """Make the device this thread's own; before anything else of that thread."""

    def mark(self) -> Any:
        """The point that the engine's work has reached now."""

    def after(self, mark: Any) -> AbstractContextManager[None]:
        """A context whose copies begin once the engine's work has reached `mark`."""

    def begun(self) -> Any:
        """The end of everything begun within `after` so far."""

    def wait(self, end: Any) -> None:
        """Wait until `end`, which `begun` returned, has happened."""

    def done(self, end: Any) -> bool:
        """Whether `end`, which `begun` returned, has happened."""

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Host memory that the device's copies reach by themselves."""


class CpuSide:
    """A device without streams: everything happens at once."""

    def enter_thread(self) -> None:
        leave_compute_cores()

    def mark(self) -> None:
        return None

    @contextmanager
    def after(self, mark: None) -> Iterator[None]:
        yield

    def begun(self) -> None:
        return None

    def wait(self, end: None) -> None:
        """Everything has happened."""

    def done(self, end: None) -> bool:
        return True

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype)


class CudaSide:
    """A stream beside the engine's; `mark` is a point of the engine's stream."""

    def __init__(self, device: torch.device, *, urgent: bool = False) -> None:
        """The device runs kernels of an `urgent` stream before those of others."""
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def enter_thread(self) -> None:
        # A thread begins on device 0: a rank of another one would make itself a context there.
        torch.cuda.set_device(self._device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def after(self, mark: torch.cuda.Event) -> Iterator[None]:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield

    def begun(self) -> torch.cuda.Event:
        # The waiting thread sleeps: it would keep a core from the engine else.
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event

    def wait(self, end: torch.cuda.Event) -> None:
        end.synchronize()

    def done(self, end: torch.cuda.Event) -> bool:
        return end.query()

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)


class TokenIndex:
    """Where the tokens of a slab lie, on its way to the device. Made at its first use and kept."""

    def __init__(self, side: CopySide, tokens: int) -> None:
        """For at most so many tokens."""
        self._side, self._tokens = side, tokens
        self._there: torch.Tensor | None = None

    @cached_property
    def _here(self) -> torch.Tensor:
        return self._side.host((2 * self._tokens,), torch.int64)

    def send(
        self, blocks: NDArray[np.int64], slots: NDArray[np.int64], to: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, slot) of each token on the device, both of shape (n,). Called within `CopySide.after`; not
        again before that slab's end."""
        if self._there is None:
            self._there = torch.empty_like(self._here, device=to)
        n, there = len(blocks), self._there
        here = self._here[: 2 * n]
        here.copy_(torch.from_numpy(np.concatenate([blocks, slots])))
        there[: 2 * n].copy_(here, non_blocking=True)
        return there[:n], there[n : 2 * n]
