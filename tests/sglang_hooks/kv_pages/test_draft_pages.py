"""KV of a draft model in the store: a hit only with the model's, and of nobody but the same draft."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv_pages import draft_pages
from cornplug.sglang_hooks.kv_pages.draft_pages import DraftPages
from cornplug.sglang_hooks.kv_pages.layout import host_pages

from ..kv.test_hicache_storage import TOKENS, attach, name, process, store  # noqa: F401
from ..kv_rig import DIM, HEADS, LAYERS, attached, device_pool, host_pool, latent_pool

ABSENT = [(("test", "kv_page", "absent"), [8])]


@pytest.fixture(autouse=True)
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(draft_pages, "_identify", lambda model: (model.weights, {"config": "x"}))
    yield
    draft_pages.set_draft_model(None)


def draft_model(weights: bytes = b"draft", heads: int = 2) -> Any:
    return SimpleNamespace(
        weights=weights,
        get_total_num_kv_heads=lambda: heads,
        num_hidden_layers=LAYERS,
        hf_config=SimpleNamespace(to_dict=dict),
    )


def drafting(
    weights: bytes = b"draft", heads: int = 2, dim: int = 16, page_size: int = 64, layout: str = "page_first"
) -> tuple[CornplugStorage, Any, Any]:
    """The storage of a server with a draft, as SGLang makes it; its host pool and the draft's."""
    draft_pages.set_draft_model(draft_model(weights, heads))
    backend, host = attach(page_size=page_size, layout=layout)
    return backend, host, register(backend, host, device_pool(page_size, heads=heads, dim=dim), layout)


def register(backend: CornplugStorage, host: Any, device: Any, layout: str) -> Any:
    pool = host_pool(device, layout)
    host.entry_map = {PoolName.DRAFT: SimpleNamespace(host_pool=pool, device_pool=device)}
    backend.register_mem_host_pool_v2(pool, PoolName.DRAFT)
    return pool


def transfer(hashes: list[str], slots: torch.Tensor) -> list[PoolTransfer]:
    return [PoolTransfer(PoolName.DRAFT, host_indices=slots, keys=hashes)]


def kv_of(pool: Any, slots: torch.Tensor) -> torch.Tensor:
    pages = [host_pages(pool).page(int(slot)).clone() for slot in slots[:: pool.page_size]]
    return torch.cat(pages, dim=3)


@pytest.mark.more
def test_draft_pages_load_with_the_models_after_restart() -> None:
    backend, host, draft = drafting(page_size=32)
    hashes, slots = name(TOKENS, 32), host.alloc(512)
    for pool in (host, draft):
        pool.kv_buffer.normal_()
    before = [kv_of(pool, slots) for pool in (host, draft)]
    assert backend.batch_set_v2(transfer(hashes, slots)) == {"draft": [True] * 16}
    assert backend.batch_exists_v2(hashes, transfer(hashes, slots)).kv_hit_pages == 0
    assert backend.batch_set_v1(hashes, slots) == [True] * 16
    backend.close()

    backend, host, draft = drafting(layout="page_head")
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    found = backend.batch_exists_v2(hashes, transfer(hashes, slots))
    assert (found.kv_hit_pages, found.extra_pool_hit_pages) == (8, {PoolName.DRAFT: 8})
    assert backend.batch_get_v1(hashes, slots) == [True] * 8
    assert backend.batch_get_v2(transfer(hashes, slots)) == {"draft": [True] * 8}
    for pool, expected in zip((host, draft), before, strict=True):
        assert torch.equal(kv_of(pool, slots), expected)


@pytest.mark.parametrize("what", ["count_present", "fetch", "offer"])
def test_draft_pages_error_that_nothing_foresaw_is_a_miss(
    process: Tally,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """It would end one of SGLang's threads."""

    def fails(*args: object) -> None:
        raise RuntimeError("a lost device")

    backend, host, _ = drafting()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    monkeypatch.setattr(DraftPages, what, fails)
    backend.batch_set_v1(hashes, slots)
    assert backend.batch_set_v2(transfer(hashes, slots)) == {"draft": [what != "offer"] * 8}
    assert backend.batch_exists_v2(hashes, transfer(hashes, slots)).kv_hit_pages == (
        8 if what == "fetch" else 0
    )
    assert backend.batch_get_v2(transfer(hashes, slots)) == {"draft": [what == "count_present"] * 8}
    assert (("test", "kv_page", "error"), [1]) in process.drain()["cornplug_misses_total"]


def test_draft_pool_that_came_before_the_storage_is_shared() -> None:
    """A storage that is attached while SGLang runs gets the draft's pool with the model's."""
    draft_pages.set_draft_model(draft_model())
    device, drafted = device_pool(64), device_pool(64, heads=2, dim=16)
    host, draft = host_pool(device, "page_first"), host_pool(drafted, "page_first")
    host.entry_map = {PoolName.DRAFT: SimpleNamespace(host_pool=draft, device_pool=drafted)}
    backend = attached(device, {PoolName.KV: host, PoolName.DRAFT: draft})
    assert backend.is_open
    assert not backend.lacks_draft
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    assert backend.batch_set_v2(transfer(hashes, slots)) == {"draft": [True] * 8}
    assert backend.batch_set_v1(hashes, slots) == [True] * 8
    assert backend.batch_exists_v2(hashes, transfer(hashes, slots)).kv_hit_pages == 8


def test_draft_pages_lacking_are_no_hit_and_counted_once(process: Tally) -> None:  # noqa: F811
    """The pages of a plain server are half of what a drafting one needs; the other way round they are all."""
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    backend.batch_set_v1(hashes, slots)
    backend.close()

    backend, host, _ = drafting()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    process.drain()
    assert backend.batch_exists_v2(hashes, transfer(hashes, slots)).kv_hit_pages == 0
    assert process.drain()["cornplug_misses_total"] == ABSENT
    backend.batch_set_v2(transfer(hashes[:3], slots[:192]))
    assert backend.batch_exists_v2(hashes, transfer(hashes, slots)).kv_hit_pages == 3
    backend.close()

    draft_pages.set_draft_model(None)
    backend, _ = attach()
    assert backend.batch_exists(name(TOKENS, 64)) == 8


@pytest.mark.parametrize(("weights", "heads"), [(b"another", 2), (b"draft", 4)])
def test_draft_pages_of_another_draft_are_absent(weights: bytes, heads: int) -> None:
    backend, host, _ = drafting()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    backend.batch_set_v2(transfer(hashes, slots))
    backend.batch_set_v1(hashes, slots)
    backend.close()
    backend, _, _ = drafting(weights, heads)
    hashes = name(TOKENS, 64)
    assert backend.batch_exists_v2(hashes, transfer(hashes, slots)).kv_hit_pages == 0


def test_draft_pages_are_not_those_of_a_server_of_the_same_model() -> None:
    """A draft sees each token one place early: its KV is not the model's."""
    backend, host, _ = drafting(b"model", HEADS, DIM)
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    backend.batch_set_v2(transfer(hashes, slots))
    backend.close()
    draft_pages.set_draft_model(None)
    backend, _ = attach()
    assert backend.batch_exists(name(TOKENS, 64)) == 0


def test_cornplug_storage_until_the_drafts_pool_is_there_shares_nothing(process: Tally) -> None:  # noqa: F811
    draft_pages.set_draft_model(draft_model())
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    assert backend.is_open
    assert backend.lacks_draft
    backend.batch_set_v1(hashes, slots)
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_exists_v2(hashes, transfer(hashes, slots)).kv_hit_pages == 0
    assert not any(backend.batch_get_v1(hashes, slots))
    assert process.drain()["cornplug_misses_total"] == [(("test", "kv_page", "speculative"), [2])]
    register(backend, host, device_pool(64, heads=2, dim=16), "page_first")
    assert backend.batch_exists(hashes) == 0
    backend.batch_set_v1(hashes, slots)
    assert backend.batch_exists(hashes) == 8


def test_cornplug_storage_beside_draft_of_latents_is_off() -> None:
    draft_pages.set_draft_model(draft_model())
    backend, host = attach()
    register(backend, host, latent_pool(64), "page_first")
    assert not backend.is_open


def test_draft_pages_of_unverified_layout_end_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_pages.set_draft_model(draft_model())
    backend, host = attach()
    device = device_pool(64, heads=2, dim=16)
    monkeypatch.setattr(type(device), "set_kv_buffer", lambda *args, **kwargs: None)
    register(backend, host, device, "page_first")
    assert not backend.is_open
