"""How the tensor-parallel ranks of one engine write a page together.

Each rank's backups come in the same order, from a queue that all ranks fill in step. For each
batch rank 0 says where the pages go, every rank writes its heads, and rank 0 learns their
checksums. Every step has a deadline: a rank that is late or gone ends the writing for good, on
each rank by itself, and nobody waits for it again. Reading needs none of this.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from cornplug.errors import CornplugError
from cornplug.sglang_hooks.compat import logger

STEP_S: Final = 10.0
"""A background thread of a busy rank may well be seconds behind another's."""

Sums = NDArray[np.uint64]


class RanksApart(CornplugError):
    """The ranks no longer answer each other (`reason` "ranks")."""


class Ranks:
    """One rank's end; make it on every rank, in the same order as other groups of theirs.

    Args:
        size: ranks of the process group `torch.distributed` was set up with: all of them.
        step_s: how long one step waits for the others.
    """

    def __init__(self, size: int, rank: int, *, step_s: float = STEP_S) -> None:
        self.size, self.rank = size, rank
        self.apart = False
        """Whether a step has failed: none is tried again."""
        self._group = (
            torch.distributed.new_group(list(range(size)), backend="gloo", timeout=timedelta(seconds=step_s))
            if size > 1
            else None
        )

    def announce(self, message: bytes) -> bytes:
        """Rank 0's message, on every rank; that of others is ignored. Raises RanksApart."""
        if self._group is None:
            return message
        length = torch.tensor([len(message)], dtype=torch.int64)
        self._step(lambda: torch.distributed.broadcast(length, 0, group=self._group))
        size = int(length.item())
        if not size:
            return b""
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if self.rank == 0 else None
        if data is None:
            data = torch.empty(size, dtype=torch.uint8)
        self._step(lambda: torch.distributed.broadcast(data, 0, group=self._group))
        return data.numpy().tobytes()

    def gather(self, mine: Sums) -> list[Sums]:
        """Every rank's array, in the order of ranks; all have one shape. Raises RanksApart."""
        if self._group is None:
            return [mine]
        flat = torch.from_numpy(np.ascontiguousarray(mine).view(np.int64))
        found = [torch.empty_like(flat) for _ in range(self.size)]
        self._step(lambda: torch.distributed.all_gather(found, flat, group=self._group))
        return [tensor.numpy().view(np.uint64) for tensor in found]

    def agree(self, willing: bool) -> bool:
        """Whether every rank is willing. Raises RanksApart."""
        return all(bool(row[0]) for row in self.gather(np.array([willing], np.uint64)))

    def _step(self, step: Callable[[], object]) -> None:
        if self.apart:
            raise RanksApart("an earlier step was not answered", reason="ranks")
        try:
            step()
        except RuntimeError as e:  # torch's DistError and gloo's time-outs
            self.apart = True
            logger.warning("cornplug: this engine's ranks write no more pages together: %s", e)
            raise RanksApart(str(e), reason="ranks") from e
