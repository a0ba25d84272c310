"""What a request finds that comes now: all that waits and runs, and how much of it goes first. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from cornplug.encoder_service.scheduling.batch_former import QueuedJob
from cornplug.encoder_service.scheduling.fair_queue import FairOrder
from cornplug.qos import ServiceClass


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunningBatch:
    """What a tower has been given and not landed yet."""

    tower: object
    tokens: int
    begun_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLoad:
    """What a service has to do. Media of equal features count once."""

    waiting: Mapping[object, tuple[int, int]]
    """By tower: tokens and media in the queue."""
    running: Sequence[RunningBatch]

    @classmethod
    def of(cls, queue: Iterable[QueuedJob], running: Iterable[RunningBatch]) -> Self:
        """`running` may name a batch several times."""
        waiting: dict[object, tuple[int, int]] = {}
        for one in _distinct(queue):
            tokens, items = waiting.get(one.tower, (0, 0))
            waiting[one.tower] = tokens + one.tokens, items + 1
        return cls(waiting=waiting, running=tuple(dict.fromkeys(running)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogAhead:
    """The same with one more in the queue, and when its turn would end."""

    load: ServiceLoad
    until: float
    """Tokens that are served until it is, its own among them."""
    of_class: Mapping[ServiceClass, int]
    """By class: tokens in the queue, without its own."""


def look(
    queue: Sequence[QueuedJob],
    running: Iterable[RunningBatch],
    order: FairOrder,
    new: QueuedJob,
    demand: Mapping[ServiceClass, float],
) -> BacklogAhead:
    """What `new` would find. `demand` as `FairOrder.until` takes it."""
    of_class: dict[ServiceClass, int] = {}
    apps: dict[str, int] = {}
    own = new.tokens
    for one in _distinct(queue):
        of_class[one.qos] = of_class.get(one.qos, 0) + one.tokens
        if one.qos == new.qos and one.app != new.app:
            apps[one.app] = apps.get(one.app, 0) + one.tokens
        elif one.qos == new.qos and one.due_s <= new.due_s:
            own += one.tokens
    # Apps take turns: while one is served, each other one is served as much.
    own += sum(min(own, tokens) for tokens in apps.values())
    return BacklogAhead(
        load=ServiceLoad.of((*queue, new), running),
        until=order.until(new.qos, own, of_class, demand),
        of_class=of_class,
    )


def _distinct(queue: Iterable[QueuedJob]) -> Iterable[QueuedJob]:
    return {one.feature_key: one for one in queue}.values()
