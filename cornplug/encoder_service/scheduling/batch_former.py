"""One batch out of a queue: whose turn it is comes first, what fits beside it fills the batch.

    queue ─> lanes by class and app, the earliest deadline first ─FairOrder─> a batch for one tower

The first is taken whatever its size; others fill what is left of the tokens, so that small ones do not
wait behind a big one that fits no more. Whose turn it was and which did not fit, or is another tower's,
is the first of the next batch, so that nobody starves for being big.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from cornplug.encoder_service.scheduling.fair_queue import FairOrder
from cornplug.qos import ServiceClass


class QueuedJob(Protocol):
    """Something that waits for a tower; compared by identity."""

    feature_key: bytes
    tower: object
    tokens: int
    qos: ServiceClass
    app: str
    due_s: float


W = TypeVar("W", bound=QueuedJob)
Lanes = dict[ServiceClass, dict[str, list[W]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormedBatch(Generic[W]):
    """One batch."""

    batch: list[W]
    tokens: int
    """Of distinct features."""
    passed_over: W | None
    """Who had its turn and did not fit: give it as `first` next time."""


def pack(
    queue: Sequence[W],
    order: FairOrder,
    *,
    max_items: int,
    limit: Callable[[W], float],
    first: W | None = None,
) -> FormedBatch[W]:
    """A batch of one tower out of `queue`, which is not empty, charged to `order`.

    `limit` is how many tokens a batch may have with that one in it.
    """
    lanes = _lanes(queue)
    order.waiting({qos: apps.keys() for qos, apps in lanes.items()})
    batch: list[W] = []
    items, tokens, most = 0, 0, math.inf
    passed_over: W | None = None

    def fits(one: W) -> bool:
        return one.tower is batch[0].tower and tokens + one.tokens <= min(most, limit(one))

    def fills(one: W) -> bool:
        return fits(one) and order.may_borrow(one.qos, most)

    while lanes and items < max_items:
        chosen = first if first is not None and not batch else _turn(lanes, order, _anyone)
        if batch and chosen is not None and not fits(chosen):
            passed_over = passed_over or chosen
            chosen = _turn(lanes, order, fills)
        if chosen is None:
            break
        order.charge(chosen.qos, chosen.app, chosen.tokens)
        items += 1
        tokens += chosen.tokens
        most = min(most, limit(chosen))
        batch += _leave(lanes, chosen)
    order.waiting({qos: apps.keys() for qos, apps in lanes.items()})
    return FormedBatch(batch=batch, tokens=tokens, passed_over=passed_over)


def _anyone(one: QueuedJob) -> bool:
    return True


def _turn(lanes: Lanes[W], order: FairOrder, fits: Callable[[W], bool]) -> W | None:
    """Whose turn it is of those who fit."""
    heads = {qos: head for qos in lanes if (head := _head(lanes, qos, order, fits)) is not None}
    return heads[order.choose({qos: head.tokens for qos, head in heads.items()})] if heads else None


def _lanes(queue: Sequence[W]) -> Lanes[W]:
    lanes: Lanes[W] = {}
    for one in sorted(queue, key=lambda w: w.due_s):
        lanes.setdefault(one.qos, {}).setdefault(one.app, []).append(one)
    return lanes


def _head(lanes: Lanes[W], qos: ServiceClass, order: FairOrder, fits: Callable[[W], bool]) -> W | None:
    """What the class would be served: of the next app in turn that has something which fits."""
    apps = lanes[qos]
    for app in sorted(apps, key=lambda a: (order.app_turn(qos, a), apps[a][0].due_s)):
        if (head := next(filter(fits, apps[app]), None)) is not None:
            return head
    return None


def _leave(lanes: Lanes[W], chosen: W) -> list[W]:
    """Take `chosen` out, and after it those that need the same features: they ride for free."""
    out = [chosen]
    for qos, apps in list(lanes.items()):
        for app, waiting in list(apps.items()):
            stay = [w for w in waiting if w.feature_key != chosen.feature_key or w.tower is not chosen.tower]
            if len(stay) < len(waiting):
                out += [w for w in waiting if w not in stay and w is not chosen]
            if stay:
                apps[app] = stay
            else:
                del apps[app]
        if not apps:
            del lanes[qos]
    return out
