"""An engine that runs its encoder only: its answer to a request comes when the rows are in the store."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from collaborators import kept
from time_limits import TimeLimits
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.worker import gpu_model_runner

from cornplug.engine_common import embeddings
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import get_payload, put_payload
from cornplug.testing import FaultyStore
from cornplug.vllm_connector import plugin
from cornplug.vllm_connector.media.metadata import ArrivedEmbedding, CornplugECMetadata
from cornplug.vllm_connector.media.worker import ECWorker

from ..rig import runtime
from .test_scheduler import Stage, identifier, key, put
from .test_worker import NAME, facade

OTHER = identifier(3)


@pytest.fixture
def stage(faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(faulty, monkeypatch, encoder_only=True)


# -- scheduler half -----------------------------------------------------------------------------


def test_ec_scheduler_of_encoder_alone_asks_no_service(stage: Stage) -> None:
    request = stage.request("a", 1)
    assert stage.half.can_schedule(request, 0)
    assert not stage.half.has_arrived(identifier(1))
    stage.take_in(request)
    stage.prepared()
    assert stage.service.asked == []
    assert stage.counted() == {("misses", "embedding", "absent"): 1}


def test_ec_scheduler_of_encoder_alone_encodes_no_stored_embedding(stage: Stage) -> None:
    put(stage.store, 1)
    request = stage.request("a", 1)
    assert stage.half.can_schedule(request, 0)
    assert stage.half.has_arrived(identifier(1))
    moves = stage.take_in(request)
    assert [item.identifier for item in moves.arrived] == [identifier(1)]
    assert stage.counted()["hits", "embedding", "store"] == 1


def test_ec_scheduler_of_encoder_alone_publishes_lost_embedding_again(
    stage: Stage, faulty: FaultyStore
) -> None:
    first, second, third = (stage.request(name, 1, 2) for name in "abc")
    stage.half.can_schedule(first, 0)
    assert stage.take_in(first).save_again == []
    put(stage.store, 1)
    put(stage.store, 2)
    assert stage.half.can_schedule(second, 0)
    assert stage.moves().save_again == []
    # vLLM's cache holds both, and it will not encode them; the store has evicted one.
    faulty.delete([key(2)], deadline_s=1)
    for _ in range(3):
        assert stage.half.can_schedule(third, 0)
    assert stage.moves().save_again == [identifier(2)]
    calls = dict(faulty.calls)
    assert stage.half.can_schedule(third, 0)
    assert (stage.moves().save_again, faulty.calls) == ([], calls)


def test_ec_scheduler_of_encoder_alone_without_store_publishes_nothing_again(
    stage: Stage, faulty: FaultyStore
) -> None:
    stage.half.can_schedule(request := stage.request("a", 1), 0)
    stage.take_in(request)
    faulty.unavailable = True
    assert stage.half.can_schedule(stage.request("b", 1), 0)
    assert stage.moves().save_again == []


def test_ec_scheduler_of_encoder_alone_forgets_finished_requests(stage: Stage) -> None:
    name = "a request that ends"
    stage.half.can_schedule(request := stage.request(name, 1), 0)
    stage.take_in(request)
    stage.half.can_schedule(request, 0)
    assert name in kept(stage.half, str)
    stage.half.finish_request(request)
    assert name not in kept(stage.half, str)


# -- worker half --------------------------------------------------------------------------------


def test_ec_worker_of_encoder_alone_ends_step_when_rows_are_stored(store: MemoryStore) -> None:
    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return put_payload(*args, **kwargs)

    worker = ECWorker(runtime(store.connect()), publishes=True, device="cpu", encoder_only=True)
    with mock.patch.object(embeddings, "put_payload", slowly):
        worker.save(NAME, torch.ones(2, 2), CornplugECMetadata())
        acks = worker.take_acks()
    assert acks is not None
    assert acks.saves == [("stored", 16)]
    worker.close()


def test_ec_worker_of_encoder_alone_waits_for_room_and_not_for_ever(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    monkeypatch.setattr(embeddings, "_MAX_QUEUED", 1)
    over = runtime(store.connect())
    over.background_timeout_s = 0.2
    worker = ECWorker(over, publishes=True, device="cpu", encoder_only=True)
    for name in (NAME, OTHER):
        worker.save(name, torch.ones(2, 2), CornplugECMetadata())
    acks = worker.take_acks()
    assert acks is not None
    assert acks.saves == [("stored", 16)] * 2
    go = threading.Event()
    with mock.patch.object(embeddings, "put_payload", side_effect=lambda *a, **k: go.wait(5)):
        with within(2):
            for name in (NAME, OTHER):
                worker.save(name, torch.ones(2, 2), CornplugECMetadata())
            acks = worker.take_acks()
        assert acks is not None
        assert acks.saves == [("busy", 0)]
        go.set()
        worker.close()


def test_ec_connector_of_encoder_alone_loads_and_saves_again(store: MemoryStore) -> None:
    connector = facade(store, ECConnectorRole.WORKER, consumer=False)
    cache = {NAME: torch.ones(2, 4)}
    arrived = ArrivedEmbedding(OTHER, "float32", (1, 1), bytearray(4))
    moves = CornplugECMetadata([arrived], save_again=[NAME, OTHER, identifier(9)])
    connector.bind_connector_metadata(moves)
    connector.start_save_caches(encoder_cache=cache)
    assert set(cache) == {NAME, OTHER}
    acks: Any = connector.build_connector_worker_meta()
    assert sorted(acks.saves) == [("stored", 4), ("stored", 32)]
    assert get_payload(store.connect(), b"\xab" * 32, deadline_s=1) is not None
    connector.shutdown()


def test_ec_connector_of_whole_engine_loads_once(store: MemoryStore) -> None:
    connector = facade(store, ECConnectorRole.WORKER)
    cache: dict[str, torch.Tensor] = {}
    connector.bind_connector_metadata(
        CornplugECMetadata([ArrivedEmbedding(OTHER, "float32", (1, 1), bytearray(4))])
    )
    connector.start_save_caches(encoder_cache=cache)
    assert cache == {}
    connector.shutdown()


# -- vLLM's first model runner ------------------------------------------------------------------


def test_encoder_only_first_runner_reports_what_the_connector_saved(store: MemoryStore) -> None:
    plugin.register()
    connector = facade(store, ECConnectorRole.WORKER, consumer=False)
    connector.bind_connector_metadata(CornplugECMetadata())
    connector.start_save_caches(encoder_cache={})
    connector.save_caches({NAME: torch.ones(2, 4)}, NAME)
    step = SimpleNamespace(num_scheduled_tokens={"a": 3})
    with (
        mock.patch("vllm.distributed.ec_transfer.has_ec_transfer", return_value=True),
        mock.patch("vllm.distributed.ec_transfer.get_ec_transfer", return_value=connector),
    ):
        output: Any = gpu_model_runner.make_empty_encoder_model_runner_output(step)
        assert output.sampled_token_ids == [[]]
        assert output.ec_connector_output.ec_connector_worker_meta.saves == [("stored", 32)]
        connector.save_caches({NAME: torch.ones(2, 4)}, NAME)
        step.num_scheduled_tokens.clear()
        empty: Any = gpu_model_runner.make_empty_encoder_model_runner_output(step)
    assert empty.ec_connector_output is not None
    assert EMPTY_MODEL_RUNNER_OUTPUT.ec_connector_output is None
    connector.shutdown()


def test_encoder_only_first_runner_leaves_other_connectors_alone() -> None:
    plugin.register()
    other = mock.Mock()
    step = SimpleNamespace(num_scheduled_tokens={"a": 3})
    with (
        mock.patch("vllm.distributed.ec_transfer.has_ec_transfer", return_value=True),
        mock.patch("vllm.distributed.ec_transfer.get_ec_transfer", return_value=other),
    ):
        output = gpu_model_runner.make_empty_encoder_model_runner_output(step)
    assert output.ec_connector_output is None
    other.build_connector_worker_meta.assert_not_called()
