"""Weighted fair queueing of service classes. Each class gets its share. Surplus capacity goes to the classes
with the highest priority. Within a class, apps are served alternately. Uses no I/O.

    share 0.5  ████████░░░░░░░░   guaranteed: by virtual time, the earliest finish of the eligible classes
    share 0.3  ░░░░░░░░█████░░░
    surplus    ░░░░░░░░░░░░░███   to the highest priority that has work; equal priorities by their shares

The guarantee is the same as in WF2Q (Bennett and Zhang, "WF2Q: Worst-case Fair Weighted Fair Queueing",
1996), measured in tokens. A class is eligible while it has received less than its share since its queue was
last empty. Among the eligible classes, the class whose job would finish first at the class's own rate is
served next. Surplus service does not count against a class later, as in H-FSC (Stoica, Zhang and Ng, 1997).
The apps of a class alternate by start tags (Goyal, Vin and Chen, "Start-time Fair Queueing", 1996).

A batch takes the first job regardless of its size. Other jobs fill the remaining tokens, so that small jobs
do not wait for a large job. A job that is skipped, because it is too large or needs another tower, is the
first job of the next batch. Therefore no job starves.

`QueueLimit` limits the number of waiting requests, with slots reserved for each class.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from cornplug.qos import ServiceClass

if TYPE_CHECKING:
    from cornplug.encoder_service.batcher import PendingRequest
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

MAX_WAITING: Final = 256
"""Default maximum number of waiting requests. Further requests are refused."""
QueueFull = tuple[Literal["over_share", "overloaded"], str]
"""Reason and message of the refusal if no slot is free."""


class QueueLimit:
    """Limits the number of admitted requests without a reply. Thread-safe.

    Each class reserves its share of the slots, which other classes cannot use. A class may also use
    unreserved slots.
    """

    def __init__(self, classes: Sequence[ServiceClass], slots: int) -> None:
        self.slots: Final = slots
        self._reserved = {qos: math.floor(qos.share * slots) for qos in classes}
        self._changed = threading.Condition()
        self._waiting: set[PendingRequest] = set()
        self._used_slots: Counter[ServiceClass] = Counter()
        self._stopping = False

    def acquire(self, pending: PendingRequest) -> QueueFull | None:
        """Take a slot for a request and return None, or return the reason why no slot is free. `release`
        releases the slot."""
        with self._changed:
            if self._stopping:
                return "overloaded", "the service is stopping"
            kept = sum(
                max(0, own - self._used_slots[qos])
                for qos, own in self._reserved.items()
                if qos != pending.qos
            )
            if len(self._waiting) + kept >= self.slots:
                # The class uses all its reserved slots. Otherwise a slot would be free for it.
                if len(self._waiting) > self._used_slots[pending.qos]:
                    return (
                        "over_share",
                        f"{self._used_slots[pending.qos]} requests of this class are already waiting",
                    )
                return "overloaded", f"{len(self._waiting)} requests are already waiting"
            self._waiting.add(pending)
            self._used_slots[pending.qos] += 1
            return None

    def release(self, pending: PendingRequest) -> None:
        """Release a request's slot, after the request got its reply or was cancelled."""
        with self._changed:
            if pending in self._waiting:
                self._waiting.remove(pending)
                self._used_slots[pending.qos] -= 1
                self._changed.notify_all()

    def drain(self, deadline_s: float) -> bool:
        """Stop admitting requests, and wait until all slots are released. Returns False if the deadline
        passes first."""
        with self._changed:
            self._stopping = True
            return self._changed.wait_for(lambda: not self._waiting, deadline_s)

    def identities_in_use(self) -> frozenset[bytes]:
        """Return the model identities that the waiting requests use."""
        with self._changed:
            return frozenset(pending.request.identity for pending in self._waiting)

    def __len__(self) -> int:
        with self._changed:
            return len(self._waiting)


@dataclass(slots=True)
class _ClassState:
    """Scheduling tags of one class, in tokens. `apps` has the start tag of each app."""

    eligible_at: float = 0.0
    """Value of `WeightedFairQueue._served` from which the class is eligible for guaranteed service."""
    surplus: float = 0.0
    """Number of surplus tokens that the class has received, divided by its share."""
    virtual_time: float = 0.0
    """Largest start tag among the apps that were served."""
    apps: dict[str, float] = field(default_factory=dict)


class WeightedFairQueue:
    """Decides which class and app is served next. Not thread-safe, so the batcher calls it under a lock."""

    def __init__(self) -> None:
        self._served = 0.0
        self._surplus = 0.0
        self._states: dict[ServiceClass, _ClassState] = {}
        self._backlogged: dict[ServiceClass, Collection[str]] = {}

    def set_backlogged(self, apps_by_class: Mapping[ServiceClass, Collection[str]]) -> None:
        """Set which classes and apps have queued work. A class or app without work does not accumulate a
        claim to service."""
        for qos, apps in apps_by_class.items():
            state = self._states.setdefault(qos, _ClassState())
            before = self._backlogged.get(qos, ())
            if not before:
                state.eligible_at = max(state.eligible_at, self._served)
                state.surplus = max(state.surplus, self._surplus)
            for app in apps:
                if app not in before:
                    state.apps[app] = max(state.apps.get(app, 0.0), state.virtual_time)
            # An app without work keeps its tag only while the tag is ahead of the class's virtual time.
            state.apps = {a: tag for a, tag in state.apps.items() if a in apps or tag > state.virtual_time}
        self._backlogged = {qos: frozenset(apps) for qos, apps in apps_by_class.items() if apps}

    def app_tag(self, qos: ServiceClass, app: str) -> float:
        """Return the start tag of an app. In a class, the app with the lowest tag is served next."""
        return self._states[qos].apps[app]

    def next_class(self, head_tokens: Mapping[ServiceClass, int]) -> ServiceClass:
        """Return the class to serve next. `head_tokens` has the number of tokens of each class's next job."""
        eligible = [qos for qos in head_tokens if self._states[qos].eligible_at <= self._served]
        if eligible:
            return min(
                eligible,
                key=lambda q: (self._states[q].eligible_at + head_tokens[q] / q.share, -q.priority, q.name),
            )
        return min(head_tokens, key=lambda q: (-q.priority, self._states[q].surplus, q.name))

    def may_fill(self, qos: ServiceClass, batch_tokens: float) -> bool:
        """Return whether jobs of this class may fill a batch after a job that did not fit.

        True unless a class is eligible and this class is `batch_tokens` or more ahead of its share.
        """
        if not self._has_eligible_class():
            return True
        return (self._states[qos].eligible_at - self._served) * qos.share < batch_tokens

    def charge(self, qos: ServiceClass, app: str, tokens: int) -> None:
        """Charge served tokens to an app within its class."""
        state = self._states[qos]
        # While another class is eligible, filling a batch uses that class's time. Such tokens count as
        # guaranteed service.
        if state.eligible_at <= self._served or self._has_eligible_class():
            state.eligible_at += tokens / qos.share
        else:
            self._surplus = max(self._surplus, state.surplus)
            state.surplus += tokens / qos.share
        self._served += tokens
        # The app may have no tag. The additional cost of a running job is charged when the app's queue is
        # empty.
        start = state.apps.get(app, state.virtual_time)
        state.virtual_time = max(state.virtual_time, start)
        state.apps[app] = start + tokens

    def tokens_until_served(
        self,
        qos: ServiceClass,
        own_tokens: float,
        other_tokens: Mapping[ServiceClass, float],
        demand: Mapping[ServiceClass, float],
    ) -> float:
        """Return how many tokens of all classes are served until `own_tokens` tokens of class `qos` are
        served, in the order of `next_class`.

        `other_tokens` has the number of queued tokens of each other class. `demand` has the arrival rate of
        each class, as a fraction of the total service rate. The result comes from a fluid model, which is
        exact to within one job per class.
        """
        left = {q: float(tokens) for q, tokens in other_tokens.items() if tokens > 0 and q != qos}
        left[qos] = own_tokens
        now = 0.0
        while True:
            owed = {q: self._tokens_until_eligible(q) - now for q in left}
            rates = _service_rates(left, demand, {q for q in left if owed[q] <= 0})
            ends = [left[q] / rates[q] for q in left if rates[q] > 0]
            step = min([*ends, *(pending for pending in owed.values() if pending > 0)])
            if rates[qos] > 0 and left[qos] <= rates[qos] * step * (1 + 1e-9):
                return now + left[qos] / rates[qos]
            now += step
            left = {q: rest for q, tokens in left.items() if (rest := tokens - rates[q] * step) > 1e-6}

    def _has_eligible_class(self) -> bool:
        return any(self._states[qos].eligible_at <= self._served for qos in self._backlogged)

    def _tokens_until_eligible(self, qos: ServiceClass) -> float:
        """Return how many tokens of all classes are served until the class is eligible. The result is 0 if
        the class has no work, and 0 or negative if the class is eligible now."""
        state = self._states.get(qos)
        return 0.0 if state is None or qos not in self._backlogged else state.eligible_at - self._served


def _service_rates(
    queued_tokens: Mapping[ServiceClass, float],
    demand: Mapping[ServiceClass, float],
    eligible: Collection[ServiceClass],
) -> dict[ServiceClass, float]:
    """Return the fraction of the next tokens that each class with queued work gets."""
    rates = {q: q.share if q in eligible else 0.0 for q in queued_tokens}
    # A class with an empty queue gets as much service as its arrivals need.
    coming = {q: part for q, part in demand.items() if q not in queued_tokens}
    free = 1.0 - math.fsum(rates.values()) - math.fsum(min(q.share, part) for q, part in coming.items())
    for priority in sorted({q.priority for q in (*queued_tokens, *coming)}, reverse=True):
        for q, part in coming.items():
            if q.priority == priority:
                free -= min(max(0.0, free), max(0.0, part - q.share))
        equals = [q for q in queued_tokens if q.priority == priority]
        if equals and free > 0:
            whole = sum(q.share for q in equals)
            for q in equals:
                rates[q] += free * q.share / whole
            free = 0.0
    return rates


class QueuedJob(Protocol):
    """Job that waits for a tower. Jobs are compared by object identity."""

    feature_key: bytes
    tower: object
    tokens: int
    qos: ServiceClass
    app: str
    due_s: float


JobT = TypeVar("JobT", bound=QueuedJob)
QueuesByApp = dict[ServiceClass, dict[str, list[JobT]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedBatch(Generic[JobT]):
    """Formed batch, and the first job that did not fit."""

    batch: list[JobT]
    tokens: int
    """Number of tokens in the batch. Jobs with the same features count once."""
    skipped: JobT | None
    """Next job in order, which did not fit, or None. Pass it as `first_job` to form the next batch."""


def form_batch(
    queue: Sequence[JobT],
    fair_queue: WeightedFairQueue,
    *,
    max_items: int,
    max_tokens_for: Callable[[JobT], float],
    first_job: JobT | None = None,
) -> FormedBatch[JobT]:
    """Form a batch for one tower from `queue`, which must not be empty, and charge its jobs to `fair_queue`.

    `max_tokens_for` returns the maximum number of tokens of a batch that contains a given job.
    """
    queues = _queues_by_app(queue)
    fair_queue.set_backlogged({qos: apps.keys() for qos, apps in queues.items()})
    batch: list[JobT] = []
    items, tokens, token_limit = 0, 0, math.inf
    passed_over: JobT | None = None

    def fits(job: JobT) -> bool:
        return job.tower is batch[0].tower and tokens + job.tokens <= min(token_limit, max_tokens_for(job))

    def fills(job: JobT) -> bool:
        return fits(job) and fair_queue.may_fill(job.qos, token_limit)

    while queues and items < max_items:
        chosen = (
            first_job if first_job is not None and not batch else _next_job(queues, fair_queue, _accept_any)
        )
        if batch and chosen is not None and not fits(chosen):
            passed_over = passed_over or chosen
            chosen = _next_job(queues, fair_queue, fills)
        if chosen is None:
            break
        fair_queue.charge(chosen.qos, chosen.app, chosen.tokens)
        items += 1
        tokens += chosen.tokens
        token_limit = min(token_limit, max_tokens_for(chosen))
        batch += _take_with_duplicates(queues, chosen)
    fair_queue.set_backlogged({qos: apps.keys() for qos, apps in queues.items()})
    return FormedBatch(batch=batch, tokens=tokens, skipped=passed_over)


def _accept_any(job: QueuedJob) -> bool:
    return True


def _next_job(
    queues: QueuesByApp[JobT], fair_queue: WeightedFairQueue, fits: Callable[[JobT], bool]
) -> JobT | None:
    """Return the next job in fair order that fits, or None if no job fits."""
    heads = {
        qos: head for qos in queues if (head := _next_job_of_class(queues, qos, fair_queue, fits)) is not None
    }
    return heads[fair_queue.next_class({qos: head.tokens for qos, head in heads.items()})] if heads else None


def _queues_by_app(queue: Sequence[JobT]) -> QueuesByApp[JobT]:
    queues: QueuesByApp[JobT] = {}
    for job in sorted(queue, key=lambda job: job.due_s):
        queues.setdefault(job.qos, {}).setdefault(job.app, []).append(job)
    return queues


def _next_job_of_class(
    queues: QueuesByApp[JobT], qos: ServiceClass, fair_queue: WeightedFairQueue, fits: Callable[[JobT], bool]
) -> JobT | None:
    """Return the class's next job that fits, or None. Apps are served alternately. Within an app, the job
    with the earliest deadline is first."""
    apps = queues[qos]
    for app in sorted(apps, key=lambda a: (fair_queue.app_tag(qos, a), apps[a][0].due_s)):
        if (head := next(filter(fits, apps[app]), None)) is not None:
            return head
    return None


def _take_with_duplicates(queues: QueuesByApp[JobT], chosen: JobT) -> list[JobT]:
    """Remove `chosen` from the queues, and all jobs with the same features, because these jobs add no work.
    Return the removed jobs."""
    out = [chosen]
    for qos, apps in list(queues.items()):
        for app, waiting in list(apps.items()):
            stay = [
                job
                for job in waiting
                if job.feature_key != chosen.feature_key or job.tower is not chosen.tower
            ]
            if len(stay) < len(waiting):
                out += [job for job in waiting if job not in stay and job is not chosen]
            if stay:
                apps[app] = stay
            else:
                del apps[app]
        if not apps:
            del queues[qos]
    return out
