"""Weighted fair queueing of classes: shares first, the rest by priority, apps of one class in turn. No I/O.

    share 0.5  ████████░░░░░░░░   guaranteed: by virtual time, the earliest finish of the eligible classes
    share 0.3  ░░░░░░░░█████░░░
    surplus    ░░░░░░░░░░░░░███   to the highest priority that has work; equal priorities by their shares

The guarantee is that of WF2Q (Bennett and Zhang, "WF2Q: Worst-case Fair Weighted Fair Queueing", 1996) over
tokens. A class is eligible while it has received less than its share since its queue was last empty. Of the
eligible classes, the next is the one that would finish first at its own rate. Surplus service is not counted
against it later, as in H-FSC (Stoica, Zhang and Ng, 1997). Apps of a class take turns by start tags (Goyal,
Vin and Chen, "Start-time Fair Queueing", 1996).

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
    from cornplug.encoder_service.scheduling.batcher import PendingRequest

MAX_WAITING: Final = 256
"""Maximum number of items in the queue. Beyond it, the service returns status 503."""
QueueFull = tuple[Literal["over_share", "overloaded"], str]
"""Reason and message of the refusal if there is no slot."""


class QueueLimit:
    """Admitted requests without a reply. Thread-safe.

    A class may use unreserved slots and its own slots, which are its share of all. Other classes cannot use
    these.
    """

    def __init__(self, classes: Sequence[ServiceClass], slots: int) -> None:
        self.slots: Final = slots
        self._reserved = {qos: math.floor(qos.share * slots) for qos in classes}
        self._changed = threading.Condition()
        self._waits: set[PendingRequest] = set()
        self._held: Counter[ServiceClass] = Counter()
        self._stopping = False

    def enter(self, pending: PendingRequest) -> QueueFull | None:
        """Take a slot, or return why there is none. `leave` releases it."""
        with self._changed:
            if self._stopping:
                return "overloaded", "the service is stopping"
            kept = sum(
                max(0, own - self._held[qos]) for qos, own in self._reserved.items() if qos != pending.qos
            )
            if len(self._waits) + kept >= self.slots:
                # The class's reserved slots are in use, or the request would have got one.
                if len(self._waits) > self._held[pending.qos]:
                    return (
                        "over_share",
                        f"{self._held[pending.qos]} requests of its class are already waiting",
                    )
                return "overloaded", f"{len(self._waits)} requests are already waiting"
            self._waits.add(pending)
            self._held[pending.qos] += 1
            return None

    def leave(self, pending: PendingRequest) -> None:
        """Release the slot, because the request was answered or cancelled."""
        with self._changed:
            if pending in self._waits:
                self._waits.remove(pending)
                self._held[pending.qos] -= 1
                self._changed.notify_all()

    def drain(self, deadline_s: float) -> bool:
        """Admit no more requests, and wait until all have left. Returns False if the deadline passes
        first."""
        with self._changed:
            self._stopping = True
            return self._changed.wait_for(lambda: not self._waits, deadline_s)

    def identities(self) -> frozenset[bytes]:
        """Return the identities of the models that the requests use."""
        with self._changed:
            return frozenset(pending.request.identity for pending in self._waits)

    def __len__(self) -> int:
        with self._changed:
            return len(self._waits)


@dataclass(slots=True)
class _ClassState:
    """Tags of one class in tokens."""

    eligible_at: float = 0.0
    """Tokens served to all classes at which the class becomes eligible for guaranteed service."""
    surplus: float = 0.0
    """Surplus tokens received, divided by the class's share."""
    virtual_time: float = 0.0
    """Start tag of the app that was served last."""
    apps: dict[str, float] = field(default_factory=dict)


class WeightedFairQueue:
    """Tags of classes and apps. Not thread-safe: the batcher calls it under its lock."""

    def __init__(self) -> None:
        self._served = 0.0
        self._surplus = 0.0
        self._states: dict[ServiceClass, _ClassState] = {}
        self._backlogged: dict[ServiceClass, Collection[str]] = {}

    def set_backlogged(self, now: Mapping[ServiceClass, Collection[str]]) -> None:
        """Set the classes and apps that have work. A class or app without work does not accumulate turns."""
        for qos, apps in now.items():
            state = self._states.setdefault(qos, _ClassState())
            before = self._backlogged.get(qos, ())
            if not before:
                state.eligible_at = max(state.eligible_at, self._served)
                state.surplus = max(state.surplus, self._surplus)
            for app in apps:
                if app not in before:
                    state.apps[app] = max(state.apps.get(app, 0.0), state.virtual_time)
            # Apps without work keep their tag only while they are ahead of their share.
            state.apps = {a: tag for a, tag in state.apps.items() if a in apps or tag > state.virtual_time}
        self._backlogged = {qos: frozenset(apps) for qos, apps in now.items() if apps}

    def app_tag(self, qos: ServiceClass, app: str) -> float:
        """Return the start tag of an app. The lowest tag of a class is served next."""
        return self._states[qos].apps[app]

    def next_class(self, heads: Mapping[ServiceClass, int]) -> ServiceClass:
        """Return the class to serve next. `heads` has the tokens that each class would be served."""
        eligible = [qos for qos in heads if self._states[qos].eligible_at <= self._served]
        if eligible:
            return min(
                eligible,
                key=lambda q: (self._states[q].eligible_at + heads[q] / q.share, -q.priority, q.name),
            )
        return min(heads, key=lambda q: (-q.priority, self._states[q].surplus, q.name))

    def may_fill(self, qos: ServiceClass, batch_tokens: float) -> bool:
        """Return whether the class may fill a batch whose next job did not fit.

        True unless another class is eligible and this one is `batch_tokens` or more ahead of its share.
        """
        if not self._any_due():
            return True
        return (self._states[qos].eligible_at - self._served) * qos.share < batch_tokens

    def charge(self, qos: ServiceClass, app: str, tokens: int) -> None:
        """Count tokens served to a class and an app."""
        state = self._states[qos]
        # Filling a batch while another class is eligible uses that class's time: it counts as guaranteed.
        if state.eligible_at <= self._served or self._any_due():
            state.eligible_at += tokens / qos.share
        else:
            self._surplus = max(self._surplus, state.surplus)
            state.surplus += tokens / qos.share
        self._served += tokens
        # The app may have no work left: a job's true cost is known only once it runs.
        start = state.apps.get(app, state.virtual_time)
        state.virtual_time = max(state.virtual_time, start)
        state.apps[app] = start + tokens

    def tokens_until_served(
        self,
        qos: ServiceClass,
        own: float,
        others: Mapping[ServiceClass, float],
        demand: Mapping[ServiceClass, float],
    ) -> float:
        """Return the tokens served to all classes until `own` tokens of class `qos` are served, in the order
        of `next_class`.

        `others` are the tokens in the queues of the other classes. `demand` is the arrival rate of each
        class, as a fraction of the total service rate. This is a fluid model, exact to within one job of each
        class.
        """
        left = {q: float(tokens) for q, tokens in others.items() if tokens > 0 and q != qos}
        left[qos] = own
        now = 0.0
        while True:
            owed = {q: self._owed_in(q) - now for q in left}
            rates = _rates(left, demand, {q for q in left if owed[q] <= 0})
            ends = [left[q] / rates[q] for q in left if rates[q] > 0]
            step = min([*ends, *(pending for pending in owed.values() if pending > 0)])
            if rates[qos] > 0 and left[qos] <= rates[qos] * step * (1 + 1e-9):
                return now + left[qos] / rates[qos]
            now += step
            left = {q: rest for q, tokens in left.items() if (rest := tokens - rates[q] * step) > 1e-6}

    def _any_due(self) -> bool:
        return any(self._states[qos].eligible_at <= self._served for qos in self._backlogged)

    def _owed_in(self, qos: ServiceClass) -> float:
        """Return the tokens served to all classes until the class is eligible, 0 without work."""
        state = self._states.get(qos)
        return 0.0 if state is None or qos not in self._backlogged else state.eligible_at - self._served


def _rates(
    left: Mapping[ServiceClass, float],
    demand: Mapping[ServiceClass, float],
    eligible_at: Collection[ServiceClass],
) -> dict[ServiceClass, float]:
    """Return the fractions by which the next tokens are divided among classes that have work."""
    rates = {q: q.share if q in eligible_at else 0.0 for q in left}
    # A class with an empty queue consumes its arrivals.
    coming = {q: part for q, part in demand.items() if q not in left}
    free = 1.0 - math.fsum(rates.values()) - math.fsum(min(q.share, part) for q, part in coming.items())
    for priority in sorted({q.priority for q in (*left, *coming)}, reverse=True):
        for q, part in coming.items():
            if q.priority == priority:
                free -= min(max(0.0, free), max(0.0, part - q.share))
        equals = [q for q in left if q.priority == priority]
        if equals and free > 0:
            whole = sum(q.share for q in equals)
            for q in equals:
                rates[q] += free * q.share / whole
            free = 0.0
    return rates
