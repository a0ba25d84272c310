"""A device whose copies arrive late, played on CPU tensors with real bytes.

A copy into pinned memory has arrived only once the stream was waited for, and one that PyTorch
leads through a pageable temporary leaves whatever that held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

STALE = -9.0
"""What host memory holds until a copy has arrived."""
_COPY = torch.ops.aten.copy_.default


class LateDevice(TorchDispatchMode):
    """Everything but what `host` gave lies on the device. Enter it on the thread that copies."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[torch.Tensor] = []
        """Pinned memory that was allocated."""
        self.pending: list[tuple[int, Callable[[], Any]]] = []
        """(number of its end, copy) of copies that have not arrived."""
        self._ends = 0
        self._asked: set[int] = set()
        self.pageable = 0
        """Copies that PyTorch led through a temporary."""

    # -- a `CopyBackend` -----------------------------------------------------------------

    def enter_thread(self) -> None:
        return None

    def mark(self) -> None:
        return None

    @contextmanager
    def start_after(self, mark: None) -> Iterator[None]:
        with self:
            yield

    def allocate_host(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            memory = torch.empty(tuple(shape), dtype=dtype)
        self.hosts.append(memory)
        return memory

    def record_end(self) -> int:
        self._ends += 1
        return self._ends

    def wait(self, end: int) -> None:
        """What was begun before this `end` has happened, later copies have not."""
        for _, happen in [one for one in self.pending if one[0] < end]:
            happen()
        self.pending = [one for one in self.pending if one[0] >= end]

    def is_done(self, end: int) -> bool:
        """False at first."""
        if end not in self._asked:
            self._asked.add(end)
            return False
        self.wait(end)
        return True

    def finish(self) -> None:
        """The stream has been waited for."""
        self.wait(self.record_end())

    def later(self, happen: Callable[[], Any]) -> None:
        self.pending.append((self._ends, happen))

    # -- what happens -----------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not _COPY:
            return func(*args, **(kwargs or {}))
        target, source = args[:2]
        late = bool((kwargs or {}).get("non_blocking") or (len(args) > 2 and args[2]))
        if late and self._at_host(target) and not self._at_host(source):
            # As `copy_requires_temporaries` of ATen/native/cuda/Copy.cu.
            if target.is_contiguous() and source.is_contiguous():
                now = source.clone()
                self.later(lambda: target.copy_(now))
            else:
                self.pageable += 1
            return target.fill_(STALE)
        if late and self._at_host(source):
            before = source.clone()
            self.later(lambda: _unchanged(source, before))
        return func(*args, **(kwargs or {}))

    def _at_host(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage().data_ptr()
        return any(one.untyped_storage().data_ptr() == storage for one in self.hosts)


def _unchanged(source: torch.Tensor, before: torch.Tensor) -> None:
    assert torch.equal(source, before), "host memory was changed while the device read it"
