"""Formation of batches from the queue, in fair order. Smaller jobs fill the rest of a batch.

    queue ─> by class and app, the earliest deadline first ─WeightedFairQueue─> a batch for one tower

The first job is taken regardless of its size. Other jobs fill the remaining tokens, so that small jobs do not
wait for a large job. If a job is passed over, because it is too large or needs another tower, it is the first
job of the next batch, so that no job starves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cornplug.encoder_service.scheduling.fair_queue import WeightedFairQueue
from cornplug.qos import ServiceClass


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
    """Batch, and the first job that did not fit."""

    batch: list[JobT]
    tokens: int
    """Number of tokens in the batch. Jobs with the same features count once."""
    passed_over: JobT | None
    """Job that was next in order but did not fit, or None. Pass it as `first` to form the next batch."""


def form_batch(
    queue: Sequence[JobT],
    fair_queue: WeightedFairQueue,
    *,
    max_items: int,
    limit: Callable[[JobT], float],
    first: JobT | None = None,
) -> FormedBatch[JobT]:
    """Form a batch for one tower from `queue`, which must not be empty, and charge its jobs to `fair_queue`.

    `limit` returns the maximum number of tokens of a batch that contains a given job.
    """
    queues = _queues_by_app(queue)
    fair_queue.set_backlogged({qos: apps.keys() for qos, apps in queues.items()})
    batch: list[JobT] = []
    items, tokens, token_limit = 0, 0, math.inf
    passed_over: JobT | None = None

    def fits(job: JobT) -> bool:
        return job.tower is batch[0].tower and tokens + job.tokens <= min(token_limit, limit(job))

    def fills(job: JobT) -> bool:
        return fits(job) and fair_queue.may_fill(job.qos, token_limit)

    while queues and items < max_items:
        chosen = first if first is not None and not batch else _next_job(queues, fair_queue, _accept_any)
        if batch and chosen is not None and not fits(chosen):
            passed_over = passed_over or chosen
            chosen = _next_job(queues, fair_queue, fills)
        if chosen is None:
            break
        fair_queue.charge(chosen.qos, chosen.app, chosen.tokens)
        items += 1
        tokens += chosen.tokens
        token_limit = min(token_limit, limit(chosen))
        batch += _take_with_duplicates(queues, chosen)
    fair_queue.set_backlogged({qos: apps.keys() for qos, apps in queues.items()})
    return FormedBatch(batch=batch, tokens=tokens, passed_over=passed_over)


def _accept_any(job: QueuedJob) -> bool:
    return True


def _next_job(
    queues: QueuesByApp[JobT], fair_queue: WeightedFairQueue, fits: Callable[[JobT], bool]
) -> JobT | None:
    """Return the next job in fair order among the jobs that fit, or None."""
    heads = {qos: head for qos in queues if (head := _head(queues, qos, fair_queue, fits)) is not None}
    return heads[fair_queue.next_class({qos: head.tokens for qos, head in heads.items()})] if heads else None


def _queues_by_app(queue: Sequence[JobT]) -> QueuesByApp[JobT]:
    queues: QueuesByApp[JobT] = {}
    for job in sorted(queue, key=lambda job: job.due_s):
        queues.setdefault(job.qos, {}).setdefault(job.app, []).append(job)
    return queues


def _head(
    queues: QueuesByApp[JobT], qos: ServiceClass, fair_queue: WeightedFairQueue, fits: Callable[[JobT], bool]
) -> JobT | None:
    """Return the class's next job that fits, or None. Apps take turns, and within an app the job with the
    earliest deadline is first."""
    apps = queues[qos]
    for app in sorted(apps, key=lambda a: (fair_queue.app_tag(qos, a), apps[a][0].due_s)):
        if (head := next(filter(fits, apps[app]), None)) is not None:
            return head
    return None


def _take_with_duplicates(queues: QueuesByApp[JobT], chosen: JobT) -> list[JobT]:
    """Remove `chosen` from the queues, and all jobs with the same features, because they add no work. Return
    the removed jobs."""
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
