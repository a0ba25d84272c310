"""The storage backend as SGLang's own cache controller uses it."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collaborators import recorded
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.shared_flags import load_settings
from cornplug.errors import ConfigError
from cornplug.metrics import Tally
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.kv import hicache_storage, storage_hooks
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv_pages import costs as kv_costs
from cornplug.sglang_hooks.kv_pages import page_hash_index
from cornplug.sglang_hooks.kv_pages.layout import host_pages
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace
from cornplug.sglang_hooks.kv_pages.reader import PageReader
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from devkit.processes import wait_until

from ..hooked import hook_of
from ..kv_rig import (
    Controller,
    RigRuntime,
    as_scheduler,
    attached,
    device_pool,
    hashes_of,
    host_pool,
    named,
    storage_config,
)

prefetch_from_storage = hook_of(storage_hooks, "UnifiedRadixCache.prefetch_from_storage")

TOKENS = [(5 * i) % 983 for i in range(512)]


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore(capacity_bytes=16 << 20).connect())


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, store: FaultyStore) -> Iterator[Tally]:
    """A scheduler process of a server with cornplug, up to the attaching of its storage."""
    tally, _ = as_scheduler(monkeypatch, store)
    yield tally
    page_hash_index.close_index()


def attach(page_size: int = 64, layout: str = "page_first", **more: Any) -> tuple[CornplugStorage, Any]:
    """(backend, host pool)"""
    device = device_pool(page_size)
    host = host_pool(device, layout)
    return attached(device, {PoolName.KV: host}, **more), host


def name(tokens: list[int], page_size: int) -> list[str]:
    return named(tokens, page_size)


def test_storage_pages_load_after_restart() -> None:
    backend, host = attach(page_size=32)
    hashes, slots = name(TOKENS, 32), host.alloc(512)
    host.kv_buffer.normal_()
    before = [host_pages(host).page(int(slot)).clone() for slot in slots[::32]]
    assert backend.batch_exists(hashes) == 0
    assert backend.batch_set_v1(hashes, slots) == [True] * 16
    backend.close()

    backend, host = attach(page_size=64, layout="page_head")
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    assert backend.batch_exists(hashes) == 8
    assert backend.exists(hashes[3])
    assert backend.batch_get_v1(hashes, slots) == [True] * 8
    after = torch.cat([host_pages(host).page(int(slot)) for slot in slots[::64]], dim=3)
    assert torch.equal(after, torch.cat(before, dim=3))


@pytest.mark.parametrize("error", [RuntimeError("a lost device"), MemoryError(), KeyError("lost")])
def test_storage_error_in_a_copy_costs_its_pages_only(
    store: FaultyStore, process: Tally, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It would end SGLang's backup thread, and its host memory would never be free again."""
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    write, errors = PageCopies.write, [error]

    def fails_once(*args: Any) -> Any:
        if errors:
            raise errors.pop()
        return write(*args)

    monkeypatch.setattr(PageCopies, "write", fails_once)
    assert backend.batch_set_v1(hashes[:4], slots[:256]) == [True] * 4
    assert store.stat(deadline_s=1).reservations == 0
    assert backend.batch_set_v1(hashes, slots) == [True] * 8
    assert backend.batch_exists(hashes) == 8
    counted = {
        (name, *labels[1:]): sum(values) for name, rows in process.drain().items() for labels, values in rows
    }
    assert counted["cornplug_misses_total", "kv_page", "error"] == 1
    assert counted["cornplug_saves_total", "kv_page", "error"] == 4


def test_storage_that_goes_on_failing_stops_sharing(process: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)

    def fails(*args: Any) -> Any:
        raise RuntimeError("a lost device")

    monkeypatch.setattr(PageReader, "load", fails)
    for _ in range(8):
        assert backend.batch_get_v1(hashes, slots) == [False] * 8
    assert not backend.is_open
    assert backend.batch_get_v1(hashes, slots) == [False] * 8


@pytest.mark.parametrize(
    ("save", "write_policy", "stored"),
    [
        ("always", "write_through", 8),
        ("never", "write_through", 0),
        ("second", "write_through_selective", 8),  # SGLang offers pages at their second request
        ("second", "write_back", 0),
    ],
)
def test_storage_saves_what_engine_save_says(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch, save: str, write_policy: str, stored: int
) -> None:
    activation.runtime().config = load_settings({"engine.app": "test", "engine.save": save})
    monkeypatch.setattr(Controller, "write_policy", write_policy)
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    assert backend.batch_set_v1(hashes, slots) == [True] * 8
    assert store.stat(deadline_s=1).entries == stored


def test_storage_tells_the_store_what_a_page_cost(logged_store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured seconds of its tokens; nothing before the first measured step."""
    runtime = RigRuntime(logged_store.client)
    monkeypatch.setattr(activation, "runtime", lambda: runtime)
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    assert backend.batch_set_v1(hashes[:2], slots[:128]) == [True] * 2
    backend.pace.record_step(640, time.monotonic() - 20.0)
    assert backend.batch_set_v1(hashes[2:4], slots[128:256]) == [True] * 2
    backend.close()
    before, after = logged_store.costs()[:2], logged_store.costs()[2:]
    assert before == [0.0, 0.0]
    assert after == pytest.approx([2.0, 2.0], rel=0.2)


@pytest.mark.parametrize("fault", ["unavailable", "slow_s"])
def test_storage_with_store_down_counts_misses(
    store: FaultyStore, process: Tally, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    backend.batch_set_v1(hashes, slots)
    setattr(store, fault, 9.0 if fault == "slow_s" else True)
    process.drain()
    caplog.clear()  # What SGLang says at start, where another test has let it.
    with caplog.at_level(logging.WARNING):
        assert backend.batch_exists(hashes) == 0
        assert backend.batch_get_v1(hashes, slots) == [False] * 8
        assert backend.batch_set_v1(hashes, slots) == [True] * 8
    assert not caplog.records
    counts = process.drain()
    reason = "store_down" if fault == "unavailable" else "store_timeout"
    assert counts["cornplug_misses_total"] == [(("test", "kv_page", reason), [2])]
    assert counts["cornplug_saves_total"] == [(("test", "kv_page", reason), [8])]


def test_storage_absent_pages_are_counted(process: Tally) -> None:
    backend, host = attach()
    hashes = name(TOKENS, 64)
    backend.batch_set_v1(hashes[:3], host.alloc(192))
    process.drain()
    assert backend.batch_exists(hashes) == 3
    assert process.drain()["cornplug_misses_total"] == [(("test", "kv_page", "absent"), [5])]


class Cache:
    """What the hook on `prefetch_from_storage` reads of SGLang's cache, and what SGLang would queue."""

    enable_storage, prefetch_threshold, tp_world_size, pp_size = True, 64, 1, 1

    def __init__(self, backend: CornplugStorage) -> None:
        self.cache_controller = SimpleNamespace(storage_backend=backend)
        self.tree_core = SimpleNamespace(is_eagle=False)
        self.queued: list[int] = []

    def prefetch_from_storage(
        self,
        request: Any,
        last_host_node_id: Any,
        new_input_tokens: Any,
        last_hash: str | None = None,
        prefix_keys: Any = None,
        matched_prefix_tokens: Any = None,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        storage_hit_end: int | None = None,
    ) -> None:
        if len(new_input_tokens) >= self.prefetch_threshold:
            self.queued.append(len(new_input_tokens))

    def request(self, tokens: list[int], matched: int = 0, salt: str | None = None) -> bool:
        """Whether a prefetch is queued for a request, of which `matched` tokens are here."""
        self.queued.clear()
        hashes = hashes_of(tokens, 64, CacheNamespace(None, salt))
        prefetch_from_storage(
            Cache.prefetch_from_storage, self, "request", 1, array("q", tokens[matched:]),
            hashes[matched // 64 - 1] if matched else None, None,
            matched_prefix_tokens=array("q", tokens[:matched]), cache_salt=salt,
        )  # fmt: skip
        return bool(self.queued)


def test_prefetch_of_absent_pages_is_not_queued(process: Tally) -> None:
    """A queued prefetch costs a request a step of the scheduler, whatever it finds."""
    backend, host = attach()
    cache = Cache(backend)
    assert not cache.request(TOKENS)
    assert process.drain()["cornplug_misses_total"] == [(("test", "kv_page", "absent"), [8])]
    backend.batch_set_v1(name(TOKENS, 64)[:3], host.alloc(192))
    assert cache.request(TOKENS)
    assert not cache.request([1, *TOKENS[1:]])
    assert not cache.request(TOKENS, salt="another")
    assert cache.request(TOKENS, matched=128)
    assert not cache.request(TOKENS, matched=192)


@pytest.mark.parametrize("fault", ["unavailable", "slow_s"])
def test_prefetch_with_store_down_is_not_queued(store: FaultyStore, process: Tally, fault: str) -> None:
    backend, host = attach()
    backend.batch_set_v1(name(TOKENS, 64), host.alloc(512))
    setattr(store, fault, 9.0 if fault == "slow_s" else True)
    process.drain()
    assert not Cache(backend).request(TOKENS)
    reason = "store_down" if fault == "unavailable" else "store_timeout"
    assert process.drain()["cornplug_misses_total"] == [(("test", "kv_page", reason), [1])]


def test_prefetch_dearer_than_prefill_is_not_queued(process: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    with recorded(kv_costs, "LoadRule") as rules:
        backend, host = attach()
    (rule,) = rules
    cache = Cache(backend)
    backend.batch_set_v1(name(TOKENS, 64), host.alloc(512))
    assert backend.pace is not None
    rule.record_transfer(1 << 20, 0.5)  # 2 MB/s
    assert cache.request(TOKENS)  # what computing takes nobody knows yet
    backend.pace.record_prefetch_end("request")
    for tokens in (16, 512, 1024):
        rule.record_step(tokens, tokens * 1e-6)
    process.drain()
    assert not cache.request(TOKENS)
    assert process.drain()["cornplug_misses_total"] == [(("test", "kv_page", "cheaper"), [8])]
    for tokens in (16, 512, 1024) * 20:
        rule.record_step(tokens, tokens * 1e-1)
    assert cache.request(TOKENS)


def test_prefetch_of_small_pages_asks_for_store_page(process: Tally) -> None:
    backend, host = attach(page_size=16)
    cache = Cache(backend)
    cache.prefetch_threshold = 16
    backend.batch_set_v1(name(TOKENS, 16), host.alloc(512))
    hashes = hashes_of(TOKENS, 16)
    for matched, queued in ((0, True), (80, True), (512 - 16, True)):
        cache.queued.clear()
        prefetch_from_storage(
            Cache.prefetch_from_storage, cache, "request", 1, array("q", TOKENS[matched:]),
            hashes[matched // 16 - 1] if matched else None,
            matched_prefix_tokens=array("q", TOKENS[:matched]),
        )  # fmt: skip
        assert bool(cache.queued) is queued
    assert not cache.request([9, *TOKENS])


@pytest.mark.parametrize("ranks", ["tp_world_size", "pp_size"])
def test_prefetch_is_queued_only_if_all_ranks_vote(ranks: str) -> None:
    """SGLang's threads meet for each prefetch: one that is queued on this rank alone is waited for."""
    backend, host = attach()
    backend.batch_set_v1(name(TOKENS, 64), host.alloc(512))
    cache: Any = Cache(backend)
    setattr(cache, ranks, 2)
    votes: list[int] = []

    def vote(tensor: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        votes.append(int(tensor.item()))
        tensor.fill_(0)

    cache._all_reduce = vote
    assert not cache.request(TOKENS)
    backend.close()
    assert not cache.request(TOKENS)
    assert votes == [1, 0]


def test_storage_after_weight_update_shares_nothing(process: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    monkeypatch.setattr(weights_guard, "has_replaced_weights", lambda: True)
    backend.batch_set_v1(hashes, slots)
    monkeypatch.setattr(weights_guard, "has_replaced_weights", lambda: False)
    assert backend.batch_exists(hashes) == 0
    backend.batch_set_v1(hashes, slots)
    monkeypatch.setattr(weights_guard, "has_replaced_weights", lambda: True)
    process.drain()
    assert backend.batch_exists(hashes) == 0
    assert not any(backend.batch_get_v1(hashes, slots))
    assert process.drain()["cornplug_misses_total"] == [(("test", "kv_page", "weights_updated"), [2])]


def renew() -> None:
    """As after an update of the weights from a folder."""
    state = engine_state.current()
    state.end_update(state.begin_update(), "/new", 0)
    page_hash_index.forget_pages()


def test_storage_in_new_epoch_offers_no_page_of_the_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = {"weights": b"a"}

    def identify() -> tuple[bytes, dict[str, Any]]:
        time.sleep(0.1)
        return now["weights"] * 32, {}

    monkeypatch.setattr(hicache_storage, "_identify", identify)
    backend, host = attach()

    def found() -> int:
        """At once: the first lookup of an epoch waits for the identity, for a short time."""
        return backend.batch_exists(name(TOKENS, 64))

    slots = host.alloc(512)
    backend.batch_set_v1(name(TOKENS, 64), slots)
    assert found() == 8
    now["weights"] = b"b"
    renew()
    assert found() == 0
    assert not any(backend.batch_get_v1(name(TOKENS, 64), slots))
    backend.batch_set_v1(name(TOKENS, 64)[:4], slots[:256])
    assert found() == 4
    now["weights"] = b"a"
    renew()
    assert found() == 8, "the pages of the first epoch"


@pytest.mark.parametrize("done", [False, True])
def test_storage_save_in_flight_during_update_is_dropped(
    process: Tally, store: FaultyStore, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    original = PageCopies.write

    def write(*args: Any) -> Any:
        renew() if done else engine_state.current().begin_update()
        return original(*args)

    monkeypatch.setattr(PageCopies, "write", write)
    backend.batch_set_v1(hashes, slots)
    assert store.stat(deadline_s=1).entries == 0
    assert process.drain()["cornplug_saves_total"] == [(("test", "kv_page", "weights_updated"), [8])]


def test_storage_tails_of_old_weights_complete_no_page(store: FaultyStore) -> None:
    """SGLang's hash of a page is the same under any weights."""
    with recorded(hicache_storage, "NamespaceRoots") as roots:
        backend, host = attach(page_size=32)
    slots = host.alloc(64)
    backend.batch_set_v1(name(TOKENS[:64], 32)[:1], slots[:32])
    renew()
    hashes = name(TOKENS[:64], 32)
    wait_until(lambda: roots[0].wait(0.1), deadline_s=60, what="the identity")
    backend.batch_set_v1(hashes[1:], slots[32:])
    assert store.stat(deadline_s=1).entries == 0
    backend.batch_set_v1(hashes, slots)
    assert store.stat(deadline_s=1).entries == 1


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"pp_size": 2}, "2 compute this rank's requests"),
        ({"attn_cp_size": 2}, "context"),
        ({"is_mla_model": True, "dcp_size": 2, "tp_size": 2, "logical_page_size": 64}, "decode context"),
    ],
)
def test_storage_in_unsupported_parallelism_warns_once(
    more: dict[str, Any],
    why: str,
    process: Tally,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args, **more: 4)
    with caplog.at_level(logging.WARNING, logger="sglang.cornplug"):
        backend, host = attach(**more)
        assert backend.batch_exists(["00"]) == 0
        assert backend.batch_get_v1(["00"], host.alloc(64)) == [False]
        assert backend.batch_set_v1(["00"], host.alloc(64)) == [True]
    assert [why in record.getMessage() for record in caplog.records] == [True]
    assert process.drain()["cornplug_misses_total"] == [(("test", "kv_page", "parallelism"), [2])]


def test_storage_of_unaligned_page_size_is_off(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sglang.cornplug"):
        backend, _ = attach(page_size=8)
    assert backend.batch_exists(["00"]) == 0
    assert "multiples of 16" in caplog.text


def test_storage_of_unverified_layout_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hicache_storage, "verify_layout", _refuse)
    with caplog.at_level(logging.WARNING, logger="sglang.cornplug"):
        backend, host = attach()
    assert not backend.is_open
    assert backend.batch_set_v1(["00"], host.alloc(64)) == [True]
    assert "not shared" in caplog.text


def _refuse(pages: Any, controller: Any, device: Any) -> None:
    from cornplug.errors import LayoutError

    raise LayoutError("SGLang does not back up as believed", reason="layout")


def test_storage_with_further_pools_is_off() -> None:
    backend, host = attach()
    hashes, slots = name(TOKENS, 64), host.alloc(512)
    backend.batch_set_v1(hashes, slots)
    assert backend.batch_exists_v2(hashes).kv_hit_pages == 8
    swa = [PoolTransfer(PoolName.SWA, keys=hashes)]
    assert backend.batch_exists_v2(hashes, swa).kv_hit_pages == 0
    assert backend.batch_get_v2(swa) == {"swa": [False] * 8}
    assert backend.batch_set_v2(swa) == {"swa": [False] * 8}
    backend.register_mem_host_pool_v2(host, PoolName.SWA)
    assert backend.batch_exists(hashes) == 0


def test_storage_old_interface_moves_nothing() -> None:
    backend, _ = attach()
    assert backend.get("00") is None
    assert backend.batch_get(["00", "01"]) == [None, None]
    assert not backend.set("00", 1)
    assert not backend.batch_set(["00"], [1])
    assert not backend.clear()


def test_cornplug_storage_without_flag_is_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "is_on", lambda: False)
    with pytest.raises(ConfigError, match="enable-cornplug"):
        CornplugStorage(storage_config())
