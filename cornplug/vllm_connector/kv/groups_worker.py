"""Worker half of the KV connector for a model with several cache groups, which may include groups of
recurrent states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageLoad, PageSave
from cornplug.vllm_connector.kv.worker import KVWorker
from cornplug.vllm_connector.kv_copies.layout import BlockLayout, single_row_layout


class StateWorker(KVWorker):
    """Copies the recurrent states of one cache group on one rank. A block is one row of bytes per layer.
    Positions are counted in blocks instead of tokens."""

    def __init__(
        self,
        pages: RankPages,
        background_timeout_s: float,
        *,
        other_worker: KVWorker | None,
        slab_share: float,
    ) -> None:
        super().__init__(pages, 1, background_timeout_s, other_worker=other_worker, slab_share=slab_share)

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Start to load pages into the requests' blocks. vLLM runs a request after `take_finished` has
        returned its id."""
        size = self._page.page_tokens
        super().start_loads([replace(load, start=load.start // size, end=load.end // size) for load in loads])

    def _derive_layouts(
        self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
    ) -> Sequence[BlockLayout]:
        """Return one layout per layer, in which a block is a single row of bytes. Raises LayoutError if a
        layer's states do not fill each block from its start."""
        for name, cache in caches.items():
            if tuple(cache.shape[1:]) != (1, 1, self._page.dim) or cache.dtype != torch.int8:
                raise LayoutError(
                    f"{name} has states of {cache.dtype} {tuple(cache.shape)}, expected blocks of "
                    f"{self._page.dim} bytes",
                    reason="layout",
                )
            _require_packed(name, cache, layers[name].kv_cache)
        return [single_row_layout(self._page.dim)] * len(caches)


def _require_packed(name: str, cache: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    """Raise LayoutError unless a layer's states are stored one directly after another in each block of its
    cache."""
    at, step = cache.data_ptr(), cache.stride(0)
    for state in states:
        size = state[0].numel() * state.element_size()
        where = state.data_ptr(), state.stride(0) * state.element_size(), len(state)
        if where != (at, step, len(cache)) or not state[0].is_contiguous():
            raise LayoutError(f"{name} keeps a state outside the blocks of its cache", reason="layout")
        at += size
    if at - cache.data_ptr() != cache.shape[-1] or cache.stride(-1) != 1:
        raise LayoutError(f"the states of {name} do not fill its blocks", reason="layout")


class GroupsWorker:
    """Worker half of the KV connector on one rank: one `KVWorker` per cache group. All groups share one
    mover.

    A request's load ends when it has ended in all cache groups. If it fails in one group, the request's
    entire load fails, because vLLM's block numbers do not identify the group of a damaged block.
    """

    def __init__(self, workers: Sequence[KVWorker], layer_names: Sequence[Sequence[str]]) -> None:
        """Create the worker half. `layer_names` has one list of layer names per worker, in the order of the
        layers in a page."""
        self._workers, self._layer_names = workers, layer_names
        self._acks = CornplugKVWorkerMetadata()
        self._loading: dict[str, int] = {}
        """Number of cache groups that are still loading pages for a request, by request id."""
        self._failed: set[str] = set()
        self._last_failed: set[str] = set()

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Register this rank's KV caches and their layers, both by layer name.

        If a cache cannot be mapped to pages, the scheduler half is notified and stops sharing.
        """
        known = {name for names in self._layer_names for name in names}
        others = caches.keys() - known
        if known - caches.keys() or not all(_reuses_cache(name, known, caches, layers) for name in others):
            error = LayoutError(
                f"unexpected layers in the KV caches: {sorted(known ^ caches.keys())}", reason="layout"
            )
            for worker in self._workers:
                worker.report_unusable(error)
            return
        for worker, names in zip(self._workers, self._layer_names, strict=True):
            worker.register({name: caches[name] for name in names}, layers)

    def begin_step(self, *, computes: bool) -> None:
        """Limit the CPU time for copies during the step that begins now, if `computes` is set and the engine
        computes on the CPU."""
        self._workers[0].begin_step(computes=computes)

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Start to load pages into the requests' blocks. vLLM runs a request after `take_finished` has
        returned its id."""
        for load in loads:
            self._loading[load.request_id] = self._loading.get(load.request_id, 0) + 1
            self._workers[load.group].start_loads([load])

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
            received |= _finish_groups(self._loading, worker.take_finished())
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
        """Return the ids of the requests that `take_finished` returned last and whose load failed."""
        return self._last_failed

    def take_bad_blocks(self) -> set[int]:
        """Return an empty set, because `failed_loads` returns the requests whose load failed."""
        return set()

    def take_acks(self) -> CornplugKVWorkerMetadata | None:
        """Return the acknowledgements since the last call, or None if there are none. Call `acks` after
        `take_finished`."""
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


def _finish_groups(open_groups: dict[str, int], ended: set[str]) -> set[str]:
    """Count one loading group less for each request in `ended`, and return the ids of requests whose load has
    now ended in all groups."""
    over = set()
    for request_id in ended:
        open_groups[request_id] -= 1
        if not open_groups[request_id]:
            del open_groups[request_id]
            over.add(request_id)
    return over
