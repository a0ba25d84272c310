"""Pages written by one engine and read by another, of other layouts, page sizes and TP degrees."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from keyed_store import KeyedStore
from time_limits import TimeLimits

from cornplug.errors import StoreUnavailable
from cornplug.sglang_hooks.kv_pages import writer as kv_writer
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace
from cornplug.store.base import ReserveTerms
from cornplug.store.memory import MemoryStore

from ...store.shelved_store import ShelvedStore
from ..kv_rig import LAYOUTS, Engine, sequence

TOKENS = [(7 * i) % 991 for i in range(512)]
SIZES = (16, 32, 64, 128)


@pytest.fixture
def store() -> KeyedStore:
    return KeyedStore(capacity_bytes=16 << 20)


def write_together(engines: list[Engine], tokens: list[int], kv: torch.Tensor) -> None:
    threads = [threading.Thread(target=engine.save, args=(tokens, kv)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


@pytest.mark.parametrize(("writes", "reads"), list(itertools.product(LAYOUTS, LAYOUTS)))
def test_kv_pages_load_between_all_layouts(store: MemoryStore, writes: str, reads: str) -> None:
    writer = Engine(store.connect(), layout=writes)
    reader = Engine(store.connect(), layout=reads, page_size=32)
    kv = sequence(writer.geometry, len(TOKENS))
    writer.save(TOKENS, kv)
    assert torch.equal(reader.load(TOKENS), kv)


@pytest.mark.parametrize(("writes", "reads"), list(itertools.product(SIZES, SIZES)))
@pytest.mark.parametrize("page_tokens", [64, 32])
def test_kv_pages_load_between_all_page_sizes(
    store: MemoryStore, writes: int, reads: int, page_tokens: int
) -> None:
    tokens = TOKENS[:400]
    writer = Engine(store.connect(), page_size=writes, page_tokens=page_tokens)
    reader = Engine(store.connect(), page_size=reads, page_tokens=page_tokens)
    kv = sequence(writer.geometry, len(tokens))
    writer.save(tokens, kv)
    both = max(writes, page_tokens)
    whole = len(tokens) // both * both // reads * reads
    found = reader.load(tokens)
    assert found.shape[3] == whole
    assert torch.equal(found, kv[..., :whole, :])


@pytest.mark.parametrize(("writes", "reads"), list(itertools.product((1, 2, 4, 8), (1, 2, 8))))
def test_kv_pages_load_between_all_tp_degrees(store: MemoryStore, writes: int, reads: int) -> None:
    writers = [Engine(store.connect(), tp=(writes, rank)) for rank in range(writes)]
    kv = sequence(writers[0].geometry, 256)
    write_together(writers, TOKENS[:256], kv)
    for rank in range(reads):
        reader = Engine(store.connect(), tp=(reads, rank), layout="page_head")
        part = kv[reader.heads.start : reader.heads.stop]
        assert torch.equal(reader.load(TOKENS[:256]), part)
    stat = store.connect().stat(deadline_s=1)
    assert (stat.entries, stat.reservations, stat.leases) == (4, 0, 0)


FORMATS = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.mark.parametrize(("writes", "reads"), list(itertools.product(FORMATS, FORMATS)))
def test_kv_pages_load_in_their_own_format_only(
    store: MemoryStore, writes: torch.dtype, reads: torch.dtype
) -> None:
    writer = Engine(store.connect(), dtype=writes, layout="page_head")
    reader = Engine(store.connect(), dtype=reads, layout="page_first", page_size=32)
    kv = sequence(writer.geometry, len(TOKENS))
    writer.save(TOKENS, kv)
    found = reader.load(TOKENS)
    if reads == writes:
        assert torch.equal(found, kv)
    else:
        assert found.shape[3] == 0


@pytest.mark.parametrize(("writes", "reads"), [(2, 2), (2, 1), (1, 2), (3, 2)])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("latent", [False, True])
def test_kv_pages_load_between_all_pipeline_stages(
    store: MemoryStore, writes: int, reads: int, tp: int, latent: bool
) -> None:
    """LAYERS layers of two stages: one has more than the other."""

    def ranks(stages: int) -> list[Engine]:
        places = itertools.product(range(stages), range(tp))
        return [
            Engine(store.connect(), pp=(stages, stage), tp=(tp, rank), latent=latent)
            for stage, rank in places
        ]

    writers = ranks(writes)
    kv = sequence(writers[0].geometry, 256)
    write_together(writers, TOKENS[:256], kv)
    assert store.connect().stat(deadline_s=1).entries == 4
    for reader in ranks(reads):
        assert torch.equal(reader.load(TOKENS[:256]), reader.part(kv))


def test_kv_save_without_a_stage_stays_unseen(store: MemoryStore) -> None:
    first, second = (Engine(store.connect(), pp=(2, stage)) for stage in range(2))
    kv = sequence(first.geometry, 128)
    first.save(TOKENS[:128], kv)
    assert store.connect().stat(deadline_s=1).entries == 0
    second.save(TOKENS[:128], kv)
    assert torch.equal(Engine(store.connect()).load(TOKENS[:128]), kv)


@pytest.mark.parametrize("writes", [16, 64])
@pytest.mark.parametrize("reads", [16, 64])
def test_kv_latent_pages_load_between_page_sizes(store: MemoryStore, writes: int, reads: int) -> None:
    writer = Engine(store.connect(), latent=True, page_size=writes, layout="page_first_direct", tp=(2, 0))
    reader = Engine(store.connect(), latent=True, page_size=reads, layout="page_first", tp=(2, 1))
    kv = sequence(writer.geometry, 192)
    writer.save(TOKENS[:192], kv)
    assert torch.equal(reader.load(TOKENS[:192]), kv)


def test_kv_save_of_small_pages_in_pieces_is_whole(store: MemoryStore) -> None:
    writer, reader = Engine(store.connect(), page_size=16), Engine(store.connect())
    kv = sequence(writer.geometry, 256)
    for end, first in ((96, 0), (112, 6), (256, 7)):
        writer.save(TOKENS[:end], kv, first=first)
    assert torch.equal(reader.load(TOKENS[:256]), kv)


def test_kv_save_of_small_pages_after_fork_is_whole(store: MemoryStore) -> None:
    """The head of the second branch's page lies in the first branch's, and nowhere else."""
    writer, reader = Engine(store.connect(), page_size=16), Engine(store.connect())
    other = TOKENS[:80] + [5] * 112
    kv, forked = sequence(writer.geometry, 192), sequence(writer.geometry, 192, seed=8)
    forked[..., :80, :] = kv[..., :80, :]
    writer.save(TOKENS[:192], kv)
    writer.save(other, forked, first=5)
    assert torch.equal(reader.load(other), forked)
    assert torch.equal(reader.load(TOKENS[:192]), kv)


def test_kv_save_of_page_without_head_is_refused(store: MemoryStore) -> None:
    writer = Engine(store.connect(), page_size=16)
    kv = sequence(writer.geometry, 128)
    writer.save(TOKENS[:128], kv, first=6)
    assert store.connect().stat(deadline_s=1).entries == 0
    assert writer.counts()["cornplug_saves_total", "write_failed"] == 1


def test_kv_load_of_other_model_salt_or_tokens_is_empty(store: MemoryStore) -> None:
    writer = Engine(store.connect())
    writer.save(TOKENS, sequence(writer.geometry, len(TOKENS)))
    assert Engine(store.connect(), identity=b"other weights").load(TOKENS).shape[3] == 0
    reader = Engine(store.connect())
    assert reader.load(TOKENS, space=CacheNamespace(None, "tenant")).shape[3] == 0
    assert reader.load(TOKENS, space=CacheNamespace("key", None)).shape[3] == 0
    assert reader.load([1, *TOKENS[1:]]).shape[3] == 0
    assert reader.load(TOKENS[:100] + [3] * 100).shape[3] == 64
    assert Engine(store.connect(), page_tokens=32, page_size=32).load(TOKENS).shape[3] == 0


def test_kv_load_of_corrupt_page_is_miss_and_deletes(store: MemoryStore) -> None:
    writer, reader = Engine(store.connect()), Engine(store.connect(), page_size=32)
    kv = sequence(writer.geometry, 256)
    writer.save(TOKENS[:256], kv)
    hashes = reader.knows(TOKENS[:256])
    page = reader.index.find(hashes)[2]
    assert page is not None
    key = reader.reader.store_keys(page, reader.index.overlaps(page)[0], reader.reader.roots())[0]
    (lease,) = reader.store.lease([key], ttl_s=9, deadline_s=1)
    assert lease is not None
    store.arena[lease.location.offset + 100] ^= 4
    reader.store.release([lease.token], deadline_s=1)
    assert torch.equal(reader.load(TOKENS[:256]), kv[..., :64, :])
    counts = reader.counts()
    assert counts["cornplug_misses_total", "corrupt"] == 1
    assert counts["cornplug_hits_total", "store"] == 1
    # It and what follows are written anew.
    assert store.connect().stat(deadline_s=1).entries == 1
    writer.save(TOKENS[:256], kv)
    assert torch.equal(reader.load(TOKENS[:256]), kv)


def test_kv_load_of_page_evicted_after_lookup_is_miss(store: MemoryStore) -> None:
    writer, reader = Engine(store.connect()), Engine(store.connect())
    writer.save(TOKENS[:256], sequence(writer.geometry, 256))
    hashes = reader.knows(TOKENS[:256])
    assert reader.reader.count_present(hashes) == 4
    page = reader.index.find(hashes)[2]
    assert page is not None
    keys = reader.reader.store_keys(page, reader.index.overlaps(page)[0], reader.reader.roots())
    reader.store.delete(keys, deadline_s=1)
    assert reader.reader.load(hashes, [0, 64, 128, 192]) == 2
    assert reader.counts()["cornplug_misses_total", "evicted"] == 1


@pytest.mark.parametrize("fault", ["unavailable", "slow_s", "full", "corrupt_reads"])
def test_kv_store_faults_raise_nothing_and_leave_nothing(store: MemoryStore, fault: str) -> None:
    engine = Engine(store.connect(), page_size=16)
    kv = sequence(engine.geometry, 256)
    engine.save(TOKENS[:128], kv)
    setattr(engine.faulty, fault, 5.0 if fault == "slow_s" else True)
    hashes = engine.knows(TOKENS[:256])
    try:
        assert engine.reader.count_present(hashes) in (0, 8)
    except StoreUnavailable:
        assert fault in ("unavailable", "slow_s")
    assert engine.reader.load(hashes, list(range(0, 256, 16))) == (8 if fault == "full" else 0)
    engine.writer.save(hashes[8:], engine.put(kv, 8, 8))
    counts = engine.counts()
    outcome = {"unavailable": "store_down", "slow_s": "store_timeout", "full": "full"}.get(fault, "stored")
    assert counts["cornplug_saves_total", outcome] >= 2
    setattr(engine.faulty, fault, 0.0 if fault == "slow_s" else False)
    stat = store.connect().stat(deadline_s=1)
    assert (stat.leases, stat.reservations) == (0, 0)


@pytest.mark.parametrize("size", [1, 2])
def test_kv_save_of_seen_pages_only_copies_at_second_offer(store: MemoryStore, size: int) -> None:
    ranks = [Engine(store.connect(), tp=(size, rank), only_seen=True) for rank in range(size)]
    kv = sequence(ranks[0].geometry, 256)
    for outcome in ("first_sight", "stored"):
        for rank in ranks:
            rank.save(TOKENS[:256], kv)
        assert ranks[0].counts()["cornplug_saves_total", outcome] == 4
        assert store.connect().stat(deadline_s=1).entries == (4 if outcome == "stored" else 0)
    found = Engine(store.connect()).load(TOKENS[:256])
    assert torch.equal(found, kv)


def test_kv_save_of_late_rank_completes_pages(store: MemoryStore) -> None:
    """A rank that comes seconds later, at start or in the middle, makes the page whole when it comes."""
    engines = [Engine(store.connect(), tp=(2, rank)) for rank in range(2)]
    kv = sequence(engines[0].geometry, 128)
    engines[0].save(TOKENS[:128], kv)
    assert store.connect().stat(deadline_s=1).entries == 0
    engines[1].save(TOKENS[:128], kv)
    assert torch.equal(Engine(store.connect()).load(TOKENS[:128]), kv)
    assert engines[0].counts()["cornplug_saves_total", "stored"] == 2
    assert engines[1].counts() == {}  # the first rank counts


def test_kv_save_of_ranks_in_other_batches_is_whole(store: MemoryStore) -> None:
    """As after /flush_cache, which stops one rank's thread a batch before another's."""
    engines = [Engine(store.connect(), tp=(2, rank)) for rank in range(2)]
    kv = sequence(engines[0].geometry, 256)
    engines[0].save(TOKENS[:256], kv)
    hashes = engines[1].knows(TOKENS[:256])
    engines[1].writer.save(hashes[:2], engines[1].put(kv, 0, 2))
    assert torch.equal(Engine(store.connect()).load(TOKENS[:256]), kv[..., :128, :])
    engines[1].writer.save(hashes[2:], engines[1].put(kv, 2, 2))
    assert torch.equal(Engine(store.connect()).load(TOKENS[:256]), kv)


def test_kv_rank_disconnected_loses_only_open_pages(store: MemoryStore) -> None:
    engines = [Engine(store.connect(), tp=(2, rank)) for rank in range(2)]
    kv = sequence(engines[0].geometry, 256)
    write_together(engines, TOKENS[:128], kv)
    engines[0].save(TOKENS[:256], kv)
    engines[1].store.close()
    engines[0].store.close()
    stat = store.connect().stat(deadline_s=1)
    assert (stat.entries, stat.reservations) == (2, 0)
    assert Engine(store.connect()).load(TOKENS[:256]).shape[3] == 128


def test_kv_save_of_two_replicas_does_not_mix(store: MemoryStore) -> None:
    first, other = (
        Engine(store.connect(), tp=(2, 0)),
        Engine(store.connect(), tp=(2, 1), group=b"another replica!"),
    )
    kv = sequence(first.geometry, 128)
    first.save(TOKENS[:128], kv)
    other.save(TOKENS[:128], kv)
    assert store.connect().stat(deadline_s=1).entries == 0
    Engine(store.connect(), tp=(2, 1)).save(TOKENS[:128], kv)
    assert torch.equal(Engine(store.connect()).load(TOKENS[:128]), kv)


def test_kv_save_of_long_prompt_into_growing_store_is_whole(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A young store makes room beside its answers: for 64 MiB of a hundred pages at first."""
    engine = Engine(store.connect(), page_size=16, page_tokens=16)
    asked: list[int] = []

    def grow(missing: int) -> int | None:
        asked.append(missing)
        return None if len(asked) % 5 == 0 else missing

    monkeypatch.setattr(store.index.placement, "_grow", grow)
    monkeypatch.setattr(kv_writer, "_ROUND_BYTES", 4 * engine.geometry.page_bytes)
    kv = sequence(engine.geometry, 256)
    engine.save(TOKENS[:256], kv)
    assert engine.counts()["cornplug_saves_total", "stored"] == 16
    assert torch.equal(Engine(store.connect(), page_size=16, page_tokens=16).load(TOKENS[:256]), kv)


def test_kv_save_while_store_grows_is_retried(store: MemoryStore) -> None:
    engine = Engine(store.connect())
    kv = sequence(engine.geometry, 256)
    engine.faulty.growing = 1
    threading.Timer(0.05, lambda: setattr(engine.faulty, "growing", None)).start()
    engine.save(TOKENS[:256], kv)
    assert engine.counts()["cornplug_saves_total", "stored"] == 4


def test_kv_save_to_full_store_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(MemoryStore(capacity_bytes=64 << 10).connect())
    keys = [bytes([i]) * 32 for i in range(2)]
    engine.store.reserve([(key, 32 << 10) for key in keys], ReserveTerms("other"), deadline_s=1)
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("it waits for room"))
    monkeypatch.setattr(kv_writer, "time", clock)
    engine.save(TOKENS[:256], sequence(engine.geometry, 256))
    assert engine.counts()["cornplug_saves_total", "full"] == 4


def test_kv_save_to_slow_store_ends_by_deadline(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    """SGLang gives this thread 10 s to stop, and ends the server otherwise."""
    engine = Engine(store.connect())
    monkeypatch.setattr(kv_writer, "_ROUND_BYTES", engine.geometry.page_bytes)
    monkeypatch.setattr(kv_writer, "_SAVE_TIMEOUT_S", 0.3)
    engine.faulty.slow_s = 0.2
    with within(10):
        engine.save(TOKENS, sequence(engine.geometry, len(TOKENS)))
    assert engine.counts()["cornplug_saves_total", "late"] >= 1


def test_kv_saves_and_loads_are_counted(store: MemoryStore) -> None:
    writer, reader = Engine(store.connect(), page_size=16), Engine(store.connect(), page_size=128)
    kv = sequence(writer.geometry, 256)
    writer.save(TOKENS[:256], kv)
    writer.save(TOKENS[:256], kv)
    page_bytes = writer.geometry.page_bytes
    assert writer.counts() == {
        ("cornplug_saves_total", "stored"): 4,
        ("cornplug_saves_total", "present"): 4,
        ("cornplug_bytes_total", "save"): 4 * page_bytes,
    }
    reader.load(TOKENS[:256])
    assert reader.counts() == {
        ("cornplug_hits_total", "store"): 4,
        ("cornplug_saved_tokens_total",): 256,
        ("cornplug_bytes_total", "load"): 4 * page_bytes,
    }


def test_kv_load_of_pages_on_disk_waits_for_them(store: KeyedStore, within: TimeLimits) -> None:
    writer = Engine(store.connect())
    kv = sequence(writer.geometry, 256)
    writer.save(TOKENS[:256], kv)
    shelved = ShelvedStore(store.connect())
    shelved.shelve_all(store)
    reader = Engine(shelved, faulty=shelved, asks=shelved)  # type: ignore[arg-type]
    hashes = reader.knows(TOKENS[:256])
    assert reader.reader.has_first_page(hashes[0], 256)
    assert reader.reader.count_leading(hashes) == (4, 4)
    assert torch.equal(reader.load(TOKENS[:256]), kv)
    assert reader.reader.count_leading(hashes) == (4, 0)
    disk_s = reader.reader.disk_s(4)
    assert disk_s > 0
    within.check(disk_s, 10)


def test_kv_load_of_pages_that_the_disk_withholds_pauses_such_waits(
    store: KeyedStore, within: TimeLimits
) -> None:
    writer = Engine(store.connect())
    writer.save(TOKENS[:256], sequence(writer.geometry, 256))
    shelved = ShelvedStore(store.connect())
    shelved.shelve_all(store)
    shelved.looks = None
    reader = Engine(shelved)  # type: ignore[arg-type]
    reader.run.store = shelved  # type: ignore[assignment]
    began_s = time.monotonic()
    with within(20):
        assert reader.load(TOKENS[:256]).shape[3] == 0
    assert time.monotonic() - began_s >= 1
    assert reader.counts()["cornplug_misses_total", "disk_late"] == 4
    assert reader.load(TOKENS[:256]).shape[3] == 0
    assert len(shelved.recalls) == 1
