"""Worker half of the KV connector for a model with several cache groups, also of recurrent states."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageLoad, PageSave
from cornplug.vllm_connector.kv.worker import KVWorker
from cornplug.vllm_connector.kv_copies.layout import BlockLayout, whole_rows

if TYPE_CHECKING:
    import torch


class StateWorker(KVWorker):
    """Worker half of one rank and cache group of states. A block is one row of bytes per layer. It counts
    blocks, and `KVWorker` counts tokens."""

    def __init__(
        self, pages: RankPages, background_timeout_s: float, *, beside: KVWorker | None, share: float
    ) -> None:
        super().__init__(pages, 1, background_timeout_s, beside=beside, share=share)

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Start loads. Their requests run after `finished` returns them."""
        size = self._page.page_tokens
        super().start_loads([replace(load, start=load.start // size, end=load.end // size) for load in loads])

    def _layouts(
        self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
    ) -> Sequence[BlockLayout]:
        """Return a layout of one row of bytes, if the layer's own views of its states fill each block from
        its start."""
        for name, cache in caches.items():
            if tuple(cache.shape[1:]) != (1, 1, self._page.dim) or cache.dtype != torch.int8:
                raise LayoutError(
                    f"{name} has states of {cache.dtype} {tuple(cache.shape)}, expected blocks of "
                    f"{self._page.dim} bytes",
                    reason="layout",
                )
            _require_packed(name, cache, layers[name].kv_cache)
        return [whole_rows(self._page.dim)] * len(caches)


def _require_packed(name: str, cache: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
    """Raise LayoutError unless a layer's states are stored contiguously in each block of its cache."""
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
    """Worker half of one rank: a `KVWorker` for each cache group, with a common mover. A load ends when all
    groups have ended theirs. It fails as a whole, because vLLM's block numbers do not identify the group of a
    damaged block."""

    def __init__(self, workers: Sequence[KVWorker], layer_names: Sequence[Sequence[str]]) -> None:
        """Create the worker half. `layer_names` has the layers of each group, in the order of its page."""
        self._workers, self._layer_names = workers, layer_names
        self._acks = CornplugKVWorkerMetadata()
        self._loading: dict[str, int] = {}
        """Number of groups that have not ended the load, by request."""
        self._failed: set[str] = set()
        self._failed_now: set[str] = set()

    def register(self, caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]) -> None:
        """Register the caches of this rank, by their layers' names.

        A cache that cannot be mapped is reported to the scheduler half, which stops sharing.
        """
        known = {name for names in self._layer_names for name in names}
        others = caches.keys() - known
        if known - caches.keys() or not all(_reads(name, known, caches, layers) for name in others):
            error = LayoutError(
                f"unexpected layers in the KV caches: {sorted(known ^ caches.keys())}", reason="layout"
            )
            for worker in self._workers:
                worker.refuse(error)
            return
        for worker, names in zip(self._workers, self._layer_names, strict=True):
            worker.register({name: caches[name] for name in names}, layers)

    def begin_step(self, *, computes: bool) -> None:
        """Limit the CPU share of copies in a step that computes tokens on the CPU."""
        self._workers[0].begin_step(computes=computes)

    def start_loads(self, loads: Sequence[PageLoad]) -> None:
        """Start loads. Their requests run after `finished` returns them."""
        for load in loads:
            self._loading[load.request_id] = self._loading.get(load.request_id, 0) + 1
            self._workers[load.group].start_loads([load])

    def start_saves(self, saves: Sequence[PageSave]) -> None:
        """Start to save pages that this step's forward pass has computed."""
        for i, worker in enumerate(self._workers):
            worker.start_saves([save for save in saves if save.group == i])

    def stepped(self, number: int) -> None:
        """Acknowledge the end of a timed step with the next acknowledgements."""
        self._workers[0].stepped(number)

    def give_up_saves(self, names: Collection[str]) -> None:
        """Report pages of these saves that are not acknowledged yet as not written. Does not wait."""
        for worker in self._workers:
            worker.give_up_saves(names)

    def drain(self) -> None:
        """Wait until no block is being read or written."""
        for worker in self._workers:
            worker.drain()

    def finished(self) -> set[str]:
        """Return the ids of requests whose load ended since the last call."""
        received: set[str] = set()
        for worker in self._workers:
            received |= _over(self._loading, worker.finished())
            worker.bad_blocks()
            self._acknowledge(worker.acks())
        self._failed_now = self._failed & received
        self._failed -= received
        return received

    def _acknowledge(self, acks: CornplugKVWorkerMetadata | None) -> None:
        if acks is None:
            return
        self._failed |= acks.failed_loads.keys()
        # Loads of the groups ran one after the other, loads of ranks in parallel.
        seconds = self._acks.loading_s + acks.loading_s
        self._acks.aggregate(acks)
        self._acks.loading_s = seconds

    def failed(self) -> set[str]:
        """Return the requests of the last result of `finished` whose load failed."""
        return self._failed_now

    def bad_blocks(self) -> set[int]:
        """Return an empty set, see `failed`."""
        return set()

    def acks(self) -> CornplugKVWorkerMetadata | None:
        """Return acknowledgements since the last call, or None if there are none. Call it after
        `finished`."""
        acks, self._acks = self._acks, CornplugKVWorkerMetadata()
        return None if acks.is_empty() else acks

    def close(self) -> None:
        """Finish the slabs that are being copied, and drop all others."""
        for worker in self._workers:
            worker.close()


def _reads(
    name: str, known: Collection[str], caches: Mapping[str, torch.Tensor], layers: Mapping[str, Any]
) -> bool:
    """Return whether a layer has no cache of its own and reads the cache of a known layer, under whose name
    pages contain it."""
    target: str | None = getattr(layers.get(name), "kv_sharing_target_layer_name", None)
    return target is not None and target in known and caches[name].data_ptr() == caches[target].data_ptr()


def _over(open_groups: dict[str, int], ended: set[str]) -> set[str]:
    """Return the requests whose load has ended in all groups."""
    over = set()
    for request_id in ended:
        open_groups[request_id] -= 1
        if not open_groups[request_id]:
            del open_groups[request_id]
            over.add(request_id)
    return over
