"""Copies of rows from the store's memory to a device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from encoder_service.simulated_gpu import simulated_gpu

from cornplug.codec import PayloadKind
from cornplug.engine_common.stored_rows import RowCopies
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.store.base import Lease
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, lease_payload, put_payload
from cornplug.testing import FaultyStore

KEY = b"k" * 32
ROWS = np.arange(1000, dtype=np.uint8)


def leased(store: MemoryStore, segments: int = 1) -> tuple[Lease, tuple[int, ...]]:
    payload = NewPayload(
        ROWS.tobytes(), PayloadKind.EMBEDDING, key=KEY, dtype="uint8", shape=ROWS.shape, segments=segments
    )
    assert put_payload(store.connect(), payload, app="a", deadline_s=1) == "stored"
    found = lease_payload(store.connect(), KEY, deadline_s=1)
    assert found is not None
    return found[0], found[1].checksums


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(capacity_bytes=1 << 20)


@pytest.mark.parametrize("segments", [1, 4])
def test_row_copies_on_cpu_are_the_verified_bytes(store: MemoryStore, segments: int) -> None:
    lease, checksums = leased(store, segments)
    copies = RowCopies(torch.device("cpu"))
    rows = copies.read(store.connect(), lease.location, checksums)
    assert copies.send(rows) is rows
    assert bytes(rows.numpy()) == ROWS.tobytes()
    assert bytes(copies.from_bytes(b"abc").numpy()) == b"abc"


def test_row_copies_corrupt_or_out_of_reach_raise(store: MemoryStore) -> None:
    lease, checksums = leased(store)
    copies, broken = RowCopies(torch.device("cpu")), FaultyStore(store.connect())
    broken.corrupt_reads = True
    with pytest.raises(CodecError) as e:
        copies.read(broken, lease.location, checksums)
    assert e.value.reason == "corrupt"
    with pytest.raises(CodecError):
        copies.read(store.connect(), lease.location, ())
    with pytest.raises(StoreUnavailable) as lost:
        copies.read(MemoryStore(capacity_bytes=1 << 16).connect(), lease.location, checksums)
    assert lost.value.reason == "stale_location"


def test_row_copies_on_gpu_are_asynchronous(store: MemoryStore) -> None:
    """The engine's kernels wait for the copy, and the engine's thread does not."""
    lease, checksums = leased(store)
    device = torch.device("cuda:1")
    with simulated_gpu() as cuda:
        copies = RowCopies(device)
        rows = copies.read(store.connect(), lease.location, checksums)
        assert bytes(rows.numpy()) == ROWS.tobytes()
        there = copies.send(rows)
        assert (there.device, there.shape) == (device, (1000,))
        assert cuda.done == [
            ("enter", "inputs"),
            ("leave", "inputs"),
            ("record", "inputs"),
            ("wait", ("compute", "inputs")),
        ]
        assert [one is there for one in cuda.mode.streams_told] == [True]
