"""The queue in front of decoding: order, refusals, and the lane for better classes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cornplug.encoder_service.admission import AdmissionRefusal
from cornplug.encoder_service.preprocess import decode_lanes
from cornplug.encoder_service.preprocess.decode_lanes import (
    ByteBudget,
    DecodeLanes,
    DecodeLimits,
    QueuedWork,
    decode_cost,
)
from cornplug.encoder_service.preprocess.decoders import MediaHeader
from cornplug.encoder_service.preprocess.preprocessor import PreprocessContext
from cornplug.errors import EncoderRefused
from cornplug.qos import ServiceClass

from ..conftest import eventually

PREMIUM = ServiceClass(name="premium", share=0.5, priority=10)
STANDARD = ServiceClass(name="standard", share=0.3)
NIGHTLY = ServiceClass(name="nightly", share=0.02, priority=-1)
CLASSES = (PREMIUM, STANDARD, NIGHTLY)
BUDGET = ByteBudget({qos: qos.share for qos in CLASSES}, 1 << 30, purpose="to prepare it")
LARGE, SMALL = (
    decode_cost(MediaHeader(decoded_bytes=0, work=25e6)),
    decode_cost(MediaHeader(decoded_bytes=0, work=1e5)),
)


class Rig:
    """Lanes whose work is to sleep, so that a second of work is a second."""

    def __init__(self, lanes: int) -> None:
        self.decode_lanes = DecodeLanes(CLASSES, lanes=lanes, limits=DecodeLimits(), max_waiting=64)
        self.order: list[str] = []

    def ask(
        self, name: str, qos: ServiceClass, run: Callable[[PreprocessContext], Any], **changes: Any
    ) -> Any:
        def noted(context: PreprocessContext) -> Any:
            self.order.append(name)
            return run(context)

        fields: dict[str, Any] = {"cost": SMALL, "qos": qos, "app": "a", "deadline_s": 30.0, **changes}
        return self.decode_lanes.submit("image", noted, budget_share=BUDGET.open_share(qos), **fields)

    def sleep(
        self, name: str, qos: ServiceClass, seconds: float, **changes: Any
    ) -> QueuedWork[None] | AdmissionRefusal:
        made: QueuedWork[None] | AdmissionRefusal = self.ask(
            name, qos, lambda context: time.sleep(seconds), **changes
        )
        return made

    def held(self, name: str, qos: ServiceClass, go: threading.Event) -> QueuedWork[bool]:
        """Work that ends when it is let go."""
        made: QueuedWork[bool] = self.ask(name, qos, lambda context: go.wait(20))
        return made


@pytest.fixture
def rig() -> Iterator[Rig]:
    one = Rig(lanes=2)
    yield one
    one.decode_lanes.close()


def turn(made: QueuedWork[Any] | AdmissionRefusal) -> QueuedWork[Any]:
    assert isinstance(made, QueuedWork), made
    return made


def test_decode_lanes_serve_classes_and_apps_in_fair_order(rig: Rig) -> None:
    """Before: one line for all, in the order of arrival."""
    go = threading.Event()
    holding = [rig.held("holds", PREMIUM, go) for _ in range(2)]
    eventually(lambda: rig.order == ["holds"] * 2)
    made = [rig.sleep(f"n{i}", NIGHTLY, 0.0, cost=LARGE) for i in range(6)]
    made += [rig.sleep("s0", STANDARD, 0.0, app="b"), rig.sleep("s1", STANDARD, 0.0, app="b")]
    made += [rig.sleep("p0", PREMIUM, 0.0)]
    assert rig.decode_lanes.queue_by_class()["nightly"][0] == 6
    go.set()
    for each in [*holding, *map(turn, made)]:
        each.future.result(60)
    served = rig.order[2:]
    assert served.index("p0") <= 2
    assert max(served.index("s0"), served.index("s1")) <= 4


def test_decode_lanes_extra_lane_takes_better_class_only(rig: Rig) -> None:
    """Lanes full of worse classes' jobs delay no better class; jobs of the same class do."""
    go = threading.Event()
    holding = [rig.held("holds", NIGHTLY, go) for _ in range(2)]
    waiting = turn(rig.sleep("nightly", NIGHTLY, 0.0))
    eventually(lambda: rig.order == ["holds"] * 2)
    for i in range(3):
        turn(rig.sleep(f"premium {i}", PREMIUM, 0.0)).future.result(60)
    turn(rig.sleep("standard", STANDARD, 0.0)).future.result(60)
    assert not waiting.future.done()
    go.set()
    for each in (*holding, waiting):
        each.future.result(60)


@pytest.mark.more
def test_decode_lanes_overloaded_premium_keeps_deadlines(rig: Rig) -> None:
    """Nightly offers three times the capacity of the lanes. Before: p50 went from 10 ms to 4 s."""
    for _ in range(10):  # so that it is known what media take
        turn(rig.sleep("warm", PREMIUM, 0.004)).future.result(60)
        turn(rig.sleep("warm", NIGHTLY, 0.1, cost=LARGE)).future.result(60)
    refused, asked, ends = 0, 40, list[float]()
    flood: list[QueuedWork[None]] = []
    for i in range(asked):
        for _ in range(3):
            made = rig.sleep(f"n{i}", NIGHTLY, 0.1, cost=LARGE, deadline_s=3.0)
            if isinstance(made, AdmissionRefusal):
                refused += 1
                assert made.retry_after_s > 0
            else:
                flood.append(made)
        began = time.monotonic()
        mine = rig.sleep(f"p{i}", PREMIUM, 0.004, deadline_s=0.5)
        if isinstance(mine, AdmissionRefusal):
            ends.append(mine.retry_after_s + 0.5)
        else:
            mine.future.add_done_callback(lambda f, began=began: ends.append(time.monotonic() - began))  # type: ignore[misc]
        time.sleep(0.05)
    eventually(lambda: len(ends) == asked)
    late = sum(seconds > 0.5 for seconds in ends)
    # A machine that stands still makes some late; before, nearly all were.
    assert late <= 0.25 * asked, f"{late} of {asked} were late: {sorted(ends)[-5:]}"
    assert refused > 0, "what cannot be in time is refused at once"
    assert rig.decode_lanes.predict_by_class_s()["premium"] < rig.decode_lanes.predict_by_class_s()["nightly"]
    for each in flood:
        each.cancel()


def test_decode_lanes_late_is_refused_and_cancelled_is_dropped(rig: Rig) -> None:
    go = threading.Event()
    holding = [rig.held("holds", PREMIUM, go) for _ in range(2)]
    eventually(lambda: rig.order == ["holds"] * 2)
    late = turn(rig.sleep("late", PREMIUM, 0.0, deadline_s=0.05))
    gone = turn(rig.sleep("gone", PREMIUM, 0.0))
    gone.cancel()
    time.sleep(0.1)
    go.set()
    with pytest.raises(EncoderRefused) as refused:
        late.future.result(60)
    assert refused.value.reason == "too_late"
    for each in holding:
        each.future.result(60)
    assert rig.order == ["holds"] * 2
    eventually(lambda: rig.decode_lanes.queue_by_class() == {})


def test_decode_lanes_keep_class_slots_and_isolate_faults(rig: Rig) -> None:
    def fault(context: PreprocessContext) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        turn(rig.ask("fault", NIGHTLY, fault)).future.result(60)
    go = threading.Event()
    made = [rig.ask("n", NIGHTLY, lambda context: go.wait(20)) for _ in range(64)]
    full = [each for each in made if isinstance(each, AdmissionRefusal)]
    assert full
    assert full[0].reason == "over_share" or full[0].reason == "overloaded"
    assert isinstance(rig.sleep("p", PREMIUM, 0.0), QueuedWork)
    go.set()


def test_decode_lanes_true_cost_is_charged_to_the_class(rig: Rig) -> None:
    def reprice(context: PreprocessContext) -> None:
        context.admit(MediaHeader(decoded_bytes=0, work=25e6), 0)

    turn(rig.ask("one", NIGHTLY, reprice)).future.result(60)
    assert rig.decode_lanes._batcher._fair_queue._states[NIGHTLY].apps["a"] == LARGE


def test_decode_lanes_stuck_jobs_make_it_not_ready(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    holding = [rig.held("holds", PREMIUM, go) for _ in range(2)]
    eventually(lambda: rig.order == ["holds"] * 2)
    assert rig.decode_lanes.is_ready()
    monkeypatch.setattr(decode_lanes, "STUCK_S", 0.1)
    eventually(lambda: not rig.decode_lanes.is_ready())
    go.set()
    for each in holding:
        each.future.result(60)
    assert rig.decode_lanes.is_ready()
    rig.decode_lanes.close()
    assert not rig.decode_lanes.is_ready()
