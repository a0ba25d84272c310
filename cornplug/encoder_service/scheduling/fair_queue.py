"""Whose turn it is: shares first, what nobody reserved by priority, apps of one class in turns. Pure.

    share 0.5  ████████░░░░░░░░   guaranteed: by virtual time, the earliest finish of those that are due
    share 0.3  ░░░░░░░░█████░░░
    left over  ░░░░░░░░░░░░░███   to the highest priority that has work; equals by their shares

The guarantee is WF2Q's (Bennett and Zhang, "WF2Q: Worst-case Fair Weighted Fair Queueing", 1996) over
tokens: a class is due while it has had less than its share since it last had nothing to do, and of those
that are due the one goes first that would finish first at its own pace. What it gets beyond is not held
against it later, as in H-FSC (Stoica, Zhang and Ng, 1997). Apps of a class take turns by start tags
(Goyal, Vin and Chen, "Start-time Fair Queueing", 1996).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from cornplug.qos import ServiceClass


@dataclass(slots=True)
class _Turns:
    """Where one class stands. Tags are in tokens."""

    due: float = 0.0
    """Guaranteed service is due once the tokens served of all classes reach this."""
    extra: float = 0.0
    """Of what was left over, so much over its share has been had."""
    clock: float = 0.0
    """Start tag of the app that was served last."""
    apps: dict[str, float] = field(default_factory=dict)


class FairOrder:
    """Tags of classes and apps. Not thread-safe: it is the batcher's."""

    def __init__(self) -> None:
        self._served = 0.0
        self._extra = 0.0
        self._turns: dict[ServiceClass, _Turns] = {}
        self._waiting: dict[ServiceClass, Collection[str]] = {}

    def waiting(self, now: Mapping[ServiceClass, Collection[str]]) -> None:
        """Who has work, class by class and app by app. Nobody saves up turns while there was none."""
        for qos, apps in now.items():
            turns = self._turns.setdefault(qos, _Turns())
            before = self._waiting.get(qos, ())
            if not before:
                turns.due = max(turns.due, self._served)
                turns.extra = max(turns.extra, self._extra)
            for app in apps:
                if app not in before:
                    turns.apps[app] = max(turns.apps.get(app, 0.0), turns.clock)
            # Of apps that have gone only those are remembered that have had more than their part.
            turns.apps = {a: tag for a, tag in turns.apps.items() if a in apps or tag > turns.clock}
        self._waiting = {qos: frozenset(apps) for qos, apps in now.items() if apps}

    def app_turn(self, qos: ServiceClass, app: str) -> float:
        """Orders the apps of a class, the next one first."""
        return self._turns[qos].apps[app]

    def choose(self, heads: Mapping[ServiceClass, int]) -> ServiceClass:
        """Whose turn it is of these classes; the values are the tokens that each would be served."""
        due = [qos for qos in heads if self._turns[qos].due <= self._served]
        if due:
            return min(due, key=lambda q: (self._turns[q].due + heads[q] / q.share, -q.priority, q.name))
        return min(heads, key=lambda q: (-q.priority, self._turns[q].extra, q.name))

    def may_borrow(self, qos: ServiceClass, most: float) -> bool:
        """Whether it may fill a batch in which somebody had a turn and did not fit: while it is less than
        a batch of `most` tokens ahead of its share, if that somebody was due."""
        if not self._somebody_due():
            return True
        return (self._turns[qos].due - self._served) * qos.share < most

    def charge(self, qos: ServiceClass, app: str, tokens: int) -> None:
        """It has been served that much."""
        turns = self._turns[qos]
        # What fills a batch while another class is due is no leftover, and is paid for.
        if turns.due <= self._served or self._somebody_due():
            turns.due += tokens / qos.share
        else:
            self._extra = max(self._extra, turns.extra)
            turns.extra += tokens / qos.share
        self._served += tokens
        # An app that has gone may be charged still, for what it turned out to cost.
        start = turns.apps.get(app, turns.clock)
        turns.clock = max(turns.clock, start)
        turns.apps[app] = start + tokens

    def until(
        self,
        qos: ServiceClass,
        own: float,
        others: Mapping[ServiceClass, float],
        demand: Mapping[ServiceClass, float],
    ) -> float:
        """Tokens served of all classes until `own` tokens of class `qos` are, as `choose` would have it.

        `others` is what waits of the other classes, in tokens; `demand` what comes in of each, as a
        part of all that can be served. A fluid model: true within an item of each class.
        """
        left = {q: float(tokens) for q, tokens in others.items() if tokens > 0 and q != qos}
        left[qos] = own
        now = 0.0
        while True:
            owed = {q: self._owed_in(q) - now for q in left}
            rates = _rates(left, demand, {q for q in left if owed[q] <= 0})
            ends = [left[q] / rates[q] for q in left if rates[q] > 0]
            step = min([*ends, *(wait for wait in owed.values() if wait > 0)])
            if rates[qos] > 0 and left[qos] <= rates[qos] * step * (1 + 1e-9):
                return now + left[qos] / rates[qos]
            now += step
            left = {q: rest for q, tokens in left.items() if (rest := tokens - rates[q] * step) > 1e-6}

    def _somebody_due(self) -> bool:
        return any(self._turns[qos].due <= self._served for qos in self._waiting)

    def _owed_in(self, qos: ServiceClass) -> float:
        """Tokens of all classes until it is due; a class without work is due at once."""
        turns = self._turns.get(qos)
        return 0.0 if turns is None or qos not in self._waiting else turns.due - self._served


def _rates(
    left: Mapping[ServiceClass, float], demand: Mapping[ServiceClass, float], due: Collection[ServiceClass]
) -> dict[ServiceClass, float]:
    """How the next tokens are divided between the classes that have work, in parts of 1."""
    rates = {q: q.share if q in due else 0.0 for q in left}
    # Who has nothing waiting takes what keeps coming in.
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
