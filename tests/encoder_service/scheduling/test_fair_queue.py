"""The order of service: shares under saturation, priority for the rest, apps in turn, no starvation."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cornplug.encoder_service.batcher import backlog_ahead
from cornplug.encoder_service.fair_queue import WeightedFairQueue, form_batch
from cornplug.qos import ServiceClass

TOWER = object()
MOST = 1000
_numbers = itertools.count()


@dataclass(eq=False)
class One:
    """Something that waits."""

    qos: ServiceClass
    tokens: int = 100
    app: str = "a"
    due_s: float = 0.0
    tower: object = TOWER
    feature_key: bytes = b""
    number: int = field(default_factory=_numbers.__next__)

    def __post_init__(self) -> None:
        self.feature_key = self.feature_key or self.number.to_bytes(8, "big")
        self.due_s = self.due_s or float(self.number)


def a_class(name: str, share: float, priority: int = 0) -> ServiceClass:
    return ServiceClass(name=name, share=share, priority=priority)


class Queue(list[One]):
    """A queue of one service."""

    def __init__(self, ones: Iterable[One] = ()) -> None:
        super().__init__(ones)
        self.fair_queue = WeightedFairQueue()
        self._passed_over: One | None = None

    def batch(self, max_items: int = 8) -> list[One]:
        """One batch, which leaves it."""
        first = self._passed_over if self._passed_over in self else None
        out = form_batch(
            self, self.fair_queue, max_items=max_items, max_tokens_for=lambda one: MOST, first_job=first
        )
        self._passed_over = out.skipped
        assert out.tokens == sum({one.feature_key: one.tokens for one in out.batch}.values())
        for one in out.batch:
            self.remove(one)
        return out.batch

    def one_by_one(self) -> Iterator[One]:
        while self:
            yield from self.batch(max_items=1)


classes = st.lists(st.tuples(st.floats(0.02, 1), st.integers(-2, 2)), min_size=1, max_size=4).map(
    lambda asked: [
        a_class(f"c{i}", share / max(1.0, sum(s for s, _ in asked)), priority)
        for i, (share, priority) in enumerate(asked)
    ]
)
sizes = st.one_of(st.integers(100, 300), st.sampled_from([576, 1500]))


@settings(max_examples=25)
@given(classes, st.data())
def test_fair_queue_saturated_shares_hold_within_one_batch(
    made: list[ServiceClass], data: st.DataObject
) -> None:
    queue = Queue()
    supply = {qos: itertools.cycle(data.draw(st.lists(sizes, min_size=3, max_size=3))) for qos in made}
    history: list[Counter[ServiceClass]] = [Counter()]
    for _ in range(30):
        for qos in made:
            waiting = sum(one.qos == qos for one in queue)
            queue += [One(qos, next(supply[qos]), app=str(i % 2)) for i in range(8 - waiting)]
        served = history[-1].copy()
        for one in queue.batch():
            served[one.qos] += one.tokens
        history.append(served)
    # It waits for at most a batch, and each other class may be a batch ahead.
    slack = MOST * len(made) + 1500
    for early, late in itertools.combinations(history[::3], 2):
        span = late.total() - early.total()
        for qos in made:
            assert late[qos] - early[qos] >= qos.share * span - slack


@settings(max_examples=25)
@given(classes, st.data())
def test_form_batch_each_job_leaves_once_with_its_tower(
    made: list[ServiceClass], data: st.DataObject
) -> None:
    queue, out = Queue(), list[One]()
    towers = (TOWER, object())
    one_of = st.tuples(st.sampled_from(made), sizes, st.sampled_from("abc"), st.integers(0, 5))
    come = data.draw(st.lists(one_of, max_size=30))
    for qos, tokens, app, feature in come:
        shared = {"feature_key": bytes([feature]), "tokens": 100 * feature} if feature else {"tokens": tokens}
        queue.append(One(qos, app=app, tower=towers[feature % 2], **shared))
        if tokens % 3 == 0:
            out += queue.batch()
    while queue:
        batch = queue.batch()
        assert batch
        assert len({one.tower for one in batch}) == 1
        out += batch
    assert len(out) == len({one.number for one in out}) == len(come)


@settings(max_examples=25)
@given(classes, st.integers(1, 2000), st.booleans())
def test_fair_queue_flood_of_others_starves_no_class(
    made: list[ServiceClass], size: int, other: bool
) -> None:
    """One medium of the least class, against streams of all others and of another app of its class."""
    least = min(made, key=lambda qos: qos.rank)
    queue = Queue(One(qos, 100, "crowd") for qos in made for _ in range(10))
    queue.batch()
    mine = One(least, size, "mine", tower=object() if other else TOWER)
    queue.append(mine)
    served = 0
    # Its app's turn comes after as much of the other app; its class has its share of all.
    bound = (2 * size + 2 * MOST) / least.share + 3 * MOST
    while mine in queue:
        crowd = [One(qos, 100, "crowd", due_s=1e-6) for qos in made for _ in range(12)]
        queue[:] = [mine, *crowd]
        served += sum(one.tokens for one in queue.batch())
        assert served <= bound


def test_fair_queue_surplus_goes_by_priority() -> None:
    low, high = a_class("low", 0.25), a_class("high", 0.25, priority=1)
    queue = Queue(One(qos) for qos in (low, high) for _ in range(40))
    first = Counter(one.qos.name for one in itertools.islice(queue.one_by_one(), 40))
    assert first["high"] == pytest.approx(30, abs=1)


def test_fair_queue_idle_class_saves_up_no_turns() -> None:
    busy, away = a_class("busy", 0.5), a_class("away", 0.5)
    queue = Queue(One(busy) for _ in range(60))
    list(itertools.islice(queue.one_by_one(), 40))
    queue += [One(away) for _ in range(30)]
    next_ones = Counter(one.qos.name for one in itertools.islice(queue.one_by_one(), 20))
    assert next_ones["away"] == pytest.approx(10, abs=1)


def test_fair_queue_apps_take_turns_earliest_deadline_first() -> None:
    only = a_class("only", 1.0)
    queue = Queue(One(only, app="many", due_s=100 - i) for i in range(20))
    queue += [One(only, app="few", due_s=1000 + i) for i in range(4)]
    out = list(queue.one_by_one())
    assert sorted(i for i, one in enumerate(out) if one.app == "few")[-1] <= 8
    dues = [one.due_s for one in out if one.app == "many"]
    assert dues == sorted(dues)


@settings(max_examples=40)
@given(classes, st.data())
def test_backlog_ahead_prediction_equals_service(made: list[ServiceClass], data: st.DataObject) -> None:
    """The fluid forecast against the order itself, from any state of the tags."""
    queue = Queue()
    one_of = st.builds(One, st.sampled_from(made), st.integers(50, 300), st.sampled_from("ab"))
    queue += data.draw(st.lists(one_of, max_size=30))
    for _ in range(data.draw(st.integers(0, 6))):
        if queue:
            queue.batch(max_items=1)
    queue += data.draw(st.lists(one_of, max_size=30))
    new = data.draw(one_of)
    predicted = backlog_ahead(queue, (), queue.fair_queue, new, {}).tokens_until_served
    queue.append(new)
    served = 0
    for one in queue.one_by_one():
        served += one.tokens
        if one is new:
            break
    total = served + sum(one.tokens for one in queue)
    # Within an item of each class, and of each app in its class, at its share of the tokens.
    slack = 300 * (len(made) + 1) + 2 * 300 / new.qos.share
    assert abs(min(predicted, total) - served) <= min(slack, total)


def test_tokens_until_served_counts_demand_of_better_class() -> None:
    low, high = a_class("low", 0.25), a_class("high", 0.25, priority=1)
    fair_queue = WeightedFairQueue()
    assert fair_queue.tokens_until_served(low, 100, {}, {}) == pytest.approx(100)
    assert fair_queue.tokens_until_served(low, 100, {high: 75}, {}) == pytest.approx(175)
    assert fair_queue.tokens_until_served(low, 100, {high: 750}, {}) == pytest.approx(400)
    assert fair_queue.tokens_until_served(low, 100, {}, {high: 0.6}) == pytest.approx(250)
    assert fair_queue.tokens_until_served(high, 100, {low: 1000}, {}) == pytest.approx(100 / 0.75)
