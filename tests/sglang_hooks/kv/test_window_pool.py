"""Sliding windows in a pool of their own: a prefix counts only with the window at its end."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collaborators import kept, recorded
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)

from cornplug.errors import LayoutError
from cornplug.sglang_hooks.kv import hicache_storage
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv.window_pool import WindowPool, layer_groups, window_pools
from cornplug.sglang_hooks.kv_pages import page_hash_index
from cornplug.sglang_hooks.kv_pages.layout import RankPosition, host_pages
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace
from cornplug.store.base import Tier
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore

from ..kv_rig import (
    LAYERS,
    PLAIN,
    WINDOW,
    WINDOWED,
    as_scheduler,
    attached,
    device_pool,
    host_pool,
    named,
    windowed_pool,
)

TOKENS = [(5 * i) % 983 for i in range(512)]
IN_A_WINDOW = 2
ONE_RANK = RankPosition(0, 1, 0, (range(LAYERS),))
"""Pages of 64 tokens in a window."""


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore(capacity_bytes=16 << 20).connect())


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch, store: FaultyStore) -> Iterator[SimpleNamespace]:
    """`tally` and `model` of a scheduler process of a server with cornplug."""
    tally, model = as_scheduler(monkeypatch, store)
    model.sliding_window_size = WINDOW
    yield SimpleNamespace(tally=tally, model=model)
    page_hash_index.close_index()


class Server:
    """One rank of a model with windows: its storage, and what SGLang has in its host pools."""

    def __init__(self, page_size: int = 64, layout: str = "page_first") -> None:
        self.device = windowed_pool(page_size)
        self.hosts = {
            PoolName.KV: host_pool(self.device.full_kv_pool, layout),
            PoolName.SWA: host_pool(self.device.swa_kv_pool, layout),
        }
        self.storage: CornplugStorage = attached(self.device, self.hosts)
        self.page_size = page_size

    def names(self, tokens: Sequence[int], space: CacheNamespace = PLAIN) -> list[str]:
        return named(tokens, self.page_size, space)

    def put(self, name: PoolName, hashes: Sequence[str]) -> torch.Tensor:
        """Have these pages in a host pool, with random values; their slots."""
        slots: torch.Tensor = self.hosts[name].alloc(len(hashes) * self.page_size)
        for slot in slots[:: self.page_size].tolist():
            host_pages(self.hosts[name]).page(slot).normal_()
        return slots

    def values(self, name: PoolName, slots: torch.Tensor) -> torch.Tensor:
        pages = [host_pages(self.hosts[name]).page(slot) for slot in slots[:: self.page_size].tolist()]
        return torch.cat(pages, dim=3).clone()

    def save(self, tokens: Sequence[int], *windows: slice) -> dict[Any, torch.Tensor]:
        """As SGLang backs up a prompt with some windows; the values of full attention and of each window."""
        hashes, found = self.names(tokens), {}
        slots = self.put(PoolName.KV, hashes)
        assert self.storage.batch_set_v1(hashes, slots) == [True] * len(hashes)
        found["full"] = self.values(PoolName.KV, slots)
        for at in windows:
            slots = self.put(PoolName.SWA, hashes[at])
            given = PoolTransfer(PoolName.SWA, host_indices=slots, keys=hashes[at])
            assert self.storage.batch_set_v2([given]) == {"swa": [True] * len(hashes[at])}
            found[at.stop] = self.values(PoolName.SWA, slots)
        return found

    def found(self, hashes: list[str], pages: int = IN_A_WINDOW, *, behind: list[str] | None = None) -> Any:
        """SGLang's question for a prefix, behind pages that it has itself."""
        window = PoolTransfer(
            PoolName.SWA, keys=["__placeholder__"] * pages, hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        return self.storage.batch_exists_v2(hashes, [window], HiCacheStorageExtraInfo(prefix_keys=behind))

    def fetch(self, hashes: list[str]) -> torch.Tensor | None:
        """Fetch a window as SGLang does; None where it did not come."""
        slots = self.hosts[PoolName.SWA].alloc(len(hashes) * self.page_size)
        asked = PoolTransfer(PoolName.SWA, host_indices=slots, keys=hashes)
        done = self.storage.batch_get_v2([asked])["swa"]
        assert len(done) == len(hashes)
        return self.values(PoolName.SWA, slots) if all(done) else None


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_window_pool_prefix_and_its_window_load_after_restart(layout: str) -> None:
    before = Server(layout=layout)
    saved = before.save(TOKENS, slice(2, 4), slice(5, 7))
    before.storage.close()

    after = Server()
    hashes = after.names(TOKENS)
    result = after.found(hashes)
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (7, [4, 7])
    slots = after.hosts[PoolName.KV].alloc(7 * 64)
    assert after.storage.batch_get_v1(hashes[:7], slots) == [True] * 7
    assert torch.equal(after.values(PoolName.KV, slots), saved["full"][..., : 7 * 64, :])
    for end in (4, 7):
        window = after.fetch(hashes[end - 2 : end])
        assert window is not None
        assert torch.equal(window, saved[end])


@pytest.mark.parametrize("what", ["find_hits", "fetch", "offer"])
def test_window_pool_error_that_nothing_foresaw_is_a_miss(
    process: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """It would end one of SGLang's threads."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("a lost device")

    server = Server()
    monkeypatch.setattr(WindowPool, what, fails)
    server.save(TOKENS, slice(5, 7))
    hashes = server.names(TOKENS)
    assert (server.found(hashes).kv_hit_pages > 0) is (what == "fetch")
    assert (server.fetch(hashes[5:7]) is not None) is (what == "find_hits")
    counted = process.tally.drain()["cornplug_misses_total"]
    assert (("test", "kv_page", "error"), [1]) in counted


def test_window_pool_full_attention_without_window_is_absent(process: SimpleNamespace) -> None:
    server = Server()
    server.save(TOKENS)
    process.tally.drain()
    hashes = server.names(TOKENS)
    assert server.found(hashes).kv_hit_pages == 0
    assert process.tally.drain()["cornplug_misses_total"] == [(("test", "kv_page", "absent"), [8])]
    assert server.storage.batch_exists(hashes) == 0  # SGLang asks so where it has no room for a window.
    assert server.fetch(hashes[:2]) is None


def test_window_pool_window_without_full_attention_is_absent(process: SimpleNamespace) -> None:
    server = Server()
    hashes = server.names(TOKENS)
    for name, at in ((PoolName.SWA, slice(4, 8)), (PoolName.SWA, slice(1, 3))):
        slots = server.put(name, hashes[at])
        server.storage.batch_set_v2([PoolTransfer(name, host_indices=slots, keys=hashes[at])])
    server.storage.batch_set_v1(hashes[:5], server.put(PoolName.KV, hashes[:5]))
    process.tally.drain()
    assert server.found(hashes).restorable_prefix_pages == [3]
    assert process.tally.drain()["cornplug_misses_total"] == [(("test", "kv_page", "absent"), [3 + 2])]


def test_window_pool_prompt_shorter_than_window_is_its_own_window() -> None:
    server = Server()
    server.save(TOKENS[:64], slice(0, 1))
    hashes = server.names(TOKENS[:64])
    assert server.found(hashes, 1).kv_hit_pages == 1


def test_window_pool_behind_own_pages_wants_a_whole_window() -> None:
    """SGLang drops a window whose first part it would have to take from its own pages."""
    server = Server()
    server.save(TOKENS, slice(3, 4), slice(6, 8))
    hashes = server.names(TOKENS)
    assert server.found(hashes[3:], behind=hashes[:3]).restorable_prefix_pages == [5]


def test_window_pool_of_small_pages_may_end_at_any_of_them() -> None:
    before = Server(page_size=16)
    saved = before.save(TOKENS, slice(5, 13))
    before.storage.close()
    after = Server(page_size=16)
    hashes = after.names(TOKENS)
    assert after.found(hashes, 8).restorable_prefix_pages == [13]
    window = after.fetch(hashes[5:13])
    assert window is not None
    assert torch.equal(window, saved[13])


def test_window_pool_with_too_few_slots_loads_nothing() -> None:
    server = Server()
    server.save(TOKENS, slice(0, 2))
    hashes = server.names(TOKENS)
    asked = PoolTransfer(PoolName.SWA, host_indices=torch.arange(64), keys=hashes[:2])
    assert server.storage.batch_get_v2([asked]) == {"swa": [False, False]}
    other = PoolTransfer(PoolName.MAMBA, host_indices=torch.arange(128), keys=hashes[:2])
    assert server.storage.batch_get_v2([other]) == {"mamba": [False, False]}
    assert server.storage.batch_exists_v2(hashes, [other]).kv_hit_pages == 0


def test_window_pool_tokens_are_counted_once(process: SimpleNamespace) -> None:
    server = Server()
    server.save(TOKENS[:256], slice(2, 4))
    hashes = server.names(TOKENS[:256])
    process.tally.drain()
    server.storage.batch_get_v1(hashes, server.hosts[PoolName.KV].alloc(256))
    full = process.tally.drain()
    assert full["cornplug_saved_tokens_total"] == [(("test",), [256])]
    assert server.fetch(hashes[2:]) is not None
    windows = process.tally.drain()
    assert "cornplug_saved_tokens_total" not in windows
    # Two of three layers, and two of four pages.
    loaded = windows["cornplug_bytes_total"][0][1][0] / full["cornplug_bytes_total"][0][1][0]
    assert loaded == pytest.approx(2 * 0.5)


def test_window_pool_other_window_layers_or_one_pool_share_nothing(process: SimpleNamespace) -> None:
    Server().save(TOKENS, slice(6, 8))
    process.model.sliding_window_size = WINDOW + 1
    other = Server()
    hashes = other.names(TOKENS)
    assert other.found(hashes).kv_hit_pages == 0
    assert other.fetch(hashes[6:]) is None
    device = device_pool(64)
    plain = attached(device, {PoolName.KV: host_pool(device, "page_first")})
    assert plain.batch_exists(other.names(TOKENS)) == 0


def test_window_pool_counts_to_the_room_of_a_prompt(process: SimpleNamespace) -> None:
    """An idle server copies a prompt only if the store has room for both pools."""
    with recorded(hicache_storage, "RankPages") as ranks:
        server = Server()
    full = ranks[0].page
    assert full.layers == 1
    (windows,) = set(kept(server.storage, WindowPool))
    assert windows.combined_page(full).page_bytes == 3 * full.page_bytes


def ahead(server: Server, tokens: Sequence[int], prefix: Sequence[int] = ()) -> int:
    hashes = server.names([*prefix, *tokens])
    last = hashes[len(prefix) // 64 - 1] if prefix else None
    return server.storage.count_worth_fetching(array("q", tokens), array("q", prefix), last, PLAIN)


def test_window_pool_prefetch_is_queued_up_to_the_last_window(process: SimpleNamespace) -> None:
    server = Server()
    server.save(TOKENS, slice(2, 4))
    assert ahead(server, TOKENS) == 4 * 64
    assert ahead(server, TOKENS[64:], TOKENS[:64]) == 3 * 64
    process.tally.drain()
    assert ahead(server, TOKENS[:192]) == 0
    assert process.tally.drain()["cornplug_misses_total"] == [(("test", "kv_page", "absent"), [3])]


@pytest.mark.parametrize("fault", ["unavailable", "slow_s"])
def test_window_pool_with_store_down_is_a_counted_miss(
    store: FaultyStore, process: SimpleNamespace, fault: str
) -> None:
    server = Server()
    server.save(TOKENS, slice(6, 8))
    hashes = server.names(TOKENS)
    setattr(store, fault, 9.0 if fault == "slow_s" else True)
    process.tally.drain()
    assert server.found(hashes).kv_hit_pages == 0
    assert server.fetch(hashes[6:]) is None
    reason = "store_down" if fault == "unavailable" else "store_timeout"
    assert process.tally.drain()["cornplug_misses_total"] == [(("test", "kv_page", reason), [2])]


class Reader:
    """A reader of pages whose tiers are known."""

    def __init__(self, tiers: str, recalls: bool = True) -> None:
        self.places = {str(i): Tier(int(tier)) for i, tier in enumerate(tiers)}
        self.recalls, self.recalled, self.absent = recalls, list[str](), 0

    def tiers(self, hashes: Sequence[str], *, on_scheduler: bool = False, recall: bool = False) -> list[Tier]:
        if recall:
            self.recalled += hashes
            if self.recalls:
                self.places |= dict.fromkeys(hashes, Tier.MEMORY)
        return [self.places[name] for name in hashes]

    def count_present(self, hashes: Sequence[str]) -> int:
        return len(hashes)

    def count_absent(self, pages: int) -> None:
        self.absent += pages


@pytest.mark.parametrize(
    ("tiers", "recalls", "ends", "recalled"),
    [
        ("00011022", True, [5, 8], ["6", "7"]),
        ("00011022", False, [5], ["6", "7"]),  # its disk is late: a shorter prefix
        ("00022011", True, [8], []),  # no page is read for a prefix that is not the longest
        ("11111111", True, [1, 2, 3, 4, 5, 6, 7, 8], []),
        ("00000000", True, [], []),
    ],
)
def test_window_pool_reads_the_longest_window_from_disk(
    tiers: str, recalls: bool, ends: list[int], recalled: list[str]
) -> None:
    reader: Any = Reader(tiers, recalls)
    full: Any = Reader("1" * 8)
    unused: Any = None
    asked = [PoolTransfer(PoolName.SWA, keys=["", ""])]
    found = WindowPool(unused, reader, unused, 64, 2).find_hits(full, list("01234567"), asked, at_start=True)
    assert (found, reader.recalled) == (ends, recalled)
    assert full.absent == 8 - max(ends, default=0)


@pytest.mark.parametrize(
    ("pool", "further", "model", "why"),
    [
        (windowed_pool(64), {"swa": 1}, {"sliding_window_size": None}, "windows of None tokens"),
        (windowed_pool(64), {"swa": 1}, {"num_hidden_layers": 4}, "in a model with 4"),
        (windowed_pool(64), {"swa": 1, "draft": 2}, {}, "other than KV of full attention: draft, swa"),
        (device_pool(64), {"mamba": 1}, {}, "other than KV of full attention: mamba"),
        (windowed_pool(64, swa_head_num=2), {"swa": 1}, {}, "other than KV of full attention"),
    ],
)
def test_layer_groups_of_other_pools_are_refused(
    process: SimpleNamespace, pool: Any, further: dict[str, Any], model: dict[str, Any], why: str
) -> None:
    process.model.__dict__.update(model)
    with pytest.raises(LayoutError, match=why):
        layer_groups(SimpleNamespace(mem_pool_device=pool), further, process.model, ONE_RANK)


def test_layer_groups_of_pipeline_stages_are_refused(process: SimpleNamespace) -> None:
    stages = RankPosition(0, 1, 0, (range(1), range(1, LAYERS)))
    with pytest.raises(LayoutError, match="pipeline parallelism"):
        layer_groups(SimpleNamespace(mem_pool_device=windowed_pool(64)), {"swa": 1}, process.model, stages)


def test_layer_groups_name_the_layers_of_each_pool(process: SimpleNamespace) -> None:
    pool = windowed_pool(64)
    groups = layer_groups(SimpleNamespace(mem_pool_device=pool), {"swa": 1}, process.model, ONE_RANK)
    assert groups is not None
    assert (groups.full.layers, groups.full.window) == ((1,), 0)
    assert (groups.windows.layers, groups.windows.window) == (WINDOWED, WINDOW)
    assert window_pools(pool) == (groups.full.device, groups.windows.device)
    assert layer_groups(SimpleNamespace(mem_pool_device=pool), {}, process.model, ONE_RANK) is None


def test_window_pool_whose_copies_move_values_is_refused(
    monkeypatch: pytest.MonkeyPatch, process: SimpleNamespace
) -> None:
    """SGLang's window pool is verified by writing, as full attention's."""
    device = windowed_pool(64)
    host = host_pool(device.swa_kv_pool, "page_first")
    monkeypatch.setattr(host, "backup_from_device_all_layer", lambda *args: host.kv_buffer.zero_())
    storage = attached(
        device, {PoolName.KV: host_pool(device.full_kv_pool, "page_first"), PoolName.SWA: host}
    )
    assert not storage.is_open
