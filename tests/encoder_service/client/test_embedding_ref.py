"""A reference never shows other bytes: whatever becomes of the store, and whoever is collected when."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from cornplug.codec import PayloadKind
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef, from_store
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, put_payload
from cornplug.testing.store import contains, fill, key_of

ROWS = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)


class _Host:
    """A store that others fill, and its clock."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        store = MemoryStore(capacity_bytes=1 << 16, clock=lambda: self.now_s)
        self.mine, self.other = store.connect(), store.connect()
        outcome = put_payload(
            self.other,
            NewPayload(
                memoryview(ROWS), PayloadKind.EMBEDDING, key=key_of("e"), dtype="float32", shape=ROWS.shape
            ),
            app="test",
            deadline_s=1,
        )
        assert outcome == "stored"

    def ref(self) -> EmbeddingRef:
        found = from_store(self.mine, key_of("e"), origin="cached", service_time_s=0.0)
        assert found is not None
        return found

    def others_write(self) -> None:
        """Until everything that may go has gone, and its room holds other bytes."""
        for i in range(40):
            fill(self.other, i, b"\x6b" * 8192)
        assert not contains(self.other, 0)[0]


@pytest.fixture
def host() -> _Host:
    return _Host()


@pytest.mark.parametrize("how", ["tensor", "numpy", "data"])
def test_embedding_ref_array_outlives_deleted_ref(host: _Host, how: str) -> None:
    """README's own line: client.encode(...).tensor()."""
    ref = host.ref()
    held = ref.data if how == "data" else getattr(ref, how)()
    del ref
    gc.collect()
    host.others_write()
    assert bytes(memoryview(np.asarray(held)).cast("B")) == ROWS.tobytes()


def test_embedding_ref_kept_past_lease_is_unchanged(host: _Host) -> None:
    ref = host.ref()
    early = ref.tensor()
    host.now_s += 3600.0
    host.others_write()
    assert torch.equal(early, torch.from_numpy(ROWS))
    assert np.array_equal(ref.numpy(), ROWS)


def test_embedding_ref_bfloat16_tensor_is_exact(host: _Host) -> None:
    narrow = torch.from_numpy(ROWS).to(torch.bfloat16)
    raw = narrow.view(torch.uint16).numpy()
    put_payload(
        host.other,
        NewPayload(
            memoryview(raw), PayloadKind.EMBEDDING, key=key_of("b"), dtype="bfloat16", shape=raw.shape
        ),
        app="test",
        deadline_s=1,
    )
    ref = from_store(host.mine, key_of("b"), origin="cached", service_time_s=0.0)
    assert ref is not None
    host.others_write()
    assert torch.equal(ref.tensor(), narrow)
    assert np.array_equal(ref.numpy(), narrow.float().numpy())


def test_embedding_refs_kept_hold_no_leases(host: _Host) -> None:
    """A list of them must not fill the store for the engines."""
    kept = [host.ref() for _ in range(10)]
    assert host.other.stat(deadline_s=1).leases == 0
    host.others_write()
    assert all(np.array_equal(ref.numpy(), ROWS) for ref in kept)


def test_from_store_damaged_entry_is_none(host: _Host) -> None:
    lease = host.mine.lease([key_of("e")], ttl_s=9, deadline_s=1)[0]
    assert lease is not None
    host.mine.raw(lease.location)[5] ^= 1
    host.mine.release([lease.token], deadline_s=1)
    assert from_store(host.mine, key_of("e"), origin="cached", service_time_s=0.0) is None
    assert not contains(host.mine, "e")[0]
    assert host.other.stat(deadline_s=1).leases == 0


def test_from_store_entry_of_other_kind_is_none(host: _Host) -> None:
    put_payload(
        host.other,
        NewPayload(b"12345678", PayloadKind.FEATURE, key=key_of("f"), dtype="float32", shape=(1, 2)),
        app="test",
        deadline_s=1,
    )
    assert from_store(host.mine, key_of("f"), origin="cached", service_time_s=0.0) is None


def test_embedding_ref_write_to_tensor_leaves_others(host: _Host) -> None:
    """torch knows no read-only tensors."""
    ref = host.ref()
    ref.tensor().zero_()
    assert np.array_equal(ref.numpy(), ROWS)
