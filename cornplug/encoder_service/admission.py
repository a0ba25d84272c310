"""Admission: predicts when a request would be done, and rejects it immediately if its deadline would be
missed.

    seconds until done = rest of the running batches + batches that the fair queue serves first
                         + the batch that contains the request

`BatchLatencyModel` predicts the time of batches, `ArrivalRate` measures the load of each service class, and
`WeightedFairQueue` orders the queue. Every request is admitted while its tower has not been measured or the
service is idle. Therefore a wrong measurement cannot make an idle service reject everything.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from weakref import WeakKeyDictionary, ref

from cornplug.encoder_service.batcher import (
    Backlog,
    Batcher,
    EncodeJob,
    PendingRequest,
    RunningBatch,
    ServiceLoad,
)
from cornplug.encoder_service.fair_queue import QueuedJob
from cornplug.qos import ServiceClass

_DECAY_PER_BATCH: Final = 0.9
"""Factor by which the weight of earlier batches decreases per new batch, so that about ten batches count."""
_WARM_UP: Final = 2
"""Number of first batches whose measurements are discarded when a later batch is measured. The first batches
allocate memory and compile code."""
_MAX_OUTLIER_FACTOR: Final = 3.0
"""Limit for the measured time of one batch, as a multiple of its predicted time or of the mean time,
whichever is larger. An outlier thus has little effect, but the model adapts to a tower that has become slow
within a few batches."""
_RATE_DECAY_S: Final = 2.0
_MIN_AGE_S: Final = 0.05
"""Minimum seconds over which an arrival rate is measured."""
_HEADROOM: Final = 1.5
_MIN_HEADROOM: Final = 1.05
_MAX_HEADROOM: Final = 2.0
_HEADROOM_UP_STEP: Final = 0.15
_HEADROOM_DOWN_STEP: Final = 0.004
"""Step by which the headroom factor grows after a prediction that was too short, and step by which it shrinks
after any other prediction. The steps balance if one prediction in 38 is too short."""
_HIGH_HIT_RATE: Final = 0.2
_HIT_RATE_STEP: Final = 0.05
_MIN_RETRY_S: Final = 0.05
_DEADLINE_FRACTION: Final = 0.25
"""Maximum batch duration, as a fraction of the shortest recent deadline. The next request with that deadline
may have to wait for the batch."""
_RECENT_S: Final = 10.0
"""Seconds for which a deadline counts as recent."""
_UNMEASURED_DRAIN_S: Final = 1.0


@dataclass(slots=True)
class BatchLatencyModel:
    """Latency of one tower's batches: seconds = fixed + per token * tokens. Not thread-safe.

    Both terms are fitted by least squares with exponential forgetting."""

    fixed_s: float = 0.0
    token_s: float = 0.0
    """Seconds that each token adds to the latency of a batch."""
    batches: int = 0
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    @property
    def is_measured(self) -> bool:
        return self.batches > 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Fit the model to a batch with `tokens` tokens that took `seconds`."""
        if tokens <= 0:
            return
        self.batches += 1
        if self.batches <= _WARM_UP + 1:
            self._n = self._x = self._y = self._xx = self._xy = 0.0
        else:
            seconds = min(seconds, _MAX_OUTLIER_FACTOR * max(self.predict_s(tokens), self._y / self._n))
        self._n = _DECAY_PER_BATCH * self._n + 1
        self._x = _DECAY_PER_BATCH * self._x + tokens
        self._y = _DECAY_PER_BATCH * self._y + seconds
        self._xx = _DECAY_PER_BATCH * self._xx + tokens * tokens
        self._xy = _DECAY_PER_BATCH * self._xy + tokens * seconds
        self._fit()

    def predict_s(self, tokens: float) -> float:
        """Return the predicted seconds for a batch with this number of tokens, or 0 before the first
        observation."""
        return self.fixed_s + self.token_s * tokens

    def max_tokens_within(self, seconds: float) -> float:
        """Return the maximum number of tokens of a batch that takes at most `seconds`, or inf before the
        first observation.

        The number is never so small that the fixed cost exceeds a fifth of the batch's time.
        """
        if self.token_s <= 0:
            return float("inf")
        return max(4 * self.fixed_s, seconds - self.fixed_s) / self.token_s

    def _fit(self) -> None:
        spread = self._n * self._xx - self._x * self._x
        # If all batches have the same size, the terms cannot be separated, so all time counts as time per
        # token.
        self.token_s = self._xy / self._xx
        self.fixed_s = 0.0
        if spread > 1e-3 * self._x * self._x:
            slope = (self._n * self._xy - self._x * self._y) / spread
            start = (self._y - slope * self._x) / self._n
            if slope < 0:
                self.fixed_s, self.token_s = self._y / self._n, 0.0
            elif start >= 0:
                self.fixed_s, self.token_s = start, slope


class ArrivalRate:
    """Rate at which admitted requests of each class arrive, in tokens per second, as an exponentially
    weighted mean. Not thread-safe."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._decayed_sums: dict[ServiceClass, tuple[float, float]] = {}
        """(decayed sum of tokens at the time of the last request, that time), by class."""

    def record_arrival(self, qos: ServiceClass, tokens: int, now_s: float) -> None:
        """Count an admitted request with this number of tokens."""
        if self._began_s is None:
            self._began_s = now_s
        self._decayed_sums[qos] = self._decayed_tokens(qos, now_s) + tokens, now_s

    def tokens_per_second(self, now_s: float) -> dict[ServiceClass, float]:
        """Return the rate in tokens per second of each class that has sent a request."""
        if self._began_s is None:
            return {}
        age_s = max(_MIN_AGE_S, now_s - self._began_s)
        # Over a short time, the weights sum to less than _RATE_DECAY_S. Early rates would be too low without
        # this correction.
        weight_s = _RATE_DECAY_S * -math.expm1(-age_s / _RATE_DECAY_S)
        return {qos: self._decayed_tokens(qos, now_s) / weight_s for qos in self._decayed_sums}

    def _decayed_tokens(self, qos: ServiceClass, now_s: float) -> float:
        tokens, then_s = self._decayed_sums.get(qos, (0.0, now_s))
        return tokens * math.exp((then_s - now_s) / _RATE_DECAY_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRefusal:
    """Reason why a request is not admitted."""

    reason: Literal["overloaded", "over_share"]
    message: str
    retry_after_s: float
    """Predicted seconds until the request would be admitted if no other request arrived."""


@dataclass(slots=True, kw_only=True)
class _ProbeJob:
    """Hypothetical job for a prediction."""

    qos: ServiceClass
    tower: object
    tokens: int
    app: str
    due_s: float = math.inf
    feature_key: bytes = b""


class EncodeAdmission:
    """Admits or refuses the requests for one queue. Thread-safe."""

    def __init__(
        self,
        *,
        max_items: int,
        max_tokens: int,
        clock: Callable[[], float],
        lanes: Callable[[], int] = lambda: 1,
    ) -> None:
        self._max_items = max_items
        self._max_tokens = max_tokens
        self._clock = clock
        self._lanes = lanes
        self._lock = threading.Lock()
        self._latency_models: WeakKeyDictionary[object, BatchLatencyModel] = WeakKeyDictionary()
        self._arrivals = ArrivalRate()
        self._last_jobs: dict[ServiceClass, tuple[float, Callable[[], object | None], int, str]] = {}
        """Time, tower, tokens and app of each class's last job. A refused job counts only if it is smaller
        than the last job. Otherwise one huge item would cause refusals of all small items in its class."""
        self._hit_rate = 0.0
        """Fraction of recent requests that were cached or that joined another request's job."""
        self._headroom: dict[ServiceClass, float] = {}
        """Factor by which predictions are multiplied before they are compared with a deadline, by class.
        Predictions are too short if requests of better classes arrive in bursts, or if threads wait for each
        other. The factor is learned from earlier predictions and their outcomes."""
        self._shortest_deadlines: dict[ServiceClass, tuple[float, float]] = {}
        """(shortest deadline of recently admitted requests, time of its admission), by class."""

    def record_batch(self, batch: Sequence[EncodeJob[Any]], seconds: float) -> None:
        """Record that an executor ran a batch for `seconds`.

        Items with cached features count with all their tokens. The time per token therefore reflects how
        often features are cached.
        """
        tokens = sum({job.feature_key: job.tokens for job in batch}.values())
        with self._lock:
            self._latency_models.setdefault(batch[0].tower, BatchLatencyModel()).observe(tokens, seconds)

    def record_reply(self, pending: PendingRequest, seconds: float) -> None:
        """Record that an admitted request got a reply or was dropped, `seconds` after it arrived."""
        if pending.predicted_reply_s is None:
            return
        with self._lock:
            # Learn only from predictions near the deadline, because only these predictions decide about
            # admission.
            headroom = self._headroom.get(pending.qos, _HEADROOM)
            if headroom * pending.predicted_reply_s > pending.request.deadline_s / 2:
                moved = headroom + (
                    _HEADROOM_UP_STEP
                    if seconds > headroom * pending.predicted_reply_s
                    else -_HEADROOM_DOWN_STEP
                )
                self._headroom[pending.qos] = min(max(moved, _MIN_HEADROOM), _MAX_HEADROOM)

    def batch_token_limit(self, tower: object, deadline_s: float) -> float:
        """Return the maximum number of tokens of a batch that contains a job with this deadline.

        Requests with shorter deadlines that arrived recently lower the limit.
        """
        with self._lock:
            return self._batch_token_limit(tower, deadline_s)

    def is_long(self, batch: RunningBatch, deadline_s: float) -> bool:
        """Return whether a running batch delays a request with this deadline for longer than allowed.

        Also returns True while the batch's tower has not been measured.
        """
        limit = self.batch_token_limit(batch.tower, deadline_s)
        elapsed_s = self._clock() - batch.started_s
        return math.isinf(limit) or batch.tokens > limit or elapsed_s > _DEADLINE_FRACTION * deadline_s

    def admit(self, job: EncodeJob[Any], batcher: Batcher[Any]) -> AdmissionRefusal | None:
        """Return why `job` cannot be done in time, or None if it is admitted. An admitted job is counted."""
        now = self._clock()
        refusal, expected_s = self._evaluate(job, job.shortest_deadline_s, batcher, now)
        with self._lock:
            last = self._last_jobs.get(job.qos)
            if refusal is None or last is None or last[0] < now - _RECENT_S or job.tokens < last[2]:
                self._last_jobs[job.qos] = now, ref(job.tower), job.tokens, job.app
            if refusal is None:
                for pending in job.requests:
                    pending.predicted_reply_s = now - pending.received_s + expected_s
                self._record_deadline(job, now)
                self._arrivals.record_arrival(job.qos, job.tokens, now)
        return refusal

    def precheck(
        self, qos: ServiceClass, deadline_s: float, batcher: Batcher[Any]
    ) -> AdmissionRefusal | None:
        """Return why a new media item of this class must be refused before any work is done on it, or None.

        Assumes that the item resembles the last item of its class. Always returns None while many requests
        are cached or join other requests' jobs, because this depends on the item's content.
        """
        now = self._clock()
        with self._lock:
            high_hit_rate = self._hit_rate > _HIGH_HIT_RATE
        probe = self._probe_like_last_job(qos, now + deadline_s)
        if probe is None or high_hit_rate:
            return None
        return self._evaluate(probe, deadline_s, batcher, now)[0]

    def record_cache_outcome(self, *, hit: bool) -> None:
        """Record whether a request needs no tower, because the store had its embedding or it joined another
        request's job."""
        with self._lock:
            self._hit_rate += _HIT_RATE_STEP * (hit - self._hit_rate)

    def _evaluate(
        self, job: QueuedJob, deadline_s: float, batcher: Batcher[Any], now: float
    ) -> tuple[AdmissionRefusal | None, float]:
        """Return (refusal or None, predicted seconds until the job would be done)."""
        ahead = batcher.estimate_backlog(job, self._demand_by_class(job.tower, now))
        busy = ahead.load.running or len(ahead.tokens_by_class) > 0
        expected_s = self._estimate_done_s(ahead, job, now)
        with self._lock:
            done_s = self._headroom.get(job.qos, _HEADROOM) * expected_s
            measured = self._latency_model(job.tower).is_measured
        if not (busy and measured and done_s > job.due_s - now):
            return None, expected_s
        own, all_waiting = ahead.tokens_by_class.get(job.qos, 0), sum(ahead.tokens_by_class.values())
        over = own + job.tokens > job.qos.share * (all_waiting + job.tokens)
        refusal = AdmissionRefusal(
            reason="over_share" if over and own < all_waiting else "overloaded",
            message=f"the request would take {done_s:.3g} s, but the deadline is {deadline_s:.3g} s",
            # Each second of waiting shortens `done_s` by the headroom.
            retry_after_s=max(_MIN_RETRY_S, expected_s - deadline_s * expected_s / done_s),
        )
        return refusal, expected_s

    def predict_done_s(self, job: QueuedJob, batcher: Batcher[Any]) -> float:
        """Return the predicted seconds until `job` would be done if it arrived now."""
        now = self._clock()
        return self._estimate_done_s(
            batcher.estimate_backlog(job, self._demand_by_class(job.tower, now)), job, now
        )

    def predict_by_class_s(self, classes: Sequence[ServiceClass], batcher: Batcher[Any]) -> dict[str, float]:
        """Return the predicted seconds until a new item would be done that is like the last item of its
        class, by class. 0 if the class had no item recently."""
        probes = {qos.name: self._probe_like_last_job(qos) for qos in classes}
        return {
            name: 0.0 if probe is None else self.predict_done_s(probe, batcher)
            for name, probe in probes.items()
        }

    def predict_class_s(self, qos: ServiceClass, batcher: Batcher[Any]) -> float:
        """Return the prediction of `predict_by_class_s` for one class."""
        return self.predict_by_class_s([qos], batcher)[qos.name]

    def _probe_like_last_job(self, qos: ServiceClass, due_s: float = math.inf) -> _ProbeJob | None:
        """Return a job like the last job of this class.

        Returns None if the class had no job in the last `_RECENT_S` seconds, or if the job's tower is no
        longer loaded. The time limit is needed because items that are rejected before decoding do not become
        the last job.
        """
        with self._lock:
            last = self._last_jobs.get(qos)
        if last is None or last[0] < self._clock() - _RECENT_S or (tower := last[1]()) is None:
            return None
        return _ProbeJob(qos=qos, tower=tower, tokens=last[2], app=last[3], due_s=due_s)

    def predict_half_drained_s(self, batcher: Batcher[Any]) -> float:
        """Return the predicted seconds until half of the queue is done, or 1 s before the first
        measurement."""
        load = batcher.current_load()
        with self._lock:
            if not any(p.is_measured for p in self._latency_models.values()):
                return _UNMEASURED_DRAIN_S
            all_s = self._remaining_running_s(load.running, self._clock()) + self._queued_work_s(load)
        return max(_MIN_RETRY_S, all_s / max(1, self._lanes()) / 2)

    def _estimate_done_s(self, backlog: Backlog, job: QueuedJob, now: float) -> float:
        with self._lock:
            running = self._remaining_running_s(backlog.load.running, now)
            whole = self._queued_work_s(backlog.load)
            fill = min(
                self._batch_tokens(*backlog.load.queued_by_tower[job.tower]),
                self._batch_token_limit(job.tower, job.due_s - now),
            )
            own = self._latency_model(job.tower).predict_s(max(job.tokens, fill))
        before = (
            whole
            * backlog.tokens_until_served
            / sum(tokens for tokens, _ in backlog.load.queued_by_tower.values())
        )
        # The job's batch may contain later jobs, but the job is done no later than all jobs in the queue.
        queue = min(before + own, max(whole, before))
        lanes = max(1, self._lanes())
        return (running + queue) / lanes + own * (1 - 1 / lanes)

    def _remaining_running_s(self, running: Sequence[RunningBatch], now: float) -> float:
        left = (self._latency_model(b.tower).predict_s(b.tokens) - (now - b.started_s) for b in running)
        return math.fsum(max(0.0, seconds) for seconds in left)

    def _queued_work_s(self, load: ServiceLoad) -> float:
        seconds = 0.0
        for tower, (tokens, items) in load.queued_by_tower.items():
            one = self._latency_model(tower)
            seconds += (
                one.fixed_s * max(1.0, tokens / self._batch_tokens(tokens, items)) + one.token_s * tokens
            )
        return seconds

    def _batch_tokens(self, tokens: int, items: int) -> float:
        """Return the expected number of tokens in a batch from a queue with this number of tokens and
        items."""
        return max(1.0, min(tokens, self._max_tokens, self._max_items * tokens / items))

    def _batch_token_limit(self, tower: object, deadline_s: float) -> float:
        oldest = self._clock() - _RECENT_S
        about = (short_s for short_s, then in self._shortest_deadlines.values() if then >= oldest)
        shortest_s = min((deadline_s, *about))
        return self._latency_model(tower).max_tokens_within(_DEADLINE_FRACTION * shortest_s)

    def _record_deadline(self, job: EncodeJob[Any], now: float) -> None:
        short_s, then = self._shortest_deadlines.get(job.qos, (math.inf, now))
        if job.shortest_deadline_s <= short_s or now - then > _RECENT_S:
            self._shortest_deadlines[job.qos] = job.shortest_deadline_s, now

    def _latency_model(self, tower: object) -> BatchLatencyModel:
        return self._latency_models.get(tower) or BatchLatencyModel()

    def _demand_by_class(self, tower: object, now: float) -> Mapping[ServiceClass, float]:
        with self._lock:
            token_s = (
                self._latency_model(tower).predict_s(self._max_tokens)
                / self._max_tokens
                / max(1, self._lanes())
            )
            return {qos: rate * token_s for qos, rate in self._arrivals.tokens_per_second(now).items()}
