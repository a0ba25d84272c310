"""Work ahead of a new request: the queue, the running batches, and its position among them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cornplug.encoder_service.scheduling.batch_former import QueuedJob
from cornplug.encoder_service.scheduling.fair_queue import WeightedFairQueue
from cornplug.qos import ServiceClass


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunningBatch:
    """Batch that a tower is computing."""

    tower: object
    tokens: int
    begun_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """Queue and running batches of a service. Media with equal features count once."""

    waiting: Mapping[object, tuple[int, int]]
    """Tower -> tokens and media in the queue."""
    running: Sequence[RunningBatch]

    @classmethod
    def of(cls, queue: Iterable[QueuedJob], running: Iterable[RunningBatch]) -> Self:
        """`running` may contain a batch several times."""
        waiting: dict[object, tuple[int, int]] = {}
        for job in _distinct(queue):
            tokens, items = waiting.get(job.tower, (0, 0))
            waiting[job.tower] = tokens + job.tokens, items + 1
        return cls(waiting=waiting, running=tuple(dict.fromkeys(running)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Backlog:
    """Load with one more job in the queue, and the position of that job."""

    load: ServiceLoad
    tokens_until_served: float
    """Tokens served until the job is done, including its own."""
    tokens_by_class: Mapping[ServiceClass, int]
    """Class -> tokens in the queue, without the job's own."""


def backlog_ahead(
    queue: Sequence[QueuedJob],
    running: Iterable[RunningBatch],
    fair_queue: WeightedFairQueue,
    new: QueuedJob,
    demand: Mapping[ServiceClass, float],
) -> Backlog:
    """Return the backlog ahead of `new`. For `demand`, see `WeightedFairQueue.tokens_until_served`."""
    tokens_by_class: dict[ServiceClass, int] = {}
    apps: dict[str, int] = {}
    own = new.tokens
    for job in _distinct(queue):
        tokens_by_class[job.qos] = tokens_by_class.get(job.qos, 0) + job.tokens
        if job.qos == new.qos and job.app != new.app:
            apps[job.app] = apps.get(job.app, 0) + job.tokens
        elif job.qos == new.qos and job.due_s <= new.due_s:
            own += job.tokens
    # Apps take turns: while one is served, each other one is served as much.
    own += sum(min(own, tokens) for tokens in apps.values())
    return Backlog(
        load=ServiceLoad.of((*queue, new), running),
        tokens_until_served=fair_queue.tokens_until_served(new.qos, own, tokens_by_class, demand),
        tokens_by_class=tokens_by_class,
    )


def _distinct(queue: Iterable[QueuedJob]) -> Iterable[QueuedJob]:
    return {job.feature_key: job for job in queue}.values()
