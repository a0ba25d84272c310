"""Leased embeddings between the two halves: no bytes in the scheduler half, a verified copy in each
worker."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from cornplug.codec import PayloadKind
from cornplug.engine_common.embeddings import ExpectedEmbedding
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, put_payload
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.media import late_misses
from cornplug.vllm_connector.media import worker as ec_worker
from cornplug.vllm_connector.media.embedding_leases import EmbeddingLeases
from cornplug.vllm_connector.media.encoder_requests import PendingEmbedding
from cornplug.vllm_connector.media.metadata import (
    ArrivedEmbedding,
    CornplugECMetadata,
    CornplugECWorkerMetadata,
    LeasedRows,
)
from cornplug.vllm_connector.media.worker import ECWorker

from ..rig import runtime
from .test_worker import facade

KEY, NAME = b"k" * 32, "cp1-" + "ab" * 32
ROWS = (np.arange(256 * 64, dtype=np.float32) / 3).reshape(256, 64)
EXPECTED = ExpectedEmbedding(KEY, 256, 64, "float32")


def put(store: MemoryStore, rows: Any = ROWS) -> None:
    payload = NewPayload(
        rows.tobytes(), PayloadKind.EMBEDDING, key=KEY, dtype=str(rows.dtype), shape=rows.shape
    )
    assert put_payload(store.connect(), payload, app="other", deadline_s=1) == "stored"


def pending(leases: EmbeddingLeases) -> PendingEmbedding:
    item = PendingEmbedding(NAME, EXPECTED, ROWS.nbytes, 0.0, 0.0)
    item.arrived = leases.lease(NAME, EXPECTED)
    return item


def leases_held(store: MemoryStore) -> int:
    return store.connect().stat(deadline_s=1).leases


class Ranks:
    """Worker halves that exchange messages with the scheduler half as processes do."""

    def __init__(self, stores: list[Any]) -> None:
        self.workers = [
            ECWorker(runtime(store), publishes=rank == 0, device="cpu", rank=rank)
            for rank, store in enumerate(stores)
        ]
        self.caches: list[dict[str, torch.Tensor]] = [{} for _ in stores]

    def step(self, *arrived: ArrivedEmbedding) -> CornplugECWorkerMetadata:
        """Load embeddings on all ranks. Each rank learns which embeddings the others have."""
        read = [[worker._read(one) is not None for one in arrived] for worker in self.workers]
        common = [all(of_one) for of_one in zip(*read, strict=True)]
        told: Any = None
        for worker, cache in zip(self.workers, self.caches, strict=True):
            worker.take_acks()
            with mock.patch.object(ec_worker, "find_common", return_value=common):
                worker.load(cache, pickle.loads(pickle.dumps(CornplugECMetadata(list(arrived)))))
            acks = worker.take_acks()
            if acks is not None:
                told = acks if told is None else told.aggregate(acks)
        assert isinstance(told, CornplugECWorkerMetadata)
        return told


def test_lease_reads_no_bytes_and_metadata_is_small(store: MemoryStore) -> None:
    put(store)
    faulty = FaultyStore(store.connect())
    found = EmbeddingLeases(runtime(faulty), 1).lease(NAME, EXPECTED)
    assert found is not None
    assert isinstance(found.data, LeasedRows)
    assert "view" not in faulty.calls
    assert len(pickle.dumps(found)) < 600, "that is what each worker process is sent"


def test_lease_of_absent_entry_is_none(store: MemoryStore) -> None:
    assert EmbeddingLeases(runtime(store.connect()), 1).lease(NAME, EXPECTED) is None


@pytest.mark.parametrize("rows", [ROWS[:128], ROWS.reshape(128, 128), ROWS.view(np.int32)])
def test_lease_of_wrong_shape_is_released(store: MemoryStore, rows: Any) -> None:
    put(store, rows)
    with pytest.raises(CodecError) as e:
        EmbeddingLeases(runtime(store.connect()), 1).lease(NAME, EXPECTED)
    assert e.value.reason == "wrong_shape"
    assert leases_held(store) == 0


def test_lease_of_dropped_embedding_is_released(store: MemoryStore) -> None:
    put(store)
    leases = EmbeddingLeases(runtime(store.connect()), 1)
    found = leases.lease(NAME, EXPECTED)
    assert leases_held(store) == 1
    leases.release(found)
    leases.release(None)
    assert leases_held(store) == 0


def test_lease_without_store_is_unavailable(store: MemoryStore) -> None:
    faulty = FaultyStore(store.connect())
    faulty.unavailable = True
    with pytest.raises(StoreUnavailable):
        EmbeddingLeases(runtime(faulty), 1).lease(NAME, EXPECTED)


def test_lease_ends_when_every_rank_has_copied(store: MemoryStore) -> None:
    put(store)
    leases, ranks = EmbeddingLeases(runtime(store.connect()), 2), Ranks([store.connect(), store.connect()])
    item = pending(leases)
    assert leases.mark_sent(item)
    told = ranks.step(item.arrived)  # type: ignore[arg-type]
    for cache in ranks.caches:
        assert np.array_equal(cache[NAME].numpy(), ROWS)
    first, second = told.copied
    assert leases.handle_acks(CornplugECWorkerMetadata(copied=[first, first, (7, first[1])])) == []
    assert leases_held(store) == 1
    assert leases.handle_acks(CornplugECWorkerMetadata(copied=[second])) == [(item, "")]
    assert leases_held(store) == 0
    assert all(worker.take_lost_inputs() == [] for worker in ranks.workers)


def test_corrupt_rows_on_one_rank_are_lost_on_all(store: MemoryStore) -> None:
    put(store)
    broken = FaultyStore(store.connect())
    broken.corrupt_reads = True
    leases, ranks = EmbeddingLeases(runtime(store.connect()), 2), Ranks([store.connect(), broken])
    item = pending(leases)
    leases.mark_sent(item)
    assert item.arrived is not None
    told = ranks.step(ArrivedEmbedding(NAME, "float32", ROWS.shape, item.arrived.data, "r1", 3))
    assert ranks.caches == [{}, {}]
    assert [worker.take_lost_inputs() for worker in ranks.workers] == [[("r1", 3)], [("r1", 3)]]
    assert [worker.take_lost_inputs() for worker in ranks.workers] == [[], []]
    assert leases.handle_acks(told) == [(item, "corrupt")]
    assert store.connect().contains([KEY], deadline_s=1) == b"\0", "the next request must not find it"
    assert leases_held(store) == 0


def test_rank_of_another_host_is_sent_the_bytes(store: MemoryStore) -> None:
    put(store)
    elsewhere = MemoryStore(capacity_bytes=1 << 20).connect()
    leases, ranks = EmbeddingLeases(runtime(store.connect()), 2), Ranks([store.connect(), elsewhere])
    for _ in range(3):
        item = pending(leases)
        assert leases.mark_sent(item)
        assert leases.handle_acks(ranks.step(item.arrived)) == [(item, "stale_location")]  # type: ignore[arg-type]
    item = pending(leases)
    assert not leases.mark_sent(item)
    assert item.arrived is not None
    assert item.arrived.data == bytearray(ROWS.tobytes())
    ranks.step(item.arrived)
    for cache in ranks.caches:
        assert np.array_equal(cache[NAME].numpy(), ROWS)
    assert leases_held(store) == 0


def test_error_of_any_kind_while_reading_is_a_late_miss(store: MemoryStore) -> None:
    put(store)
    worker = ECWorker(runtime(store.connect()), publishes=True, device="cpu")
    found = EmbeddingLeases(runtime(store.connect()), 1).lease(NAME, EXPECTED)
    cache: dict[str, torch.Tensor] = {}
    with (
        mock.patch.object(ec_worker.RowCopies, "read", side_effect=MemoryError),
        mock.patch.object(ec_worker, "find_common", list),
    ):
        worker.load(cache, CornplugECMetadata([found]))  # type: ignore[list-item]
    acks = worker.take_acks()
    assert acks is not None
    assert [reason for _, reason in acks.lost] == ["error"]
    assert (cache, worker.take_lost_inputs()) == ({}, [("", 0)])


@pytest.mark.parametrize(("wrapper", "is_first"), [(0, True), (1, False)])
def test_tower_encodes_lost_items_one_at_a_time(store: MemoryStore, wrapper: int, is_first: bool) -> None:
    """vLLM's own items follow, whichever runner it has."""
    from vllm.v1.core.sched.output import SchedulerOutput

    connector = facade(store, ECConnectorRole.WORKER)
    lost = [("a", 0), ("a", 2)]
    run: list[Any] = []
    scheduled: Any = {"b": [1]}
    step: Any = SchedulerOutput.make_empty() if is_first else scheduled
    if is_first:
        step.scheduled_encoder_inputs = scheduled

    def original(runner: Any, given: Any) -> str:
        run.append(given.scheduled_encoder_inputs if is_first else given)
        return "done"

    with (
        mock.patch("vllm.distributed.ec_transfer.has_ec_transfer", return_value=True),
        mock.patch("vllm.distributed.ec_transfer.get_ec_transfer", return_value=connector),
        mock.patch.object(ECWorker, "take_lost_inputs", side_effect=[lost, []]),
    ):
        assert late_misses.WRAPS[wrapper][2](original, SimpleNamespace(), step) == "done"
        assert late_misses.WRAPS[wrapper][2](original, SimpleNamespace(), step) == "done"
    assert run == [{"a": [0]}, {"a": [2]}, scheduled, scheduled]
    connector.shutdown()
