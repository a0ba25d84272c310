"""Caches of states that are rows of bytes, and those that are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cornplug.engine_common.rank_pages import RankPages
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv.group_worker import StateGroupWorker

BLOCKS = 4
PAGE = PageGeometry(
    page_tokens=32, heads=1, layers=1, dim=48, dtype="uint8", planes=1, state="GDN", group=(0,)
)  # fmt: skip


def views(cache: torch.Tensor, at: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A convolution's state and a recurrent one, as vLLM's layers have them."""
    rows = cache[:, 0, 0]
    conv = rows[:, at : at + 16].view(torch.bfloat16).view(-1, 2, 4)
    return conv, rows[:, at + 16 : at + 48].view(torch.float32).view(-1, 2, 4)


def refused(store: MemoryStore, cache: torch.Tensor, states: Any) -> str:
    """Why a worker does not map this cache; "" where it does."""
    pages = RankPages(PAGE, RankSlice(heads=range(1), layers=range(1), writes=True), store.connect())
    worker = StateGroupWorker(pages, 1.0, other_worker=None, slab_share=1.0)
    worker.register({"a": cache}, {"a": SimpleNamespace(kv_cache=states)})
    acks = worker.take_acks()
    worker.close()
    return acks.unusable_reason if acks is not None else ""


def rows(stride: int = 48, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    return torch.zeros(BLOCKS * stride, dtype=dtype).as_strided((BLOCKS, 1, 1, 48), (stride, 48, 48, 1))


@pytest.mark.parametrize("stride", [48, 64])
def test_state_worker_maps_blocks_that_hold_the_states_alone(store: MemoryStore, stride: int) -> None:
    cache = rows(stride)
    assert refused(store, cache, views(cache)) == ""


def test_state_worker_refuses_states_elsewhere(store: MemoryStore) -> None:
    cache = rows(64)
    conv, recurrent = views(cache)
    assert refused(store, cache, (recurrent, conv)) == "layout"
    assert refused(store, cache, (conv,)) == "layout"
    assert refused(store, cache, (conv.clone(), recurrent)) == "layout"
    assert refused(store, cache, (conv.transpose(1, 2), recurrent)) == "layout"
    assert refused(store, cache[:, :, :, :32], (conv, recurrent)) == "layout"
    assert refused(store, rows(dtype=torch.uint8), (conv, recurrent)) == "layout"
