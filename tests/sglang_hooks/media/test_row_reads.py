"""Reads of stored embeddings beside the model's thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers import mm_schedule
from time_limits import TimeLimits

from cornplug.engine_common.stored_rows import RowCopies
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.media import encoder_bypass, row_reads
from cornplug.sglang_hooks.media.row_reads import RowReads
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore

from ..hooked import hook_of
from ..media_rig import item, runtime
from .test_encoder_bypass import CPU, put, sample_image, value

on_multimodal_inputs = hook_of(encoder_bypass, "Scheduler._get_multimodal_inputs")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(capacity_bytes=1 << 20)


@pytest.fixture
def faulty(store: MemoryStore) -> FaultyStore:
    return FaultyStore(store.connect())


@pytest.fixture
def reads(faulty: FaultyStore) -> Iterator[RowReads]:
    reads = RowReads(runtime(faulty), CPU)
    yield reads
    reads.close()


def key(seed: int) -> bytes:
    return bytes([seed]) * 32


def taken(reads: RowReads, seed: int) -> torch.Tensor:
    found = reads.take(key(seed))
    assert found is not None
    header, rows = found
    return reads.send(rows).view(torch.float32).view(header.shape)


def test_row_read_runs_on_another_thread_before_it_is_taken(
    reads: RowReads, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(faulty, 1, value(1))
    threads: list[int] = []
    ended = threading.Event()
    quick = RowCopies.read

    def read(*args: Any) -> Any:
        threads.append(threading.get_ident())
        try:
            return quick(*args)
        finally:
            ended.set()

    monkeypatch.setattr(RowCopies, "read", read)
    reads.start(key(1))
    reads.start(key(1))
    assert ended.wait(30)
    assert torch.equal(taken(reads, 1), value(1))
    assert len(threads) == 1
    assert threads != [threading.get_ident()]
    assert faulty.calls["lease"] == 1
    assert torch.equal(taken(reads, 1), value(1)), "once taken, it is read again"


def test_row_read_holds_no_lease_afterwards(reads: RowReads, store: MemoryStore) -> None:
    put(store.connect(), 1, value(1))
    taken(reads, 1)
    assert store.connect().stat(deadline_s=1).leases == 0


def test_row_read_of_absent_entry_is_none(reads: RowReads) -> None:
    assert reads.take(key(1)) is None


def test_row_read_of_corrupt_entry_deletes_it(reads: RowReads, faulty: FaultyStore) -> None:
    put(faulty, 1, value(1))
    faulty.corrupt_reads = True
    reads.start(key(1))
    with pytest.raises(CodecError) as e:
        reads.take(key(1))
    assert e.value.reason == "corrupt"
    assert faulty.contains([key(1)], deadline_s=1) == b"\0"
    assert faulty.stat(deadline_s=1).leases == 0


def test_row_read_that_hangs_is_a_miss_in_time(
    faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    release = threading.Event()
    monkeypatch.setattr(RowCopies, "fetch", lambda *_, **__: release.wait(60))
    run = runtime(faulty)
    run.background_timeout_s = 0.05
    reads = RowReads(run, CPU)
    with within(20), pytest.raises(StoreUnavailable) as e:
        reads.take(key(1))
    assert e.value.reason == "load_timeout"
    release.set()
    reads.close()


def test_row_reads_that_nobody_takes_are_dropped(
    reads: RowReads, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reads, "MAX_HELD_BYTES", 2 * value(1).nbytes)
    for seed in range(1, 7):
        put(faulty, seed, value(seed))
        reads.start(key(seed))
        reads._started[key(seed)].result(30)
    assert list(reads._started) == [key(seed) for seed in (4, 5, 6)]
    monkeypatch.setattr(row_reads, "MAX_STARTED", 2)
    reads.start(key(1))
    assert list(reads._started) == [key(6), key(1)]
    assert torch.equal(taken(reads, 5), value(5)), "what was dropped is read again"


def test_request_that_arrives_starts_reads_of_missing_items(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mm_schedule.init_mm_embedding_cache(1 << 20)
    started: list[bytes | None] = []
    source = SimpleNamespace(prefetch=lambda items: started.extend(map(encoder_bypass.key_of, items)))
    monkeypatch.setattr(activation, "is_on", lambda: True)
    monkeypatch.setattr(activation, "config", lambda: runtime(store.connect()).config)
    monkeypatch.setattr(encoder_bypass, "_embedding_source", lambda: source)
    cached, missing = sample_image(1), sample_image(2)
    for one in (cached, missing):
        one.set_pad_value()
    assert mm_schedule.embedding_cache is not None
    embedded = mm_schedule.EmbeddingResult(embedding=value(1))
    assert mm_schedule.embedding_cache.set(cached.hash, embedded)
    on_multimodal_inputs(SimpleNamespace(mm_items=[cached, missing]), None, None)
    assert started == [key(2)]
    on_multimodal_inputs(SimpleNamespace(mm_items=[item(3), sample_image(4, None)]), None, None)
    on_multimodal_inputs(None, None, None)
    assert started == [key(2)]
