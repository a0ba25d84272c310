"""Worker half of a rank that does not share KV, or no longer does: every load and save fails immediately.

The scheduler half may have promised a load before it learns of this. Without a reply, that request would wait
indefinitely.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from cornplug.kv_page import MAX_SEGMENTS
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageLoad, PageSave

if TYPE_CHECKING:
    import torch

    from cornplug.vllm_connector.kv.worker import KVWorker
    from cornplug.vllm_connector.kv_groups.groups_worker import GroupsWorker


class DisabledKVWorker:
    """Worker half that fails all loads and saves. `reason` is why this rank does not share."""

    def __init__(self, block_size: int, reason: str) -> None:
        self._block_size = block_size
        self._reason = reason
        self._acks = CornplugKVWorkerMetadata(unusable=reason)
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()

    @classmethod
    def in_place_of(cls, worker: KVWorker | GroupsWorker, block_size: int, reason: str) -> Self:
        """Replace a worker that failed, and keep the results of its loads and saves."""
        stopped = cls(block_size, reason)
        worker.drain()
        stopped._loaded, stopped._bad_blocks = worker.finished(), worker.bad_blocks()
        if (acks := worker.acks()) is not None:
            acks.unusable = acks.unusable or reason
            stopped._acks = acks
        return stopped

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Do nothing."""

    def begin_step(self, *, computes: bool) -> None:
        """Do nothing, because nothing is copied."""

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Fail all loads, except those that the previous worker has finished."""
        for load in loads:
            if load.request_id in self._loaded and load.request_id not in self._acks.failed_loads:
                continue
            self._bad_blocks |= load.blocks_from(load.start, self._block_size)
            self._acks.failed_loads[load.request_id] = self._reason
            self._loaded.add(load.request_id)

    def start_saves(self, saves: Sequence[PageSave]) -> None:
        """Fail all pages, except those that the previous worker has written."""
        for save in saves:
            left = [page.token for page in save.pages if page.token not in self._acks.written]
            self._acks.failed_writes |= dict.fromkeys(left, MAX_SEGMENTS)

    def drain(self) -> None:
        """Do nothing, because nothing is copied."""

    def stepped(self, number: int) -> None:
        """Do nothing, because no measurement is needed."""

    def give_up_saves(self, names: Collection[str]) -> None:
        """Do nothing, because nothing is saved."""

    def finished(self) -> set[str]:
        """Ids of requests whose load ended since the last call."""
        self._failed, self._loaded = self._loaded, set()
        return self._failed

    def failed(self) -> set[str]:
        """The requests that the last call of `finished` returned."""
        return self._failed

    def bad_blocks(self) -> set[int]:
        """Blocks that were not loaded."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def acks(self) -> CornplugKVWorkerMetadata | None:
        """Acknowledgements since the last call, or None if there are none."""
        acks, self._acks = self._acks, CornplugKVWorkerMetadata()
        return None if acks.is_empty() else acks

    def close(self) -> None:
        """Do nothing."""
