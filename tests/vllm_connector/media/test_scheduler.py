"""The encoder-cache scheduler: every way that an image's embedding comes, or does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from collaborators import kept, recorded
from time_limits import TimeLimits
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

from cornplug.codec import PayloadKind
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest, WireTensor
from cornplug.engine_common import embeddings, engine_state
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.errors import CheckpointError, EncoderRefused, EncoderUnavailable
from cornplug.metrics import Tally
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, get_payload, put_payload
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.cpu_use import WAKE_TIMER
from cornplug.vllm_connector.media import encoder_requests
from cornplug.vllm_connector.media import scheduler as ec_scheduler
from cornplug.vllm_connector.media.encoder_requests import PendingEmbedding
from cornplug.vllm_connector.media.metadata import (
    ArrivedEmbedding,
    CornplugECWorkerMetadata,
    LeasedRows,
)
from cornplug.vllm_connector.media.scheduler import ECScheduler
from cornplug.vllm_connector.media.video_digest import unshared_name

from ..rig import runtime

ROWS, HIDDEN = 6, 16
DEADLINE_S = 5.0


class Service:
    """A SocketEncoder whose answers a test gives by hand."""

    def __init__(self) -> None:
        self.asked: list[tuple[EncodeRequest, Future[EncodeReply]]] = []
        self.refusal: Exception | None = None
        self.closed = False

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]:
        if self.refusal is not None:
            raise self.refusal
        future: Future[EncodeReply] = Future()
        self.asked.append((request, future))
        return future

    def close(self) -> None:
        self.closed = True


class Stage:
    """A scheduler half, its service, its store, and a clock."""

    def __init__(
        self,
        store: Any,
        monkeypatch: pytest.MonkeyPatch,
        identity: Any = None,
        encoder_only: bool = False,
        ranks: int = 1,
        **fields: Any,
    ) -> None:
        self.store, self.service, self.skew = store, Service(), 0.0
        self.trace_headers: dict[str, str] | None = None
        self.inputs = SimpleNamespace(
            tower_inputs=lambda feature: {"pixel_values": WireTensor("float32", (1,), b"1234")}
        )
        config = SimpleNamespace(
            model_config=SimpleNamespace(
                dtype=torch.float32, get_hidden_size=lambda: HIDDEN, hf_config=SimpleNamespace()
            ),
            parallel_config=SimpleNamespace(
                distributed_executor_backend="uni" if ranks == 1 else "mp",
                tensor_parallel_size=ranks,
                prefill_context_parallel_size=1,
            ),
            device_config=SimpleNamespace(device_type="cpu"),
        )
        known = identity or (lambda config: TowerIdentity(b"i" * 32, b"s" * 32))
        self.tally = Tally()
        self.preparer = ThreadPoolExecutor(1)
        with (
            mock.patch.object(encoder_requests, "MediaInputs", return_value=self.inputs),
            mock.patch.object(encoder_requests, "engine_encoder", return_value=self.service),
            mock.patch.object(encoder_requests, "tower_identity", known),
            mock.patch.object(encoder_requests, "ThreadPoolExecutor", return_value=self.preparer),
            recorded(encoder_requests, "CurrentIdentity") as identities,
        ):
            run: Any = runtime(store, **fields)
            self.half = ECScheduler(config, run, self.tally, encoder_only=encoder_only)  # type: ignore[arg-type]
            assert identities[0].current()[1].wait(30)
        for module in (ec_scheduler, encoder_requests):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=self.now))
        self.counts: dict[tuple[str, ...], float] = {}

    def now(self) -> float:
        return time.monotonic() + self.skew

    def request(self, name: str, *images: int, salt: str | None = None) -> Any:
        return SimpleNamespace(
            request_id=name,
            cache_salt=salt,
            trace_headers=self.trace_headers,
            mm_features=[feature(identifier(p), 10 * i) for i, p in enumerate(images)],
        )

    def asked(self, count: int) -> None:
        """Wait until the preparing thread has sent so many requests."""
        end_s = time.monotonic() + 30
        while len(self.service.asked) < count:
            assert time.monotonic() < end_s
            time.sleep(0.001)
        self.prepared()

    def prepared(self) -> None:
        """Wait until the preparing thread has nothing to do."""
        self.preparer.submit(lambda: None).result(60)

    def admits_more(self) -> bool:
        """Whether no embedding that waits takes memory: with a limit of none, another request is begun."""
        put(self.store, 999)
        request = self.request("more", 999)
        with mock.patch.object(ec_scheduler, "_MAX_WAITING_BYTES", 0):
            admitted = self.half.can_schedule(request, 0)
        self.half.finish_request(request)
        return admitted

    def answer(self, nth: int = -1, **changes: Any) -> None:
        request, future = self.service.asked[nth]
        fields = {
            "id": 1,
            "key": request.key,
            "origin": "computed",
            "stored": False,
            "tensor": WireTensor("float32", (ROWS, HIDDEN), embedding().tobytes()),
            "service_time_s": 0.1,
            **changes,
        }
        future.set_result(EncodeReply(**fields))

    def take_in(self, request: Any, freed: list[str] | None = None) -> Any:
        """The engine schedules all of a request's images: what the worker half is told."""
        for feature in request.mm_features:
            self.half.has_arrived(feature.identifier)
        for index in range(len(request.mm_features)):
            self.half.record_allocation(request, index)
        moves = self.moves(freed)
        self.half.handle_acks(self.copied(moves))
        return moves

    def copied(self, moves: Any, *, ranks: int = 1, lost: str = "") -> CornplugECWorkerMetadata:
        """What the worker halves answer, once they have copied the leased rows or lost them."""
        tokens = [one.data.token for one in moves.arrived if isinstance(one.data, LeasedRows)]
        copied = [(rank, token) for rank in range(ranks) for token in tokens]
        return CornplugECWorkerMetadata(copied=copied, lost=[(token, lost) for token in tokens if lost])

    def content(self, one: ArrivedEmbedding) -> bytes:
        """The rows that a worker copies."""
        if not isinstance(one.data, LeasedRows):
            return bytes(one.data)
        return bytes(self.store.view(one.data.location))

    def moves(self, freed: list[str] | None = None) -> Any:
        return self.half.build_metadata(
            SimpleNamespace(free_encoder_mm_hashes=freed or [], total_num_scheduled_tokens=1)
        )  # type: ignore[arg-type]

    def counted(self) -> dict[tuple[str, ...], float]:
        for metric, rows in self.tally.drain().items():
            for labels, values in rows:
                if metric != "cornplug_wait_seconds":
                    key = (metric.removeprefix("cornplug_").removesuffix("_total"), *labels[1:])
                    self.counts[key] = self.counts.get(key, 0) + sum(values)
        return self.counts


def identifier(image: int) -> str:
    return f"cp1-{image:064x}"


def key(image: int) -> bytes:
    return image.to_bytes(32, "big")


def feature(name: str, offset: int, length: int = ROWS) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))


def embedding() -> Any:
    return (torch.arange(ROWS * HIDDEN, dtype=torch.float32) / 7).numpy()


def put(store: Any, image: int, **changes: Any) -> None:
    fields = {
        "kind": PayloadKind.EMBEDDING,
        "key": key(image),
        "dtype": "float32",
        "shape": (ROWS, HIDDEN),
        **changes,
    }
    payload = NewPayload(fields.pop("payload", embedding().tobytes()), **fields)
    assert put_payload(store, payload, app="other", deadline_s=1) == "stored"


@pytest.fixture
def stage(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Stage]]:
    stages: list[Stage] = []

    def make(**options: Any) -> Stage:
        stages.append(Stage(options.pop("over", None) or store.connect(), monkeypatch, **options))
        return stages[-1]

    yield make
    for one in stages:
        one.half.close()
        assert one.service.closed


def test_ec_scheduler_stored_entry_is_loaded(stage: Callable[..., Stage], store: MemoryStore) -> None:
    here = stage()
    put(here.store, 1)
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    assert here.half.has_arrived(identifier(1))
    moves = here.take_in(request)
    assert [(m.identifier, m.dtype, m.shape) for m in moves.arrived] == [
        (identifier(1), "float32", (ROWS, HIDDEN))
    ]
    assert here.content(moves.arrived[0]) == embedding().tobytes()
    assert moves.publish
    assert here.counted() == {
        ("hits", "embedding", "store"): 1,
        ("saved_tower_passes",): 1,
        ("bytes", "embedding", "load"): ROWS * HIDDEN * 4,
    }
    assert not here.service.asked
    assert here.moves().arrived == []
    assert store.connect().stat(deadline_s=1).leases == 0


def test_ec_scheduler_rows_that_come_by_value_are_stored_for_the_next_engine(
    stage: Callable[..., Stage],
) -> None:
    here = stage()
    request = here.request("a", 2)
    here.half.can_schedule(request, 0)
    here.asked(1)
    here.answer(stored=False)
    assert here.half.can_schedule(request, 0)
    end_s = time.monotonic() + 60
    while (found := get_payload(here.store, key(2), deadline_s=1)) is None:
        assert time.monotonic() < end_s, "the embedding is not saved"
        time.sleep(0.001)
    assert bytes(found[1]) == embedding().tobytes()
    assert here.content(here.take_in(request).arrived[0]) == embedding().tobytes()


@pytest.mark.parametrize("origin", ["computed", "coalesced", "cached"])
@pytest.mark.parametrize("stored", [True, False])
def test_ec_scheduler_encoder_reply_is_loaded(
    stage: Callable[..., Stage], origin: str, stored: bool, within: TimeLimits
) -> None:
    here = stage()
    request = here.request("a", 2, salt="tenant")
    assert not here.half.can_schedule(request, 0)
    assert not here.half.has_arrived(identifier(2))
    here.asked(1)
    asked = here.service.asked[0][0]
    assert (asked.identity, asked.key, asked.cache_salt, asked.app) == (b"s" * 32, key(2), "tenant", "test")
    assert asked.deadline_s <= 10
    within.check(10 - asked.deadline_s, 1)
    assert not here.half.can_schedule(request, 0)
    if stored:
        put(here.store, 2)
        here.answer(origin=origin, stored=True, tensor=None)
    else:
        here.answer(origin=origin)
    assert here.half.can_schedule(request, 0)
    moves = here.take_in(request)
    assert here.content(moves.arrived[0]) == embedding().tobytes()
    assert here.counted()["hits", "embedding", f"service_{origin}"] == 1


def test_ec_scheduler_polling_makes_no_further_calls(
    stage: Callable[..., Stage], faulty: FaultyStore
) -> None:
    here = stage(over=faulty)
    request = here.request("a", 1, 2, 3)
    here.half.can_schedule(request, 0)
    here.asked(3)
    calls = dict(faulty.calls)
    for _ in range(200):
        assert not here.half.can_schedule(request, 0)
    assert faulty.calls == calls
    assert len(here.service.asked) == 3
    for i in range(3):
        here.answer(i, stored=True)
    assert here.half.can_schedule(request, 0)
    for _ in range(200):
        assert here.half.can_schedule(request, 0)
    assert faulty.calls == calls


def test_ec_scheduler_entry_evicted_after_reply_is_miss(stage: Callable[..., Stage]) -> None:
    here = stage()
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.asked(1)
    here.answer(stored=True, tensor=None)
    assert here.half.can_schedule(request, 0), "the engine encodes"
    assert not here.half.has_arrived(identifier(1))
    assert here.take_in(request).arrived == []
    assert here.counted() == {("misses", "embedding", "evicted"): 1}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "tensor": WireTensor(
                "float32", (ROWS - 1, HIDDEN), embedding().tobytes()[: 4 * HIDDEN * (ROWS - 1)]
            )
        },
        {"tensor": WireTensor("float32", (HIDDEN, ROWS), embedding().tobytes())},
        {"tensor": WireTensor("bfloat16", (ROWS, HIDDEN), embedding().tobytes()[: 2 * ROWS * HIDDEN])},
        {"tensor": WireTensor("float32", (ROWS, HIDDEN), embedding().tobytes()[:-4])},
        {"tensor": WireTensor("float32", (ROWS, HIDDEN), b"")},
    ],
)
def test_ec_scheduler_reply_of_wrong_shape_is_miss(
    stage: Callable[..., Stage], changes: dict[str, Any]
) -> None:
    here = stage()
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.asked(1)
    here.answer(**changes)
    assert here.half.can_schedule(request, 0)
    assert not here.half.has_arrived(identifier(1))
    assert here.counted() == {("misses", "embedding", "wrong_shape"): 1}


def test_ec_scheduler_reply_for_other_key_starts_backoff(stage: Callable[..., Stage]) -> None:
    here = stage()
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.asked(1)
    here.answer(key=key(9))
    assert here.half.can_schedule(request, 0)
    assert here.counted() == {("misses", "embedding", "encoder_bad_response"): 1}
    # A service that mixes up its answers is left alone for a while.
    assert here.half.can_schedule(here.request("b", 2), 0)
    assert here.counted()["misses", "embedding", "encoder_backoff"] == 1


@pytest.mark.parametrize("shape", [(ROWS, HIDDEN // 2), (ROWS * HIDDEN,), (ROWS + 1, HIDDEN)])
def test_ec_scheduler_entry_of_wrong_shape_is_miss(
    stage: Callable[..., Stage], shape: tuple[int, ...]
) -> None:
    here = stage()
    size = 4 * torch.Size(shape).numel()
    put(here.store, 1, shape=shape, payload=bytes(size))
    assert here.half.can_schedule(here.request("a", 1), 0)
    assert here.counted() == {("misses", "embedding", "wrong_shape"): 1}


def test_ec_scheduler_entry_that_a_worker_loses_is_a_counted_miss(
    stage: Callable[..., Stage], faulty: FaultyStore
) -> None:
    """It was promised, so a worker's tower encodes it. The next request finds no corrupt entry."""
    here = stage(over=faulty)
    put(here.store, 1)
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    here.half.record_allocation(request, 0)
    moves = here.moves()
    assert [(one.request_id, one.input_id) for one in moves.arrived] == [("a", 0)]
    assert here.counted() == {}
    here.half.handle_acks(here.copied(moves, lost="corrupt"))
    assert here.counted() == {("misses", "embedding", "corrupt"): 1}
    assert faulty.contains([key(1)], deadline_s=1) == b"\0"
    assert faulty.stat(deadline_s=1).leases == 0


def test_ec_scheduler_reads_no_rows(stage: Callable[..., Stage], faulty: FaultyStore) -> None:
    here = stage(over=faulty)
    put(here.store, 1)
    calls = dict(faulty.calls)
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    here.take_in(request)
    assert faulty.calls.get("view") == calls.get("view")
    assert faulty.calls["lease"] == 1


def test_ec_scheduler_lease_that_gets_old_is_renewed(stage: Callable[..., Stage]) -> None:
    here = stage()
    put(here.store, 1)
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    first = here.half.find_arrived(identifier(1))
    here.skew = 14.0
    assert here.half.can_schedule(request, 0)
    assert here.half.find_arrived(identifier(1)) is first
    here.skew = 15.5
    assert here.half.can_schedule(request, 0)
    second = here.half.find_arrived(identifier(1))
    assert second is not None
    assert second is not first
    assert here.store.stat(deadline_s=1).leases == 1
    here.store.delete([key(1)], deadline_s=1)
    here.skew = 31.5
    assert here.half.can_schedule(request, 0), "the engine encodes"
    assert not here.half.has_arrived(identifier(1))
    assert here.counted() == {("misses", "embedding", "evicted"): 1}
    assert here.store.stat(deadline_s=1).leases == 0


@pytest.mark.parametrize("outcome", ["stored", "full", "late"])
def test_ec_scheduler_large_rows_by_value_are_stored_then_leased(
    stage: Callable[..., Stage], faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    """The metadata of a step carries large rows only if the store does not take them."""
    monkeypatch.setattr(ec_scheduler, "_MAX_METADATA_BYTES", 100)
    here = stage(over=faulty)
    request = here.request("a", 2)
    here.half.can_schedule(request, 0)
    here.asked(1)
    faulty.full = outcome == "full"
    go = threading.Event()
    if outcome == "late":
        slow = embeddings.put_payload
        monkeypatch.setattr(embeddings, "put_payload", lambda *a, **k: go.wait(60) and slow(*a, **k))
    here.answer(stored=False)
    if outcome == "late":
        assert not here.half.can_schedule(request, 0)
        here.skew = 10.5
    end_s = time.monotonic() + 30
    while not here.half.can_schedule(request, 0):
        assert time.monotonic() < end_s
        time.sleep(0.001)
    moves = here.take_in(request)
    go.set()
    assert isinstance(moves.arrived[0].data, LeasedRows) is (outcome == "stored")
    assert here.content(moves.arrived[0]) == embedding().tobytes()
    assert here.counted()["hits", "embedding", "service_computed"] == 1


def test_ec_scheduler_waits_only_for_what_the_encoder_cache_takes(stage: Callable[..., Stage]) -> None:
    here = stage()
    here.half.limit_rows(2 * ROWS)
    request = here.request("a", 1, 1, 2, 3, 4)
    assert not here.half.can_schedule(request, 0)
    here.asked(4)
    for nth in range(2):
        here.answer(nth)
    assert here.half.can_schedule(request, 0), "images 3 and 4 do not fit beside 1 and 2"
    assert not here.half.has_arrived(identifier(3))
    here.take_in(here.request("a", 1, 1, 2))
    assert not here.half.can_schedule(request, 30)
    here.answer(2)
    here.answer(3)
    assert here.half.can_schedule(request, 30)


def test_ec_scheduler_memory_limit_holds_inside_a_request(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec_scheduler, "_MAX_WAITING_BYTES", 2 * ROWS * HIDDEN * 4)
    here = stage()
    here.half.limit_rows(2 * ROWS)
    request = here.request("a", *range(1, 9))
    assert not here.half.can_schedule(request, 0)
    here.asked(3)
    here.prepared()
    assert len(here.service.asked) == 3, "the first above the limit is the last"


def test_ec_scheduler_store_down_takes_inline_reply(stage: Callable[..., Stage], faulty: FaultyStore) -> None:
    here = stage(over=faulty)
    faulty.unavailable = True
    request = here.request("a", 1)
    assert not here.half.can_schedule(request, 0)
    here.asked(1)
    here.answer()
    assert here.half.can_schedule(request, 0)
    assert here.half.has_arrived(identifier(1))
    here.take_in(request)
    assert here.counted()["hits", "embedding", "service_computed"] == 1


def test_ec_scheduler_store_down_without_encoder_is_miss(
    stage: Callable[..., Stage], faulty: FaultyStore
) -> None:
    here = stage(over=faulty, identity=lambda config: TowerIdentity(b"i" * 32, None))
    faulty.unavailable = True
    assert here.half.can_schedule(here.request("a", 1), 0)
    assert here.counted() == {("misses", "embedding", "store_down"): 1}


def test_ec_scheduler_store_down_after_reply_is_miss(
    stage: Callable[..., Stage], faulty: FaultyStore
) -> None:
    here = stage(over=faulty)
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.asked(1)
    faulty.unavailable = True
    here.answer(stored=True, tensor=None)
    assert here.half.can_schedule(request, 0)
    assert here.counted() == {("misses", "embedding", "store_down"): 1}


@pytest.mark.parametrize(
    ("error", "spares"),
    [
        (EncoderUnavailable("none", reason="encoder_down"), False),
        (EncoderRefused("a broken image", reason="bad_input"), False),
        (EncoderRefused("full", reason="overloaded"), True),
        (EncoderRefused("who?", reason="unknown_model"), True),
    ],
)
def test_ec_scheduler_refusal_is_miss_with_its_reason(
    stage: Callable[..., Stage], error: Exception, spares: bool
) -> None:
    here = stage()
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.asked(1)
    here.service.asked[0][1].set_exception(error)
    assert here.half.can_schedule(request, 0)
    assert here.counted() == {("misses", "embedding", error.reason): 1}  # type: ignore[attr-defined]
    assert here.half.can_schedule(here.request("b", 2), 0) is spares


def test_ec_scheduler_submit_that_raises_is_miss(stage: Callable[..., Stage]) -> None:
    here = stage()
    here.service.refusal = EncoderUnavailable("closed", reason="encoder_down")
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.prepared()
    assert here.half.can_schedule(request, 0)
    assert here.counted() == {("misses", "embedding", "encoder_down"): 1}


@pytest.mark.parametrize("error", [RuntimeError("device"), AssertionError("2D"), TypeError(), ValueError()])
def test_ec_scheduler_inputs_that_fail_to_pack_are_miss(
    stage: Callable[..., Stage], error: Exception
) -> None:
    here = stage()
    here.inputs.tower_inputs = mock.Mock(side_effect=error)
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.prepared()
    assert here.half.can_schedule(request, 0)
    assert here.counted() == {("misses", "embedding", "no_inputs"): 1}


def test_ec_scheduler_two_timeouts_count_as_one_failure(stage: Callable[..., Stage]) -> None:
    here = stage()
    first, second = here.request("a", 1), here.request("b", 2)
    assert not here.half.can_schedule(first, 0)
    assert not here.half.can_schedule(second, 0)
    here.asked(2)
    here.skew = 9.0
    assert not here.half.can_schedule(first, 0)
    here.skew = 10.5
    assert here.half.can_schedule(first, 0)
    assert here.half.can_schedule(second, 0)
    assert here.counted() == {("misses", "embedding", "encoder_timeout"): 2}
    # Both failed together: that is one failure, and the first pause is a second.
    assert here.half.can_schedule(here.request("c", 3), 0)
    assert here.counted()["misses", "embedding", "encoder_backoff"] == 1
    here.skew = 11.6
    fourth = here.request("d", 4)
    assert not here.half.can_schedule(fourth, 0)
    here.asked(3)
    here.answer()
    assert here.half.can_schedule(fourth, 0)
    # The late answer is nobody's.
    here.answer(0)
    assert here.half.can_schedule(first, 0)
    assert not here.half.has_arrived(identifier(1))
    # The answer ended the back-off: the next failure is the first one again.
    fifth = here.request("e", 5)
    assert not here.half.can_schedule(fifth, 0)
    here.asked(4)
    here.service.asked[-1][1].set_exception(EncoderRefused("full", reason="overloaded"))
    assert here.half.can_schedule(fifth, 0)
    here.skew += 0.6
    assert not here.half.can_schedule(here.request("f", 6), 0)


def test_ec_scheduler_backoff_grows_to_ten_seconds(stage: Callable[..., Stage]) -> None:
    here = stage()
    for i, pause_s in enumerate([0.5, 1, 2, 5, 10, 10, 10]):
        request = here.request("r", 100 + i)
        assert not here.half.can_schedule(request, 0)
        here.asked(i + 1)
        here.service.asked[-1][1].set_exception(EncoderRefused("full", reason="overloaded"))
        assert here.half.can_schedule(request, 0)
        here.skew += pause_s / 2
        assert here.half.can_schedule(here.request("early", 200 + i), 0), "the service is asked too early"
        here.skew += pause_s / 2 + 0.05


def test_ec_scheduler_two_requests_for_one_image_encode_once(stage: Callable[..., Stage]) -> None:
    here = stage()
    first, second = here.request("a", 1), here.request("b", 1)
    assert not here.half.can_schedule(first, 0)
    assert not here.half.can_schedule(second, 0)
    here.asked(1)
    # The first is aborted: the second still waits, and gets it.
    here.half.finish_request(first)
    assert not here.half.can_schedule(second, 0)
    here.answer()
    assert here.half.can_schedule(second, 0)
    assert len(here.take_in(second).arrived) == 1
    assert len(here.service.asked) == 1
    # A third finds it in the engine's own cache.
    third = here.request("c", 1)
    assert here.half.can_schedule(third, 0)
    assert len(here.service.asked) == 1
    assert not kept(here.half, PendingEmbedding)


def test_ec_scheduler_failure_ends_wait_of_all_requests(stage: Callable[..., Stage]) -> None:
    here = stage()
    first, second = here.request("a", 1), here.request("b", 1)
    here.half.can_schedule(first, 0)
    here.half.can_schedule(second, 0)
    here.asked(1)
    here.service.asked[0][1].set_exception(EncoderRefused("broken", reason="bad_input"))
    assert here.half.can_schedule(first, 0)
    assert here.half.can_schedule(second, 0)
    assert here.counted() == {("misses", "embedding", "bad_input"): 1}
    assert here.take_in(first).arrived == []
    assert here.half.can_schedule(second, 0)


def test_ec_scheduler_aborted_request_leaves_nothing(stage: Callable[..., Stage]) -> None:
    here = stage()
    request = here.request("a", 1, 1, 2)
    here.half.can_schedule(request, 0)
    here.asked(2)
    here.half.finish_request(request)
    assert not kept(here.half, PendingEmbedding)
    assert here.admits_more()
    here.answer(0)
    assert not here.half.has_arrived(identifier(1))


def test_ec_scheduler_image_behind_loaded_prefix_leaves_nothing(stage: Callable[..., Stage]) -> None:
    here = stage()
    put(here.store, 1)
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    # Another engine's prefix came in meanwhile: its image is behind what is computed.
    assert here.half.can_schedule(request, ROWS)
    here.half.finish_request(request)
    assert not kept(here.half, PendingEmbedding)


def test_ec_scheduler_image_behind_computed_tokens_is_skipped(stage: Callable[..., Stage]) -> None:
    here = stage()
    request = here.request("a", 1, 2)
    assert here.half.can_schedule(request, 16)
    assert not here.half.can_schedule(request, 15)
    here.asked(1)
    assert here.service.asked[0][0].key == key(2)


def test_ec_scheduler_image_freed_by_engine_is_loaded_again(stage: Callable[..., Stage]) -> None:
    here = stage()
    put(here.store, 1)
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.take_in(request)
    assert here.half.can_schedule(here.request("b", 1), 0)
    assert not kept(here.half, PendingEmbedding)
    here.moves(freed=[identifier(1)])
    again = here.request("c", 1)
    assert here.half.can_schedule(again, 0)
    assert here.half.has_arrived(identifier(1))
    assert len(here.take_in(again).arrived) == 1
    assert here.counted()["hits", "embedding", "store"] == 2


def test_ec_scheduler_image_freed_and_loaded_in_one_step_is_held(stage: Callable[..., Stage]) -> None:
    here = stage()
    put(here.store, 1)
    request = here.request("a", 1)
    here.half.can_schedule(request, 0)
    here.take_in(request, freed=[identifier(1)])
    assert here.half.can_schedule(here.request("b", 1), 0)
    assert not kept(here.half, PendingEmbedding)


def test_ec_scheduler_reset_of_encoder_cache_is_noticed(stage: Callable[..., Stage]) -> None:
    here = stage()
    for image in (1, 2):
        put(here.store, image)
        request = here.request(f"r{image}", image)
        here.half.can_schedule(request, 0)
        here.take_in(request)
    # vLLM tells no connector of `reset_encoder_cache`; then it asks for what we think it holds.
    assert here.half.can_schedule(here.request("c", 1), 0)
    assert not here.half.has_arrived(identifier(1))
    after = here.request("d", 2)
    assert here.half.can_schedule(after, 0)
    assert here.half.has_arrived(identifier(2))


def test_ec_scheduler_image_encoded_by_engine_is_held(stage: Callable[..., Stage]) -> None:
    here = stage(identity=lambda config: TowerIdentity(b"i" * 32, None))
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    assert here.take_in(request).arrived == []
    assert here.counted() == {("misses", "embedding", "not_served"): 1}
    put(here.store, 1)
    assert here.half.can_schedule(here.request("b", 1), 0)
    assert not kept(here.half, PendingEmbedding)


def test_ec_scheduler_video_is_asked_under_its_own_identity(stage: Callable[..., Stage]) -> None:
    videos = TowerIdentity(b"v" * 32, b"w" * 32)
    here = stage(identity=lambda config: TowerIdentity(b"i" * 32, b"s" * 32, videos=videos))
    request = here.request("a", 1, 2)
    request.mm_features[1].modality = "video"
    here.half.can_schedule(request, 0)
    here.asked(2)
    assert [asked.identity for asked, _ in here.service.asked] == [b"s" * 32, b"w" * 32]


def test_ec_scheduler_video_without_identity_is_miss(stage: Callable[..., Stage]) -> None:
    here = stage()
    request = here.request("a", 1)
    request.mm_features[0].modality = "video"
    assert here.half.can_schedule(request, 0)
    assert here.counted() == {("misses", "embedding", "not_served"): 1}


def test_ec_scheduler_unshared_video_is_one_counted_miss(stage: Callable[..., Stage]) -> None:
    here = stage()
    request = here.request("a", 1)
    request.mm_features[0].identifier = unshared_name("theirs", "video_metadata")
    for _ in range(3):
        assert here.half.can_schedule(request, 0)
    assert not here.half.has_arrived(request.mm_features[0].identifier)
    assert here.take_in(request).arrived == []
    assert here.counted() == {("misses", "embedding", "video_metadata"): 1}
    assert not kept(here.half, PendingEmbedding)
    assert not here.service.asked


def test_ec_scheduler_trace_headers_reach_encoder(stage: Callable[..., Stage]) -> None:
    here = stage()
    parent = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    for name, headers in (("a", {**parent, "tracestate": "x=1", "baggage": "secret"}), ("b", None)):
        here.trace_headers = headers
        here.half.can_schedule(here.request(name, ord(name)), 0)
        here.asked(ord(name) - ord("a") + 1)
    traces = [request.trace for request, _ in here.service.asked]
    assert traces == [{**parent, "tracestate": "x=1"}, None]


def test_ec_scheduler_unidentified_model_asks_no_encoder(stage: Callable[..., Stage]) -> None:
    def unknown(config: Any) -> Any:
        raise CheckpointError("no weights", reason="no_weights")

    here = stage(identity=unknown)
    assert here.half.can_schedule(here.request("a", 1), 0)
    assert here.counted() == {("misses", "embedding", "not_served"): 1}


@pytest.mark.parametrize("name", ["uuid-1", "local-" + "0" * 64, "3:" + identifier(1), "cp1-nonsense"])
def test_ec_scheduler_foreign_identifier_is_one_counted_miss(
    stage: Callable[..., Stage], faulty: FaultyStore, name: str
) -> None:
    here = stage(over=faulty)
    request = SimpleNamespace(request_id="a", cache_salt=None, mm_features=[feature(name, 0)])
    for _ in range(3):
        assert here.half.can_schedule(request, 0)  # type: ignore[arg-type]
    assert faulty.calls == {}
    here.half.finish_request(request)  # type: ignore[arg-type]
    assert here.counted() == {("misses", "embedding", "foreign_name"): 1}
    assert not kept(here.half, PendingEmbedding)


def test_ec_scheduler_share_embeddings_off_asks_no_store(
    stage: Callable[..., Stage], faulty: FaultyStore
) -> None:
    here = stage(over=faulty, share_embeddings=False)
    assert here.half.can_schedule(here.request("a", 1), 0)
    assert faulty.calls == {}
    assert not here.moves().publish


def test_ec_scheduler_without_tower_asks_neither_store_nor_service(
    stage: Callable[..., Stage], faulty: FaultyStore
) -> None:
    here = stage(over=faulty, tower="service")
    assert here.half.can_schedule(here.request("a", 1), 0)
    assert faulty.calls == {}
    assert here.service.asked == []
    assert here.counted() == {}
    assert here.moves().publish


def test_ec_scheduler_replaced_weights_end_sharing(stage: Callable[..., Stage]) -> None:
    here = stage()
    put(here.store, 1)
    put(here.store, 2)
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    assert here.half.has_arrived(identifier(1))
    engine_state.current().mark_weights_unknown()
    assert not here.half.has_arrived(identifier(1)), "what arrived is of the old weights"
    moves = here.take_in(request)
    assert moves.arrived == []
    assert not moves.publish
    assert here.half.can_schedule(here.request("b", 2), 0)
    assert not kept(here.half, PendingEmbedding)
    assert here.counted() == {}


def test_ec_scheduler_memory_limit_causes_no_deadlock(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ec_scheduler, "_MAX_WAITING_BYTES", 2 * ROWS * HIDDEN * 4)
    here = stage()
    requests = [here.request(f"r{i}", 2 * i, 2 * i + 1) for i in range(4)]
    for request in requests:
        assert not here.half.can_schedule(request, 0)
    here.asked(4)
    here.prepared()
    assert len(here.service.asked) == 4, "whoever has begun goes on; others wait"
    for i in range(4):
        here.answer(i)
    for request in requests[:2]:
        assert here.half.can_schedule(request, 0)
        here.take_in(request)
    for request in requests[2:]:
        assert not here.half.can_schedule(request, 0)
    here.asked(8)
    for i in range(4, 8):
        here.answer(i)
    for request in requests[2:]:
        assert here.half.can_schedule(request, 0)
        assert len(here.take_in(request).arrived) == 2
    assert here.admits_more()


def test_ec_scheduler_save_outcomes_are_counted(stage: Callable[..., Stage]) -> None:
    here = stage()
    acks = CornplugECWorkerMetadata([("stored", 100), ("present", 0)]).aggregate(
        CornplugECWorkerMetadata([("stored", 50), ("full", 10)])
    )
    assert isinstance(acks, CornplugECWorkerMetadata)
    here.half.handle_acks(acks)
    assert here.counted() == {
        ("saves", "embedding", "stored"): 2,
        ("saves", "embedding", "present"): 1,
        ("saves", "embedding", "full"): 1,
        ("bytes", "embedding", "save"): 150,
    }


def test_ec_scheduler_idle_wait_ends_with_reply(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    here = stage()
    monkeypatch.setattr(ec_scheduler, "_IDLE_WAIT_S", 30.0)
    busy = SimpleNamespace(free_encoder_mm_hashes=[], total_num_scheduled_tokens=7)
    idle = SimpleNamespace(free_encoder_mm_hashes=[], total_num_scheduled_tokens=0)
    with within(25):
        here.half.build_metadata(idle)  # type: ignore[arg-type]
        request = here.request("a", 1)
        assert not here.half.can_schedule(request, 0)
        here.asked(1)
        # Others run: they do not wait for this image.
        here.half.build_metadata(busy)  # type: ignore[arg-type]
        timer = threading.Timer(0.05, here.answer)
        timer.start()
        here.half.build_metadata(idle)  # type: ignore[arg-type]
        timer.join()
        assert here.half.can_schedule(request, 0)
        here.half.build_metadata(idle)  # type: ignore[arg-type]


def test_ec_scheduler_idle_wait_ends_with_new_input(
    stage: Callable[..., Stage], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, looks = stage(), iter([False, False, True])
    monkeypatch.setattr(ec_scheduler, "_IDLE_STEP_S", 60.0)
    WAKE_TIMER.bind(lambda: None, lambda: next(looks))
    idle = SimpleNamespace(free_encoder_mm_hashes=[], total_num_scheduled_tokens=0)
    try:
        assert not here.half.can_schedule(here.request("a", 1), 0)
        here.asked(1)
        here.half.build_metadata(idle)  # type: ignore[arg-type]
    finally:
        WAKE_TIMER.bind(None)
    assert next(looks, None) is None


# -- nothing slow, and nothing that does not pay ------------------------------------------------


def test_ec_scheduler_encoder_down_packs_no_pixels(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(store.connect(), monkeypatch)
    packed: list[Any] = []
    stage.inputs.tower_inputs = packed.append
    stage.service.refusal = EncoderUnavailable("none there", reason="encoder_down")
    assert stage.half.can_schedule(stage.request("a", 1, 2), 0)
    stage.prepared()
    assert not packed
    assert stage.counted()["misses", "embedding", "encoder_down"] == 2


def test_ec_scheduler_computed_request_is_not_iterated(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is asked each step for each running request: 256 with 100 images each took 4.5 ms."""

    class Features(list[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("all of them were looked at")

    stage = Stage(store.connect(), monkeypatch)
    request = stage.request("a", *range(100))
    request.mm_features = Features(request.mm_features)
    end = request.mm_features[-1].mm_position.offset + request.mm_features[-1].mm_position.length
    assert stage.half.can_schedule(request, end)
    with pytest.raises(AssertionError, match="looked at"):
        stage.half.can_schedule(request, end - 1)
    assert stage.half.can_schedule(stage.request("none"), 0)


def test_ec_scheduler_deadline_follows_measured_tower_time(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    stage = Stage(store.connect(), monkeypatch, load_when="pays")
    unmeasured = stage.request("a", 1)
    assert not stage.half.can_schedule(unmeasured, 0)
    stage.asked(1)
    deadline_s = stage.service.asked[-1][0].deadline_s
    assert deadline_s <= 10
    within.check(10 - deadline_s, 1)
    stage.half.handle_acks(CornplugECWorkerMetadata(encode_times=[(ROWS, 0.05)]))
    assert not stage.half.can_schedule(stage.request("b", 2), 0)
    stage.asked(2)
    assert stage.service.asked[-1][0].deadline_s <= 0.5
    stage.skew += 0.6
    assert stage.half.can_schedule(stage.request("b", 2), 0), "a 50 ms tower does not wait 10 s"
    assert not stage.half.can_schedule(unmeasured, 0)
    assert stage.counted()["misses", "embedding", "encoder_timeout"] == 1


def test_ec_scheduler_load_dearer_than_encode_is_skipped(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = FaultyStore(store.connect())
    for image in (1, 2):
        put(store.connect(), image)
    stage = Stage(connection, monkeypatch, load_when="pays")
    assert stage.half.can_schedule(stage.request("a", 1), 0)
    assert stage.half.has_arrived(identifier(1)), "nothing was measured: it is tried"
    measured = CornplugECWorkerMetadata(encode_times=[(ROWS, 1e-9)], load_times=[(ROWS * HIDDEN * 4, 1e-3)])
    stage.half.handle_acks(measured)
    asked = dict(connection.calls)
    request = stage.request("b", 2)
    assert stage.half.can_schedule(request, 0)
    assert not stage.half.has_arrived(identifier(2))
    assert connection.calls == asked, "not even the store is asked"
    assert not stage.service.asked
    assert stage.counted()["misses", "embedding", "cheaper"] == 1
    stage.half.handle_acks(CornplugECWorkerMetadata(encode_times=[(ROWS, 100.0)]))
    stage.half.finish_request(request)
    assert stage.half.can_schedule(request, 0)
    assert stage.half.has_arrived(identifier(2))


def test_ec_scheduler_embedding_of_earlier_weights_is_not_used(stage: Callable[..., Stage]) -> None:
    here = stage()
    put(here.store, 1)
    put(here.store, 2)
    request = here.request("a", 1)
    assert here.half.can_schedule(request, 0)
    assert here.half.has_arrived(identifier(1))
    state = engine_state.current()
    state.end_update(state.begin_update(), "/new", 1)
    moves = here.take_in(request)
    assert (moves.arrived, moves.publish, moves.epoch) == ([], True, 2)
    assert here.half.can_schedule(here.request("b", 2), 0), "named before the update"
    assert here.counted()["misses", "embedding", "weights_updated"] == 1
    later = here.request("c", 2)
    later.mm_features[0].identifier += "-2"
    assert here.half.can_schedule(later, 0)
    assert [item.identifier for item in here.take_in(later).arrived] == [identifier(2) + "-2"]
