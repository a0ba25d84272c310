"""What waits to be published while the store is slow."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cornplug.engine_common import embeddings
from cornplug.engine_common.embeddings import EmbeddingPublisher
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore


def test_embedding_publisher_tells_the_store_what_an_embedding_cost() -> None:
    store, outcomes = MemoryStore(capacity_bytes=1 << 20), list[str]()
    here: Any = SimpleNamespace(app="test", background_timeout_s=1.0, store=store.connect())
    offers = EmbeddingPublisher(here, lambda outcome, size: outcomes.append(outcome))
    offers.enqueue(b"k" * 32, torch.zeros(2, 8), cost_s=0.25)
    offers.enqueue(b"l" * 32, torch.zeros(2, 8), cost_s=1e9)
    offers.enqueue(b"m" * 32, torch.zeros(2, 8))
    offers.flush(60)
    offers.close()
    assert outcomes == ["stored"] * 3
    entries = [store.index.find(key * 32) for key in (b"k", b"l", b"m")]
    assert [entry.cost_s for entry in entries if entry is not None] == [0.25, 3600.0, 0.0]


def test_embedding_publisher_flush_waits_for_offers_and_patience_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(embeddings, "_MAX_QUEUED", 1)
    store, outcomes = MemoryStore(capacity_bytes=1 << 20), list[str]()
    here: Any = SimpleNamespace(app="test", background_timeout_s=1.0, store=store.connect())
    offers = EmbeddingPublisher(here, lambda outcome, size: outcomes.append(outcome))
    for key in (b"k", b"l", b"m"):
        offers.enqueue(key * 32, torch.zeros(2, 8), wait_s=20)
    offers.flush(20)
    assert outcomes == ["stored"] * 3
    go = threading.Event()
    monkeypatch.setattr(embeddings, "put_payload", lambda *_, **__: go.wait(20) and "stored")
    offers.enqueue(b"n" * 32, torch.zeros(2, 8))
    offers.flush(0.01)
    assert len(outcomes) == 3, "it waited longer than its timeout"
    go.set()
    offers.close()


def test_embedding_publisher_queue_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 embeddings of a large page are 1.9 GB of an accelerator's memory."""
    monkeypatch.setattr(embeddings, "_MAX_QUEUED_BYTES", 10_000)
    go, outcomes = threading.Event(), list[str]()

    def put(*args: Any, **kwargs: Any) -> str:
        assert go.wait(20)
        return "stored"

    monkeypatch.setattr(embeddings, "put_payload", put)

    class Here:
        app, background_timeout_s, store = "test", 1.0, FaultyStore

    here: Any = Here()
    offers = EmbeddingPublisher(here, lambda outcome, size: outcomes.append(outcome))
    for rows in (1_000, 10, 10):  # the first is larger than all that may wait, and alone
        offers.enqueue(b"k" * 32, torch.zeros(rows, 8))
    assert outcomes == ["busy", "busy"]
    go.set()
    offers.flush(60)
    offers.enqueue(b"k" * 32, torch.zeros(100, 8))
    offers.flush(60)
    offers.close()
    assert outcomes == ["busy", "busy", "stored", "stored"]
