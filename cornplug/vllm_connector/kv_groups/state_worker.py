"""Worker half's copies of recurrent states. A block is one row of bytes per layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.metadata import PageLoad
from cornplug.vllm_connector.kv.worker import KVWorker
from cornplug.vllm_connector.kv_copies.layout import BlockLayout, whole_rows


class StateWorker(KVWorker):
    """Worker half of one rank and cache group of states. It counts blocks, and `KVWorker` counts tokens."""

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
