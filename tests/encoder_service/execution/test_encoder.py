"""The service without sockets: joins, reuse, refusals, stores that fail, towers that fail."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from expected_errors import expect_error
from prometheus_client import CollectorRegistry

from cornplug import identity
from cornplug.codec import PayloadKind
from cornplug.encoder_service.batcher import EncodeResult
from cornplug.encoder_service.execution import dispatcher as dispatcher_module
from cornplug.encoder_service.execution.encoder import EncoderCore
from cornplug.encoder_service.execution.executor import BatchResult
from cornplug.encoder_service.formats.messages import (
    INTERNAL_ERROR_MESSAGE,
    EncodeRefusal,
    EncodeReply,
    WireTensor,
)
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.towers import base
from cornplug.encoder_service.towers import base as tower_base
from cornplug.encoder_service.towers.base import DTYPES, Tower, TowerItem, from_wire
from cornplug.encoder_service.towers.tiles import TileTower
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, get_payload, put_payload
from devkit import checkpoints

from ..conftest import MakeEncoder, Requests, eventually, joined, waiting_for_batch


def value(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(name, labels) or 0.0


def ok(future: Future[EncodeResult]) -> EncodeReply:
    answer = future.result(60)
    assert isinstance(answer, EncodeReply), answer
    return answer


def no(future: Future[EncodeResult]) -> EncodeRefusal:
    answer = future.result(60)
    assert isinstance(answer, EncodeRefusal), answer
    return answer


def passes(encoder: EncoderCore) -> float:
    return value(encoder.metrics.registry, "cornplug_encoder_tower_passes_total")


class Gate:
    """Holds the tower's passes back until opened, and can make them fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Event()
        self.batches: list[int] = []
        self.fails: Any = lambda items: False
        real = TileTower.encode

        def encode(tower: TileTower, items: list[TowerItem]) -> list[torch.Tensor]:
            self.batches.append(len(items))
            self.entered.set()
            assert self.open.wait(20)
            if self.fails(items):
                raise RuntimeError("no memory")
            return real(tower, items)

        monkeypatch.setattr(TileTower, "encode", encode)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def hold(encoder: EncoderCore, gate: Gate, request: Any) -> Future[EncodeResult]:
    """One request that is in the tower when this returns."""
    future = encoder.submit(request)
    assert gate.entered.wait(60)
    return future


def queued(encoder: EncoderCore, count: int) -> None:
    eventually(lambda: waiting_for_batch(encoder) == count)


def test_registry_models_of_equal_tower_share_it(
    registry: ModelRegistry, llava_pair: tuple[Path, Path]
) -> None:
    a, b = (registry.find_by_name(str(p)) for p in llava_pair)
    assert a is not None
    assert b is not None
    assert a.tower is b.tower
    assert a.projector is not b.projector
    assert registry.summary() == "3 models, 2 towers, 3 projectors"
    assert [m.hidden_size for m in registry.served_models()] == [64, 96, 64]
    assert registry.find_by_identity(a.served.identity) is a
    assert registry.find_by_identity(b"?" * 32) is None
    with expect_error(ConfigError, field="--model", match="twice"):
        registry.add(str(llava_pair[0]))
    with expect_error(ConfigError, field="--dtype", match="int8"):
        ModelRegistry(dtype="int8", device="cpu")


def test_encoder_without_store_answers_inline(
    make_encoder: MakeEncoder, request_for: Requests, qwen: Path
) -> None:
    encoder = make_encoder()
    answer = ok(encoder.submit(request_for(qwen, 1)))
    assert answer.origin == "computed"
    assert not answer.stored
    assert answer.tensor is not None
    assert answer.tensor.shape[1] == 64
    assert len(answer.tensor.data) == 4 * 64 * answer.tensor.shape[0]


@pytest.mark.parametrize("family", ["llava", "qwen"])
def test_encoder_tensors_of_this_process_are_encoded_without_bytes(
    family: str, make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    by_wire = request_for(qwen if family == "qwen" else llava_pair[0], 1)
    tensors = {name: from_wire(name, tensor, tuple(DTYPES)) for name, tensor in by_wire.inputs.items()}
    want = ok(make_encoder().submit(by_wire)).tensor
    monkeypatch.setattr(base, "from_wire", None)
    here = msgspec.structs.replace(by_wire, inputs={})
    assert ok(make_encoder().submit(here, inputs=tensors)).tensor == want
    refused = no(
        make_encoder().submit(here, inputs={**tensors, "pixel_values": torch.full((3, 56, 56), torch.nan)})
    )
    assert refused.reason == "bad_input"


def test_encoder_computed_embedding_is_published_then_cached(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], memory_store: MemoryStore
) -> None:
    encoder = make_encoder(memory_store.connect())
    request = request_for(llava_pair[0], 1)
    first = ok(encoder.submit(request))
    assert (first.origin, first.stored, first.tensor) == ("computed", True, None)
    reader = memory_store.connect()
    found = get_payload(reader, request.key, deadline_s=1)
    assert found is not None
    header, data = found
    assert (header.kind, header.dtype, header.shape) == (PayloadKind.EMBEDDING, "float32", (16, 64))
    assert reader.stat(deadline_s=1).bytes_by_app["test"] >= len(data)
    second = ok(encoder.submit(request))
    assert (second.origin, second.stored) == ("cached", True)
    inline = ok(encoder.submit(request, inline=True))
    assert inline.tensor is not None
    assert inline.tensor.data == bytes(data)
    assert passes(encoder) == 1


def test_encoder_two_models_of_one_tower_run_it_once(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = make_encoder()
    held = hold(encoder, gate, request_for(llava_pair[0], 9))
    a = encoder.submit(request_for(llava_pair[0], 1))
    b = encoder.submit(request_for(llava_pair[1], 1))
    queued(encoder, 2)
    gate.open.set()
    answers = [ok(a), ok(b)]
    ok(held)
    assert {x.origin for x in answers} == {"computed", "coalesced"}
    assert [x.tensor.shape for x in answers if x.tensor] == [(16, 64), (16, 96)]
    assert gate.batches == [1, 1]
    # Later, the other model needs no pass at all.
    assert ok(encoder.submit(request_for(llava_pair[1], 9))).origin == "cached"
    assert passes(encoder) == 2


def test_encoder_tower_of_two_widths_runs_once_in_any_family(
    make_encoder: MakeEncoder, qwen: Path, tmp_path: Path
) -> None:
    """Qwen's features are larger than its embeddings: kept while a second LLM wants them, never stored."""
    wide = checkpoints.qwen2_vl(tmp_path / "wide", hidden_size=128, llm_seed=7)
    two = ModelRegistry.open([str(qwen), str(wide)], dtype="float32", device="cpu")
    store = MemoryStore(capacity_bytes=16 << 20).connect()
    encoder, request_for = make_encoder(store, registry=two), Requests(two)
    assert [ok(encoder.submit(request_for(path, 3))).origin for path in (qwen, wide)] == [
        "computed",
        "cached",
    ]
    assert passes(encoder) == 1
    eventually(lambda: store.stat(deadline_s=1).entries == 2)


def test_encoder_duplicate_joins_running_job(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = make_encoder()
    request = request_for(llava_pair[0], 1)
    first = hold(encoder, gate, request)
    others = [encoder.submit(request) for _ in range(3)]
    eventually(lambda: joined(encoder, 4))
    gate.open.set()
    origins = [ok(f).origin for f in (first, *others)]
    assert origins == ["computed", "coalesced", "coalesced", "coalesced"]
    assert passes(encoder) == 1


@pytest.mark.parametrize("inline", [False, True])
def test_encoder_job_that_ends_while_its_duplicate_is_prepared_answers_it(
    inline: bool,
    make_encoder: MakeEncoder,
    request_for: Requests,
    qwen: Path,
    memory_store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The duplicate's first lookup came before the result, and its turn in the queue comes after it."""
    encoder, request = make_encoder(memory_store.connect()), request_for(qwen, 1)
    model = encoder.registry.find_by_name(str(qwen))
    assert model is not None
    preparing, go_on, real = threading.Event(), threading.Event(), type(model.tower).prepare

    def held(tower: Tower, inputs: Any) -> TowerItem:
        preparing.set()
        assert go_on.wait(20)
        return real(tower, inputs)

    monkeypatch.setattr(type(model.tower), "prepare", held)
    duplicate = encoder.submit(request, inline=inline)
    assert preparing.wait(60)
    monkeypatch.setattr(type(model.tower), "prepare", real)
    assert ok(encoder.submit(request)).origin == "computed"
    go_on.set()
    assert ok(duplicate).origin == "cached"
    assert passes(encoder) == 1


def test_encoder_features_are_published_for_other_services(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], memory_store: MemoryStore
) -> None:
    """Another service of the host finds them there."""
    one = make_encoder(memory_store.connect())
    plain = make_encoder()
    request = request_for(llava_pair[1], 4)
    ok(one.submit(request_for(llava_pair[0], 4)))
    reader = memory_store.connect()
    eventually(lambda: reader.stat(deadline_s=1).entries == 2)
    two = make_encoder(memory_store.connect())
    reused, alone = ok(two.submit(request, inline=True)), ok(plain.submit(request))
    assert reused.origin == "cached"
    assert passes(two) == 0
    assert reused.tensor == alone.tensor


def test_encoder_other_salt_shares_no_entry(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    encoder = make_encoder()
    answers = [
        ok(encoder.submit(request_for(llava_pair[0], 1, cache_salt=salt))) for salt in (None, "a", "b")
    ]
    assert [a.origin for a in answers] == ["computed"] * 3
    assert len({a.key for a in answers}) == 3


def test_encoder_batch_across_models_equals_one_by_one(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = make_encoder(max_batch_items=4)
    gate.open.set()
    alone = [ok(make_encoder().submit(request_for(p, s))) for s in (2, 3) for p in llava_pair]
    gate.open.clear()
    gate.entered.clear()
    held = hold(encoder, gate, request_for(llava_pair[0], 9))
    many = [encoder.submit(request_for(p, s)) for s in (2, 3) for p in llava_pair]
    queued(encoder, 4)
    gate.open.set()
    ok(held)
    for a, b in zip(alone, (ok(f) for f in many), strict=True):
        assert a.tensor is not None
        assert b.tensor is not None
        x, y = (torch.frombuffer(bytearray(t.data), dtype=torch.float32) for t in (a.tensor, b.tensor))
        torch.testing.assert_close(x, y, atol=2e-6, rtol=0)
    assert gate.batches[-1] == 2


def test_encoder_unshared_features_are_not_digested(
    make_encoder: MakeEncoder,
    request_for: Requests,
    llava_pair: tuple[Path, Path],
    qwen: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    digested: list[tuple[int, ...]] = []
    digest = tower_base.array_digest

    def counted(dtype: str, shape: tuple[int, ...], data: memoryview) -> bytes:
        digested.append(shape)
        return digest(dtype, shape, data)

    monkeypatch.setattr(tower_base, "array_digest", counted)
    encoder = make_encoder()
    asked = [request_for(qwen, 1), request_for(qwen, 2), request_for(qwen, 1, cache_salt="a")]
    assert [ok(encoder.submit(one)).origin for one in asked] == ["computed"] * 3
    assert digested == []
    ok(encoder.submit(request_for(llava_pair[0], 1)))
    assert len(digested) == 1


def test_encoder_bad_inputs_are_refused_others_answered(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    encoder = make_encoder()
    good = request_for(llava_pair[0], 1)
    bad = [
        encoder.submit(request_for(llava_pair[0], 1, inputs={})),
        encoder.submit(request_for(llava_pair[0], 1, key=b"short")),
        encoder.submit(request_for(llava_pair[0], 1, app="")),
        encoder.submit(
            request_for(llava_pair[0], 1, inputs={"pixel_values": WireTensor("float32", (3,), b"")})
        ),
    ]
    assert [no(f).message.split(":")[0] for f in bad] == ["pixel_values", "key", "app", "pixel_values"]
    assert {no(f).reason for f in bad} == {"bad_input"}
    ok(encoder.submit(good))
    unknown = no(encoder.submit(request_for(llava_pair[0], 1, identity=b"?" * 32)))
    assert unknown.reason == "unknown_model"
    assert str(llava_pair[0]) in unknown.message
    assert (
        value(encoder.metrics.registry, "cornplug_encoder_refusals_total", reason="bad_input", qos="default")
        == 4
    )


def test_encoder_late_and_excess_requests_are_refused(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = make_encoder(max_waiting=2)
    held = hold(encoder, gate, request_for(llava_pair[0], 1))
    late = encoder.submit(request_for(llava_pair[0], 2, deadline_s=1.5))
    full = no(encoder.submit(request_for(llava_pair[0], 3)))
    assert full.reason == "overloaded"
    assert full.retry_after_s is not None
    assert full.retry_after_s > 0
    time.sleep(1.6)
    gate.open.set()
    assert no(late).reason == "too_late"
    ok(held)
    eventually(lambda: encoder.count_waiting() == 0)
    assert passes(encoder) == 1
    ok(encoder.submit(request_for(llava_pair[0], 3)))


def test_encoder_cancelled_request_is_not_computed(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = make_encoder()
    held = hold(encoder, gate, request_for(llava_pair[0], 1))
    gone = encoder.submit(request_for(llava_pair[0], 2))
    stays = encoder.submit(request_for(llava_pair[0], 3))
    leaves = encoder.submit(request_for(llava_pair[0], 3))
    queued(encoder, 3)
    assert gone.cancel()
    assert leaves.cancel()
    gate.open.set()
    ok(held)
    ok(stays)
    assert passes(encoder) == 2


def test_encoder_drain_answers_waiting_and_admits_no_more(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = make_encoder()
    held = hold(encoder, gate, request_for(llava_pair[0], 1))
    assert not encoder.drain(0.05)
    refused = no(encoder.submit(request_for(llava_pair[0], 2)))
    assert (refused.reason, refused.message) == ("overloaded", "the service is stopping")
    gate.open.set()
    assert encoder.drain(10)
    ok(held)


def test_encoder_failing_batch_is_retried_one_by_one(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], gate: Gate
) -> None:
    encoder = make_encoder()
    held = hold(encoder, gate, request_for(llava_pair[0], 1))
    two, three = (encoder.submit(request_for(llava_pair[0], seed)) for seed in (2, 3))
    queued(encoder, 2)
    poison = list[Any]()

    def fails(items: list[TowerItem]) -> bool:
        if len(items) == 2 and not poison:
            poison.append(items[0].digests)
        return any(item.digests in poison for item in items)

    gate.fails = fails
    gate.open.set()
    ok(held)
    answers = sorted((two.result(60), three.result(60)), key=lambda a: isinstance(a, EncodeReply))
    assert isinstance(answers[0], EncodeRefusal)
    assert answers[0].reason == "internal"
    assert answers[0].message == INTERNAL_ERROR_MESSAGE
    assert isinstance(answers[1], EncodeReply)
    assert encoder.is_healthy()
    assert gate.batches == [1, 2, 1, 1]


class DownStore:
    """Every call fails, as a daemon's does that was killed."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise StoreUnavailable("gone", reason="store_down")

        return fail


def test_encoder_failing_store_still_answers_inline(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    encoder = make_encoder(DownStore())
    answer = ok(encoder.submit(request_for(llava_pair[0], 1)))
    assert answer.tensor is not None
    assert not answer.stored
    assert ok(encoder.submit(request_for(llava_pair[1], 1))).origin == "cached"
    assert value(encoder.metrics.registry, "cornplug_encoder_store_failures_total", reason="store_down") > 0


def test_encoder_full_store_answers_inline(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path]
) -> None:
    tiny = MemoryStore(capacity_bytes=4096).connect()
    encoder = make_encoder(tiny)
    answer = ok(encoder.submit(request_for(llava_pair[1], 1)))
    assert not answer.stored
    assert answer.tensor is not None


def test_encoder_stored_features_of_other_dtype_are_recomputed(
    make_encoder: MakeEncoder, request_for: Requests, llava_pair: tuple[Path, Path], memory_store: MemoryStore
) -> None:
    writer = memory_store.connect()
    encoder = make_encoder(writer)
    request = request_for(llava_pair[0], 5)
    loaded = encoder.registry.find_by_identity(request.identity)
    assert loaded is not None
    key = identity.feature_key(
        b"s" * 32,
        loaded.served.tower_fp,
        loaded.tower_spec_fp,
        loaded.tower.prepare(request.inputs).digests,
        None,
    )
    put_payload(
        writer,
        NewPayload(b"x" * 64, PayloadKind.FEATURE, key=key, dtype="bfloat16", shape=(4, 8)),
        app="t",
        deadline_s=1,
    )
    assert ok(encoder.submit(request)).origin == "computed"


def test_encoder_tower_implements_the_protocol(
    registry: ModelRegistry, llava_pair: tuple[Path, Path]
) -> None:
    loaded = registry.find_by_name(str(llava_pair[0]))
    assert loaded is not None
    tower: Tower = loaded.tower
    assert callable(tower.prepare)


def test_encoder_tells_the_store_what_an_embedding_cost(
    make_encoder: MakeEncoder,
    request_for: Requests,
    qwen: Path,
    logged_store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seconds of its batch."""
    encoder = make_encoder(logged_store.client)
    model = encoder.registry.find_by_name(str(qwen))
    assert model is not None
    real = type(model.tower).encode

    def encode(tower: Tower, items: list[TowerItem]) -> Any:
        time.sleep(0.2)
        return real(tower, items)

    monkeypatch.setattr(type(model.tower), "encode", encode)
    for seed in (1, 2):
        assert ok(encoder.submit(request_for(qwen, seed))).stored
    costs = logged_store.costs()
    assert len(costs) >= 2
    assert all(0.2 <= cost < 60 for cost in costs)


def test_encoder_batch_behind_another_on_one_executor_costs_its_own_time(
    make_encoder: MakeEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher, now = make_encoder()._dispatcher, [0.0]
    monkeypatch.setattr(dispatcher_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Executor:
        def run(self, batch: float) -> BatchResult:
            now[0] = batch
            return BatchResult(features={}, embeddings=())

    one: Any = Executor()
    assert dispatcher._run_timed(one, 3.0)[1] == 3.0  # type: ignore[arg-type]
    now[0] = 1.0  # handed over while the first one ran
    assert dispatcher._run_timed(one, 5.0)[1] == 2.0  # type: ignore[arg-type]
