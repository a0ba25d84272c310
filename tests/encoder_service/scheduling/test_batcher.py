"""Batches, joins and lateness, with a simulated clock."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from cornplug.encoder_service.batcher import Batcher, EncodeJob, PendingRequest
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest

TOWER, OTHER = object(), object()


@dataclass
class Clock:
    now: float = 0.0
    late: list[PendingRequest] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now


def pending(clock: Clock, deadline_s: float = 10) -> PendingRequest:
    request = EncodeRequest(
        id=1, identity=b"i", key=b"k", cache_salt=None, inputs={}, app="a", deadline_s=deadline_s
    )
    return PendingRequest(request=request, received_s=clock.now)


def job(
    clock: Clock, name: str, *, feature: str = "", tokens: int = 10, tower: object = TOWER, **w: float
) -> EncodeJob[str]:
    return EncodeJob(
        key=(name.encode(), b"m"),
        feature_key=(feature or name).encode(),
        tower=tower,
        tokens=tokens,
        payload=name,
        requests=[pending(clock, **w)],
    )


def batcher(clock: Clock, *, items: int = 3, tokens: int = 100) -> Batcher[str]:
    return Batcher(max_items=items, max_tokens=tokens, clock=clock, on_late=clock.late.append)


def names(batch: list[EncodeJob[str]]) -> str:
    return "".join(f.payload for f in batch)


def test_batcher_batch_is_bounded_by_items_in_order() -> None:
    clock = Clock()
    b = batcher(clock)
    for name in "abcde":
        assert not b.join_or_add(job(clock, name))
    assert b.count_queued() == 5
    assert names(b.take_batch()) == "abc"
    assert names(b.take_batch()) == "de"


def test_batcher_batch_is_bounded_by_tokens_none_starves() -> None:
    clock = Clock()
    b = batcher(clock)
    b.join_or_add(job(clock, "a", tokens=1000))
    b.join_or_add(job(clock, "b", tokens=60))
    b.join_or_add(job(clock, "c", tokens=60))
    b.join_or_add(job(clock, "d", tokens=40))
    assert names(b.take_batch()) == "a"
    assert names(b.take_batch()) == "bd"
    assert names(b.take_batch()) == "c"


def test_batcher_batch_has_one_tower_oldest_first() -> None:
    clock = Clock()
    b = batcher(clock)
    for name, tower in (("a", TOWER), ("x", OTHER), ("b", TOWER), ("y", OTHER)):
        b.join_or_add(job(clock, name, tower=tower))
    assert names(b.take_batch()) == "ab"
    assert names(b.take_batch()) == "xy"


def test_batcher_equal_features_cost_no_batch_slot() -> None:
    clock = Clock()
    b = batcher(clock, items=1, tokens=10)
    b.join_or_add(job(clock, "a", feature="f"))
    b.join_or_add(job(clock, "b", feature="g"))
    b.join_or_add(job(clock, "c", feature="f"))
    assert names(b.take_batch()) == "ac"


def test_batcher_duplicate_joins_until_job_is_finished() -> None:
    clock = Clock()
    b = batcher(clock)
    first = job(clock, "a")
    assert not b.join_or_add(first)
    assert b.join_or_add(job(clock, "a"))
    assert b.take_batch() == [first]
    assert b.join_or_add(job(clock, "a"))
    assert len(b.finish(first)) == 3
    assert not b.join_or_add(job(clock, "a"))


def test_batcher_equal_keys_of_other_features_are_one_job() -> None:
    """Their processors round in other last bits, so the features' keys differ."""
    clock = Clock()
    b = batcher(clock)
    b.join_or_add(job(clock, "a", feature="f"))
    assert b.join_or_add(job(clock, "a", feature="g"))


def test_batcher_late_requests_are_dropped_others_stay() -> None:
    clock = Clock()
    b = batcher(clock)
    b.join_or_add(job(clock, "a", deadline_s=1))
    b.join_or_add(job(clock, "b", deadline_s=1))
    b.join_or_add(job(clock, "b", deadline_s=9))
    clock.now = 2
    (left,) = b.take_batch()
    assert left.payload == "b"
    assert len(left.requests) == 1
    assert len(clock.late) == 2
    assert not b.join_or_add(job(clock, "a"))


def test_batcher_close_empties_queue_then_ends_take() -> None:
    clock = Clock()
    b = batcher(clock)
    got: list[str] = []
    thread = threading.Thread(target=lambda: [got.append(names(x)) for x in iter(b.take_batch, [])])
    thread.start()
    b.join_or_add(job(clock, "a"))
    b.close()
    thread.join(60)
    assert not thread.is_alive()
    assert got == ["a"]


def test_pending_request_answer_is_set_once() -> None:
    w = pending(Clock())
    answer = EncodeReply(id=1, key=b"k", origin="computed", stored=True, tensor=None, service_time_s=0)
    assert w.send_reply(answer)
    assert not w.send_reply(answer)
    gone = pending(Clock())
    gone.future.cancel()
    assert not gone.send_reply(answer)
