"""Embeddings between the two halves: verified into memory that both map, or carried by a step's metadata."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cornplug.codec import PayloadKind
from cornplug.engine_common.embeddings import ExpectedEmbedding
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, put_payload
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.media.metadata import (
    ArrivedEmbedding,
    CornplugECMetadata,
    CornplugECWorkerMetadata,
    RowLocation,
    RowMemory,
)
from cornplug.vllm_connector.media.scheduler import Arrivals
from cornplug.vllm_connector.media.worker import ECWorker

from ..rig import runtime

KEY, NAME = b"k" * 32, "cp1-" + "ab" * 32
ROWS = (np.arange(256 * 64, dtype=np.float32) / 3).reshape(256, 64)
SIZE = ROWS.nbytes
EXPECTED = ExpectedEmbedding(KEY, 256, 64, "float32")


@pytest.fixture
def memory() -> Iterator[RowMemory]:
    """Room for one of these embeddings, that both ranks have mapped."""
    memory = RowMemory(2, capacity_bytes=SIZE)
    for rank in (0, 1):
        memory.record_mapped(rank)
    yield memory
    memory.close()


@pytest.fixture
def filled(store: MemoryStore) -> MemoryStore:
    put(store)
    return store


def put(store: MemoryStore, rows: Any = ROWS) -> None:
    outcome = put_payload(
        store.connect(),
        NewPayload(rows.tobytes(), PayloadKind.EMBEDDING, key=KEY, dtype=str(rows.dtype), shape=rows.shape),
        app="other",
        deadline_s=1,
    )
    assert outcome == "stored"


def arrivals(store: Any, memory: RowMemory | None) -> Arrivals:
    return Arrivals(runtime(store), memory)


def read(of: Arrivals) -> ArrivedEmbedding | None:
    return of.read(NAME, EXPECTED, SIZE)


def test_arrivals_stored_embedding_lies_in_mapped_memory(filled: MemoryStore, memory: RowMemory) -> None:
    found = read(arrivals(filled.connect(), memory))
    assert found is not None
    assert isinstance(found.data, RowLocation)
    assert bytes(memory.view(found.data)) == ROWS.tobytes()
    assert len(pickle.dumps(found)) < 400, "that is what each worker process is sent"


def test_arrivals_without_room_carry_the_bytes(filled: MemoryStore, memory: RowMemory) -> None:
    ours = arrivals(filled.connect(), memory)
    first, second = read(ours), read(ours)
    assert first is not None
    assert second is not None
    assert isinstance(first.data, RowLocation)
    assert second.data == bytearray(ROWS.tobytes())


def test_arrivals_without_memory_carry_the_bytes(filled: MemoryStore) -> None:
    found = read(arrivals(filled.connect(), None))
    assert found is not None
    assert found.data == bytearray(ROWS.tobytes())


def test_arrivals_absent_entry_keeps_no_room(store: MemoryStore, memory: RowMemory) -> None:
    assert read(arrivals(store.connect(), memory)) is None
    assert memory.allocate(SIZE) is not None


@pytest.mark.parametrize("rows", [ROWS[:128], ROWS.reshape(128, 128), ROWS.view(np.int32)])
def test_arrivals_entry_of_wrong_shape_keeps_no_room(
    store: MemoryStore, memory: RowMemory, rows: Any
) -> None:
    put(store, rows)
    with pytest.raises(CodecError) as e:
        read(arrivals(store.connect(), memory))
    assert e.value.reason == "wrong_shape"
    assert memory.allocate(SIZE) is not None


def test_arrivals_store_that_is_down_keeps_no_room(filled: MemoryStore, memory: RowMemory) -> None:
    faulty = FaultyStore(filled.connect())
    faulty.unavailable = True
    with pytest.raises(StoreUnavailable):
        read(arrivals(faulty, memory))
    assert memory.allocate(SIZE) is not None


def test_arrivals_dropped_embedding_keeps_no_room(filled: MemoryStore, memory: RowMemory) -> None:
    ours = arrivals(filled.connect(), memory)
    ours.free(read(ours))
    ours.free(None)
    assert memory.allocate(SIZE) is not None


def test_arrivals_rows_by_value_lie_in_mapped_memory(store: MemoryStore, memory: RowMemory) -> None:
    ours = arrivals(store.connect(), memory)
    held = ours.keep_rows(ROWS.tobytes())
    assert isinstance(held, RowLocation)
    assert bytes(memory.view(held)) == ROWS.tobytes()
    assert ours.keep_rows(b"more") == bytearray(b"more")


def step(workers: list[ECWorker], moves: CornplugECMetadata) -> tuple[list[Any], Any]:
    """Each worker's cache, and what the scheduler is told: a step, through the messages between processes."""
    caches: list[dict[str, torch.Tensor]] = []
    told: Any = None
    for worker in workers:
        cache: dict[str, torch.Tensor] = {}
        worker.load(cache, pickle.loads(pickle.dumps(moves)))
        caches.append(cache)
        acks = worker.take_acks()
        if acks is not None:
            told = acks if told is None else told.aggregate(acks)
    return caches, told


def test_arrivals_reach_every_rank_and_make_room(filled: MemoryStore) -> None:
    memory = RowMemory(2, capacity_bytes=SIZE)
    ours = arrivals(filled.connect(), memory)
    workers = [
        ECWorker(runtime(filled.connect()), publishes=rank == 0, device="cpu", rank=rank) for rank in (0, 1)
    ]
    early = read(ours)
    assert early is not None
    assert not isinstance(early.data, RowLocation), "no rank has mapped the memory"
    caches, told = step(workers, CornplugECMetadata([early], row_memory_address=ours.address))
    ours.handle_acks(told)
    assert ours.address == ""
    for _ in range(3):
        found = read(ours)
        assert found is not None
        assert isinstance(found.data, RowLocation)
        ours.mark_sent(found)
        more, told = step(workers, CornplugECMetadata([found], row_memory_address=ours.address))
        assert isinstance(told, CornplugECWorkerMetadata)
        assert sorted(told.copied_rows) == [(0, found.data.offset), (1, found.data.offset)]
        assert memory.allocate(1) is None, "both have it, and the scheduler does not know yet"
        ours.handle_acks(told)
        caches += more
    for cache in caches:
        assert np.array_equal(cache[NAME].numpy(), ROWS)
    for worker in workers:
        worker.close()
    ours.close()
