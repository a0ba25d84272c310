"""Predictions, admissions and Retry-After, with a simulated clock."""

from __future__ import annotations

import itertools

import pytest

from cornplug.encoder_service.admission import EncodeAdmission
from cornplug.encoder_service.batcher import Batcher, EncodeJob, PendingRequest
from cornplug.encoder_service.fair_queue import QueueLimit
from cornplug.encoder_service.formats.messages import EncodeRequest
from cornplug.qos import DEFAULT_CLASS, ServiceClass

GOLD = ServiceClass(name="gold", share=0.5, priority=1)
TIN = ServiceClass(name="tin", share=0.25)
PASS_S, TOKEN_S = 0.1, 0.001
"""A medium of 100 tokens alone takes 0.2 s; four of them, which is a batch, 0.5 s."""


class Tower:
    """Something that a tower is known by."""


class Service:
    """A batcher and its admission, and a tower of known speed that works when told."""

    def __init__(self, lanes: int = 1) -> None:
        self.now = 0.0
        self.tower = Tower()
        self.late: list[PendingRequest] = []
        self._numbers = itertools.count()
        self.gate = EncodeAdmission(max_items=4, max_tokens=1000, clock=self.clock, lanes=lambda: lanes)
        self.batcher: Batcher[int] = Batcher(
            max_items=4, max_tokens=1000, clock=self.clock, on_late=self.late.append
        )

    def clock(self) -> float:
        return self.now

    def job(
        self,
        qos: ServiceClass = DEFAULT_CLASS,
        *,
        deadline_s: float = 10.0,
        tokens: int = 100,
        app: str = "a",
    ) -> EncodeJob[int]:
        number = next(self._numbers)
        key = number.to_bytes(8, "big")
        request = EncodeRequest(
            id=number, identity=b"i", key=key, cache_salt=None, inputs={}, app=app, deadline_s=deadline_s
        )
        pending = PendingRequest(request=request, received_s=self.now, qos=qos)
        return EncodeJob(
            key=(key, b"i"),
            feature_key=key,
            tower=self.tower,
            tokens=tokens,
            payload=number,
            requests=[pending],
        )

    def measured(self) -> Service:
        for count in (1, 4, 2, 3, 1, 4):
            batch = [self.job() for _ in range(count)]
            self.gate.record_batch(batch, PASS_S + TOKEN_S * 100 * count)
        return self

    def come(self, job: EncodeJob[int]) -> str | None:
        """Let it in, or the reason why not."""
        no = self.gate.admit(job, self.batcher)
        if no is None:
            self.batcher.join_or_add(job)
        return no and no.reason

    def work(self) -> list[EncodeJob[int]]:
        """One batch, from its beginning to its end."""
        batch = self.batcher.take_batch()
        self.now += PASS_S + TOKEN_S * sum(job.tokens for job in batch)
        for job in batch:
            self.batcher.finish(job)
        return batch


def test_admission_unmeasured_tower_admits_every_request() -> None:
    service = Service()
    assert [service.come(service.job(deadline_s=0.001)) for _ in range(50)] == [None] * 50


def test_admission_idle_service_admits_despite_measurement() -> None:
    """Else a tower that was slow once would never be measured again."""
    service = Service().measured()
    assert service.come(service.job(deadline_s=0.01)) is None
    assert service.come(service.job(deadline_s=0.01)) == "overloaded"


@pytest.mark.parametrize("waiting", [3, 8, 20])
def test_admission_prediction_is_time_of_queue(waiting: int) -> None:
    service = Service().measured()
    for _ in range(waiting):
        assert service.come(service.job(deadline_s=100)) is None
    last = service.job(deadline_s=100)
    predicted = service.gate.predict_done_s(last, service.batcher)
    service.batcher.join_or_add(last)
    while last not in service.work():
        pass
    assert predicted == pytest.approx(service.now, rel=0.1)


def test_admission_prediction_counts_rest_of_running_batch() -> None:
    service = Service().measured()
    for _ in range(4):
        service.come(service.job())
    service.batcher.take_batch()
    service.now += 0.25
    assert service.gate.predict_done_s(service.job(), service.batcher) == pytest.approx(0.25 + 0.2, rel=0.1)


def test_admission_prediction_divides_queue_by_lanes() -> None:
    one, four = Service().measured(), Service(lanes=4).measured()
    for service in (one, four):
        for _ in range(64):
            service.come(service.job(deadline_s=100))
    last = [service.job(deadline_s=100) for service in (one, four)]
    predicted = [s.gate.predict_done_s(job, s.batcher) for s, job in zip((one, four), last, strict=True)]
    assert predicted[0] > 3 * predicted[1]


def test_admission_retry_after_is_when_request_is_admitted() -> None:
    service = Service().measured()
    while (no := service.gate.admit(service.job(deadline_s=3.0), service.batcher)) is None:
        service.batcher.join_or_add(service.job(deadline_s=3.0))
    for _ in range(12):  # others, who have more time
        service.batcher.join_or_add(service.job(deadline_s=2.9))
    no = service.gate.admit(service.job(deadline_s=3.0), service.batcher)
    assert no is not None
    assert no.retry_after_s > 1
    early = service.now + no.retry_after_s / 2
    on_time = service.now + no.retry_after_s
    while service.now < early:
        service.work()
    assert service.gate.admit(service.job(deadline_s=3.0), service.batcher) is not None
    while service.now < on_time:
        service.work()
    assert service.gate.admit(service.job(deadline_s=3.0), service.batcher) is None


def test_admission_class_over_share_is_refused_other_admitted() -> None:
    service = Service().measured()
    assert service.come(service.job(GOLD)) is None
    while (reason := service.come(service.job(TIN, deadline_s=2.0))) is None:
        pass
    assert reason == "over_share"
    assert service.come(service.job(GOLD, deadline_s=2.0)) is None


def test_admission_short_deadline_shortens_batches_of_others() -> None:
    """Its batch is kept short, and so are the batches before it: the prediction knows both."""
    service = Service().measured()
    service.gate = EncodeAdmission(max_items=64, max_tokens=100_000, clock=service.clock)
    service.measured()
    assert service.come(service.job(GOLD, deadline_s=2.0)) is None
    for _ in range(40):
        service.batcher.join_or_add(service.job(TIN, deadline_s=60))
    assert service.come(service.job(GOLD, deadline_s=2.0)) is None
    assert service.gate.batch_token_limit(service.tower, 60.0) == pytest.approx(400, rel=0.1)
    service.now += 30
    assert service.come(service.job(GOLD, deadline_s=40)) is None
    assert service.gate.batch_token_limit(service.tower, 60.0) > 5000


def test_precheck_full_service_refuses_unless_many_hits() -> None:
    service = Service().measured()
    assert service.gate.precheck(DEFAULT_CLASS, 0.01, service.batcher) is None
    while service.come(service.job(deadline_s=2.0)) is None:
        pass
    no = service.gate.precheck(DEFAULT_CLASS, 2.0, service.batcher)
    assert no is not None
    assert (no.reason, no.retry_after_s > 0) == ("overloaded", True)
    assert service.gate.precheck(DEFAULT_CLASS, 60.0, service.batcher) is None
    for _ in range(10):
        service.gate.record_cache_outcome(hit=True)
    assert service.gate.precheck(DEFAULT_CLASS, 2.0, service.batcher) is None
    for _ in range(40):
        service.gate.record_cache_outcome(hit=False)
    assert service.gate.precheck(DEFAULT_CLASS, 2.0, service.batcher) is not None


def test_admission_single_class_is_never_over_share() -> None:
    service = Service().measured()
    while (reason := service.come(service.job(deadline_s=2.0))) is None:
        pass
    assert reason == "overloaded"


def test_admission_prediction_counts_arrivals_of_better_class() -> None:
    service = Service().measured()
    tin = service.job(TIN)
    alone = service.gate.predict_done_s(tin, service.batcher)
    for _ in range(40):  # of gold, half of what can be served
        service.come(service.job(GOLD))
        service.now += 0.25
        while service.batcher.count_queued():
            service.batcher.finish(service.batcher.take_batch()[0])
    for _ in range(8):
        service.batcher.join_or_add(service.job(TIN))
    with_gold = service.gate.predict_done_s(service.job(TIN), service.batcher)
    assert with_gold > 2 * alone


def test_admission_prediction_leaves_out_what_an_urgent_job_overtakes() -> None:
    service = Service().measured()
    service.batcher = Batcher(
        max_items=4, max_tokens=1000, clock=service.clock, on_late=service.late.append, has_urgent_lane=True
    )
    for _ in range(5):
        service.batcher.join_or_add(service.job(TIN, tokens=30_000, deadline_s=120))
    service.batcher.take_batch()
    gold = service.job(GOLD)
    assert service.gate.predict_done_s(gold, service.batcher) == pytest.approx(PASS_S + 100 * TOKEN_S)
    assert service.come(gold) is None
    urgent = service.batcher.take_urgent_job(1)
    assert urgent is gold
    # The next one waits for the urgent lane, and still overtakes the others.
    wait_s = service.gate.predict_done_s(service.job(GOLD), service.batcher)
    assert wait_s == pytest.approx(2 * (PASS_S + 100 * TOKEN_S))
    assert service.gate.predict_done_s(service.job(TIN), service.batcher) > 30


def test_batcher_joined_duplicate_of_better_class_lifts_job() -> None:
    service = Service()
    slow = [service.job(TIN) for _ in range(6)]
    for job in slow:
        service.batcher.join_or_add(job)
    twin = service.job(GOLD)
    twin.key = slow[5].key
    assert service.batcher.join_or_add(twin)
    assert service.batcher.take_batch()[0] is slow[5]
    assert slow[5].qos == GOLD


def test_batcher_batch_is_bounded_by_shortest_deadline() -> None:
    service = Service().measured()
    short = Batcher[int](
        max_items=4,
        max_tokens=1000,
        clock=service.clock,
        on_late=service.late.append,
        batch_token_limit=service.gate.batch_token_limit,
    )
    for job in (service.job(deadline_s=1.0), *(service.job(tokens=900) for _ in range(2))):
        short.join_or_add(job)
    assert [len(short.take_batch()) for _ in range(3)] == [1, 1, 1]


def test_predicted_s_each_class_has_its_own_time() -> None:
    service = Service()
    assert service.gate.predict_by_class_s([GOLD, TIN], service.batcher) == {"gold": 0.0, "tin": 0.0}
    service.measured()
    for _ in range(20):
        service.come(service.job(TIN, deadline_s=100))
    service.come(service.job(GOLD, deadline_s=100))
    predicted = service.gate.predict_by_class_s([GOLD, TIN], service.batcher)
    assert 0.5 < predicted["gold"] < predicted["tin"] / 2


def test_predicted_s_of_a_class_is_of_a_medium_like_its_own() -> None:
    """A flood of huge media in one class does not make the small media of another look late."""
    service = Service().measured()
    service.come(service.job(GOLD))
    service.work()
    service.come(service.job(TIN, tokens=30_000, deadline_s=100))
    for job in service.batcher.take_batch():
        service.batcher.finish(job)
    predicted = service.gate.predict_by_class_s([GOLD, TIN], service.batcher)
    assert predicted["gold"] < 2 * (PASS_S + 100 * TOKEN_S)
    assert predicted["tin"] > 30
    assert service.gate.precheck(GOLD, 1.0, service.batcher) is None


def test_predicted_s_huge_medium_does_not_keep_its_class_out() -> None:
    service = Service().measured()
    service.come(service.job(TIN, tokens=30_000, deadline_s=120))
    service.batcher.take_batch()
    # A small medium is refused behind the huge one, and is the class's last from then on.
    assert service.come(service.job(TIN, deadline_s=1)) == "overloaded"
    # A huge medium that is refused does not become the last one.
    assert service.come(service.job(TIN, tokens=90_000, deadline_s=60)) == "overloaded"
    assert service.gate.predict_by_class_s([TIN], service.batcher)["tin"] < 40
    service.now += 60
    assert service.gate.predict_by_class_s([TIN], service.batcher)["tin"] == 0.0
    service.come(service.job(TIN, tokens=30_000, deadline_s=120))
    service.now += 11
    assert service.gate.precheck(TIN, 1.0, service.batcher) is None


def test_admission_prediction_counts_queue_while_a_usual_lane_serves_it() -> None:
    """With two lanes, an urgent job overtakes only if both run long batches of worse classes."""
    service = Service(lanes=2).measured()
    service.batcher = Batcher(
        max_items=1,
        max_tokens=1000,
        clock=service.clock,
        on_late=service.late.append,
        has_urgent_lane=True,
        is_long=lambda batch, deadline_s: batch.tokens > 1000,
    )
    for tokens in (30_000, 100, *[100] * 200):
        service.batcher.join_or_add(service.job(TIN, tokens=tokens, deadline_s=120))
    service.batcher.take_batch()
    assert service.gate.predict_done_s(service.job(GOLD), service.batcher) < 1
    service.batcher.take_batch()
    assert service.batcher.estimate_backlog(service.job(GOLD), {}).tokens_by_class == {TIN: 200 * 100}


def wait_of(qos: ServiceClass) -> PendingRequest:
    return Service().job(qos).requests[0]


def test_queue_limit_class_keeps_its_slots_under_flood() -> None:
    limit = QueueLimit([GOLD, TIN], slots=8)
    entered = [limit.acquire(wait_of(TIN)) for _ in range(20)]
    assert entered.count(None) == 4
    gold = [wait_of(GOLD) for _ in range(20)]
    outcomes = [limit.acquire(pending) for pending in gold]
    assert outcomes.count(None) == 4
    assert entered[-1] is not None
    assert outcomes[-1] is not None
    assert outcomes[-1][0] == "over_share"
    limit.release(gold[0])
    limit.release(gold[0])
    assert len(limit) == 7
    assert limit.acquire(wait_of(GOLD)) is None
    assert not limit.drain(0.0)
    assert limit.acquire(wait_of(TIN)) == ("overloaded", "the service is stopping")
