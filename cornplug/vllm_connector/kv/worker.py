"""Worker half of the KV connector: one `GroupWorker` per cache group of the model, or `DisabledKVWorker` on a
rank that does not share KV."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, Self

import torch

from cornplug.errors import LayoutError
from cornplug.kv_page import MAX_SEGMENTS
from cornplug.vllm_connector.kv.group_worker import GroupWorker
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageLoad, PageSave

_BY_GROUP: Final = attrgetter("group")


class KVWorker:
    """Worker half of the KV connector on one rank: one `GroupWorker` per cache group. All groups share one
    mover.

    A request's load ends when it has ended in all cache groups. If a load fails in a model with one group,
    `take_bad_blocks` returns the damaged blocks, so that vLLM keeps the blocks before them. With several
    groups, the request's entire load fails and `failed_loads` returns its id, because vLLM's block numbers do
    not identify the group of a damaged block.
    """

    def __init__(
        self,
        workers: Sequence[GroupWorker],
        layer_names: Sequence[Sequence[str]],
        *,
        allow_shared_caches: bool = True,
    ) -> None:
        """Create the worker half. `layer_names` has one list of layer names per worker, in the order of the
        layers in a page. If `allow_shared_caches` is False, layers that use another layer's cache are
        rejected."""
        self._workers, self._layer_names = workers, layer_names
        self._has_several_groups = len(workers) > 1
        self._allow_shared_caches = allow_shared_caches
        self._acks = CornplugKVWorkerMetadata()
        """Acknowledgements of all groups, if there are several."""
        self._loading = defaultdict[str, int](int)
        """Number of loads in progress, by request id. A request has one load per cache group."""
        self._failed: set[str] = set()
        self._last_failed: set[str] = set()

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Register this rank's KV caches and their layers, both by layer name. A layer that uses another
        layer's cache is left out, because the page already contains that cache.

        If a cache cannot be mapped to pages, the scheduler half is notified and stops sharing.
        """
        known = {name for names in self._layer_names for name in names}
        others = caches.keys() - known
        reused = self._allow_shared_caches and all(
            _reuses_cache(name, known, caches, layers) for name in others
        )
        if known - caches.keys() or (others and not reused):
            error = LayoutError(
                f"unexpected layers in the KV caches: {sorted(known ^ caches.keys())}", reason="layout"
            )
            for worker in self._workers:
                worker.report_unusable(error)
            return
        for worker, names in zip(self._workers, self._layer_names, strict=True):
            worker.register({name: caches[name] for name in names}, layers)

    def begin_step(self, *, computes: bool) -> None:
        """Limit the copies during the step that begins now. `computes` is whether the step computes
        tokens."""
        # All groups share one budget. A group of recurrent states does not use the GPU's direct copies.
        first = next((worker for worker in self._workers if worker.copies_directly), self._workers[0])
        first.begin_step(computes=computes)

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Start to load pages into the requests' blocks. vLLM runs a request after `take_finished` has
        returned its id."""
        for load in loads:
            self._loading[load.request_id] += 1
        for group, adjacent in itertools.groupby(loads, _BY_GROUP):
            self._workers[group].start_loads(list(adjacent))

    def start_saves(self, saves: Sequence[PageSave]) -> None:
        """Start to copy to the store the pages that this step's forward pass has computed."""
        for i, worker in enumerate(self._workers):
            worker.start_saves([save for save in saves if save.group == i])

    def record_step_end(self, number: int) -> None:
        """Include the end of timed step `number` in the next acknowledgements."""
        self._workers[0].record_step_end(number)

    def cancel_saves(self, names: Collection[str]) -> None:
        """Report the pages of these saves as not written, except pages that were already acknowledged. Does
        not wait."""
        for worker in self._workers:
            worker.cancel_saves(names)

    def drain(self) -> None:
        """Wait until no copy reads or writes any KV cache block."""
        for worker in self._workers:
            worker.drain()

    def take_finished(self) -> set[str]:
        """Return the ids of requests whose load has ended in all groups since the last call, successfully or
        not."""
        received: set[str] = set()
        for worker in self._workers:
            received |= _count_ended(self._loading, worker.take_finished())
            if self._has_several_groups:
                worker.take_bad_blocks()
                self._merge_acks(worker.take_acks())
        self._last_failed = self._failed & received
        self._failed -= received
        return received

    def _merge_acks(self, acks: CornplugKVWorkerMetadata | None) -> None:
        if acks is None:
            return
        self._failed |= acks.failed_loads.keys()
        # Groups load one after the other, so their loading times are added. Ranks load in parallel.
        seconds = self._acks.loading_s + acks.loading_s
        self._acks.aggregate(acks)
        self._acks.loading_s = seconds

    def failed_loads(self) -> set[str]:
        """Return the ids of the requests that `take_finished` returned last and whose load failed. Empty for
        a model with one group, whose failures `take_bad_blocks` returns."""
        return self._last_failed

    def take_bad_blocks(self) -> set[int]:
        """Return the ids of the blocks whose load has failed since the last call. A request's failed blocks
        are available no later than `take_finished` returns the request's id. Empty for a model with several
        groups, whose failures `failed_loads` returns."""
        return set() if self._has_several_groups else self._workers[0].take_bad_blocks()

    def take_acks(self) -> CornplugKVWorkerMetadata | None:
        """Return the acknowledgements since the last call, or None if there are none. With several groups,
        these are the acknowledgements that `take_finished` has collected."""
        if not self._has_several_groups:
            return self._workers[0].take_acks()
        acks, self._acks = self._acks, CornplugKVWorkerMetadata()
        return None if acks.is_empty() else acks

    def close(self) -> None:
        """Wait for the slabs that are being copied, and drop all copies that have not started."""
        for worker in self._workers:
            worker.close()


def _reuses_cache(
    name: str, known: Collection[str], caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
) -> bool:
    """Return whether layer `name` has no cache of its own and uses the cache of a known layer. Pages contain
    that cache under the known layer's name."""
    target: str | None = getattr(layers.get(name), "kv_sharing_target_layer_name", None)
    return target is not None and target in known and caches[name].data_ptr() == caches[target].data_ptr()


def _count_ended(open_loads: dict[str, int], ended: Iterable[str]) -> set[str]:
    """Subtract the ended loads, given by request id, from `open_loads`. Return the ids of requests whose
    loads have all ended."""
    over = set()
    for request_id in ended:
        open_loads[request_id] -= 1
        if not open_loads[request_id]:
            del open_loads[request_id]
            over.add(request_id)
    return over


class DisabledKVWorker:
    """Worker half of the KV connector on a rank that does not share KV, or no longer shares it. All loads and
    saves fail immediately.

    The scheduler half may promise a load before it is notified that this rank does not share KV. Without a
    result for the load, the request would wait indefinitely. `reason` is why this rank does not share KV."""

    def __init__(self, block_size: int, reason: str) -> None:
        self._block_size = block_size
        self._reason = reason
        self._acks = CornplugKVWorkerMetadata(unusable_reason=reason)
        self._finished_loads: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._last_failed: set[str] = set()

    @classmethod
    def replacing(cls, worker: KVWorker, block_size: int, reason: str) -> Self:
        """Create a replacement for a worker that failed, which still reports the results of that worker's
        loads and saves."""
        stopped = cls(block_size, reason)
        worker.drain()
        stopped._finished_loads, stopped._bad_blocks = worker.take_finished(), worker.take_bad_blocks()
        if (acks := worker.take_acks()) is not None:
            acks.unusable_reason = acks.unusable_reason or reason
            stopped._acks = acks
        return stopped

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Do nothing, because this rank copies no KV."""

    def begin_step(self, *, computes: bool) -> None:
        """Do nothing, because this rank copies no KV."""

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Report all loads as failed, except loads that the replaced worker has finished."""
        for load in loads:
            if load.request_id in self._finished_loads and load.request_id not in self._acks.failed_loads:
                continue
            self._bad_blocks |= load.blocks_from(load.start, self._block_size)
            self._acks.failed_loads[load.request_id] = self._reason
            self._finished_loads.add(load.request_id)

    def start_saves(self, saves: Sequence[PageSave]) -> None:
        """Report all pages as not written, except pages that the replaced worker has written."""
        for save in saves:
            left = [page.token for page in save.pages if page.token not in self._acks.written]
            self._acks.failed_writes |= dict.fromkeys(left, MAX_SEGMENTS)

    def drain(self) -> None:
        """Do nothing, because this rank copies no KV."""

    def record_step_end(self, number: int) -> None:
        """Do nothing, because this rank measures no steps."""

    def cancel_saves(self, names: Collection[str]) -> None:
        """Do nothing, because this rank saves no pages."""

    def take_finished(self) -> set[str]:
        """Return the ids of requests whose load has ended since the last call, successfully or not."""
        self._last_failed, self._finished_loads = self._finished_loads, set()
        return self._last_failed

    def failed_loads(self) -> set[str]:
        """Return the ids of the requests that `take_finished` returned last.

        With several cache groups, all of them are reported to vLLM as failed, including loads that the
        replaced worker had finished.
        """
        return self._last_failed

    def take_bad_blocks(self) -> set[int]:
        """Return the ids of the blocks whose load has failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_acks(self) -> CornplugKVWorkerMetadata | None:
        """Return the acknowledgements for the scheduler half since the last call, or None if there are
        none."""
        acks, self._acks = self._acks, CornplugKVWorkerMetadata()
        return None if acks.is_empty() else acks

    def close(self) -> None:
        """Do nothing, because no copy is in flight."""
