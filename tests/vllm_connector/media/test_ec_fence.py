"""An error of any kind in a hook of embeddings ends their sharing, and never the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole

from cornplug.errors import EncoderUnavailable
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.ec_connector import CornplugECConnector
from cornplug.vllm_connector.media.metadata import (
    ArrivedEmbedding,
    CornplugECMetadata,
    CornplugECWorkerMetadata,
)
from cornplug.vllm_connector.media.worker import ECWorker

from .test_scheduler import Stage, identifier, put
from .test_scheduler import stage as stage  # a fixture
from .test_worker import NAME, facade

HOOKS = [
    "can_schedule",
    "has_arrived",
    "record_allocation",
    "build_metadata",
    "handle_acks",
    "finish_request",
]


def fails(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("a lost entry")


def takes_in(connector: CornplugECConnector, request: Any, publishes: bool | None = None) -> dict[str, bool]:
    """What vLLM's scheduler asks and does for a request: identifier -> whether it expects the embedding from
    the connector. Fails if it does not get one, or if the step says otherwise whether this engine
    `publishes`."""
    end_s = time.monotonic() + 30
    while not connector.ensure_cache_available(request, 0):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    expected = {}
    for index, feature in enumerate(request.mm_features):
        expected[feature.identifier] = connector.has_cache_item(feature.identifier)
        connector.update_state_after_alloc(request, index)
    moves: Any = connector.build_connector_meta(
        SimpleNamespace(free_encoder_mm_hashes=[], total_num_scheduled_tokens=1)  # type: ignore[arg-type]
    )
    assert {one.identifier for one in moves.arrived} == {name for name, ours in expected.items() if ours}
    acks = SimpleNamespace(ec_connector_worker_meta=CornplugECWorkerMetadata())
    connector.update_connector_output(acks)
    assert connector.request_finished(request) == (False, None)
    assert publishes in (None, moves.publish)
    return expected


@pytest.mark.parametrize("hook", HOOKS)
def test_error_in_a_hook_of_the_ec_scheduler_half_ends_sharing_only(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    one = stage()
    connector = facade(None, ECConnectorRole.SCHEDULER, half=one.half)
    one.service.refusal = EncoderUnavailable("no service")
    for image in (1, 2):
        put(one.store, image)
    assert takes_in(connector, one.request("a", 1), publishes=True) == {identifier(1): True}
    monkeypatch.setattr(one.half, hook, fails)
    # Each embedding that the engine was promised comes.
    takes_in(connector, one.request("b", 2, 3))
    after = takes_in(connector, one.request("c", 1, 2), publishes=False)
    assert after == {identifier(1): False, identifier(2): False}
    stats = connector.get_ec_connector_stats()
    assert stats is not None
    assert stats.data["cornplug_misses_total"] == [(("test", "embedding", "error"), [1])]


@pytest.mark.parametrize("hook", ["save", "take_acks"])
def test_error_in_a_hook_of_an_ec_worker_half_ends_publishing_only(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    connector = facade(store, ECConnectorRole.WORKER)
    monkeypatch.setattr(ECWorker, hook, fails)
    cache = {NAME: torch.ones(2, 4)}
    arrived = ArrivedEmbedding("cp1-x", "float32", (1, 1), bytearray(4))
    for _ in range(2):
        connector.bind_connector_metadata(CornplugECMetadata([arrived]))
        connector.start_load_caches(cache)
        assert torch.equal(cache.pop("cp1-x"), torch.zeros(1, 1))
        connector.save_caches(cache, NAME)
        connector.build_connector_worker_meta()
    monkeypatch.undo()
    connector.save_caches(cache, NAME)
    connector.shutdown()
    assert store.connect().stat(deadline_s=1).entries <= (hook == "take_acks")
