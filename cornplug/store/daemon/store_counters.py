"""Counts of one store, by namespace, since it began: reads, reservations, removals, ages of evicted entries.

Pure and cheap: an increment or two for each call of the index. `stat` reads the counts. `/metrics`
(`metrics_endpoint.py`) reads copies of them, with the latency of the daemon's replies.
"""

from __future__ import annotations

import heapq
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

import msgspec

from cornplug.store import messages
from cornplug.store.base import Reservation, ReserveRefusal
from cornplug.store.daemon.eviction_policy import E, EvictionPolicy
from cornplug.store.store_stats import OTHER_APPS, NamespaceStat, StoreStat
from cornplug.store.use_notes import NotedReads

if TYPE_CHECKING:
    from cornplug.store.daemon.index import StoreIndex


STAT_APPS: Final = 256
GIVEN: Final = "given"
"""The answer to a reservation that got room; the others are values of `ReserveRefusal`."""
RemovalCause = Literal["evicted", "expired", "deleted", "purged"]
AGE_BUCKETS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
ANSWER_BUCKETS_S: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 0.1, 1.0)
REQUESTS: Final[Mapping[type[msgspec.Struct], str]] = {
    messages.ContainsRequest: "contains",
    messages.TakeLeases: "lease",
    messages.ReserveRequest: "reserve",
    messages.CommitRequest: "commit",
    messages.ReleaseRequest: "release",
    messages.DeleteRequest: "delete",
    messages.StatRequest: "stat",
    messages.PurgeRequest: "purge",
}
"""Kind of a request -> its name in metrics."""
Samples = tuple[tuple[int, ...], float]
"""As `TimeHistogram.copy` gives them."""


class CountedEntry(Protocol):
    """An entry as the counters see it."""

    @property
    def app(self) -> str: ...


class TimeHistogram:
    """Seconds in buckets with these upper bounds, and one above the last."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def note(self, seconds: float) -> None:
        """Add a sample."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def copy(self) -> tuple[tuple[int, ...], float]:
        """The samples of each bucket, not cumulated, and the sum of all in seconds."""
        return tuple(self._counts), self._sum_s


class NamespaceCounts:
    """Counts of one namespace."""

    def __init__(self) -> None:
        self.entries = self.hits = 0
        self.removals: Counter[str] = Counter()
        self.reservations: Counter[str] = Counter()
        self.ages = TimeHistogram(AGE_BUCKETS_S)
        """Of evicted entries: seconds since their last use."""


class StoreCounters:
    """Counts of a store whose apps belong to namespaces by `name_of`."""

    def __init__(self, names: Iterable[str], name_of: Callable[[str], str]) -> None:
        self.spaces = {name: NamespaceCounts() for name in names}
        self.misses = self.unplaced_hits = self.found = self.absent = 0
        """`unplaced_hits`: reads of entries that were gone when the daemon learned of them."""
        self._name_of = name_of

    @property
    def hits(self) -> int:
        """Of all namespaces."""
        return self.unplaced_hits + sum(one.hits for one in self.spaces.values())

    @property
    def refusals(self) -> int:
        """Reservations refused for want of room, or as too large."""
        return sum(
            one.reservations[refusal.value]
            for one in self.spaces.values()
            for refusal in (ReserveRefusal.FULL, ReserveRefusal.TOO_LARGE)
        )

    def read(self, entries: Sequence[CountedEntry]) -> None:
        """Entries were read."""
        by_app: dict[str, int] = {}
        for entry in entries:
            by_app[entry.app] = by_app.get(entry.app, 0) + 1
        for app, count in by_app.items():
            self.spaces[self._name_of(app)].hits += count

    def noted(self, reads: NotedReads, entries: Sequence[CountedEntry]) -> None:
        """A client noted these reads, of entries that are still there."""
        self.read(entries[: reads.hits])
        self.unplaced_hits += max(0, reads.hits - len(entries))
        self.misses += reads.misses
        self.found += reads.found
        self.absent += reads.absent

    def by_namespace(self, policy: EvictionPolicy[E]) -> dict[str, NamespaceStat]:
        """Copies of the counts, beside the sizes that the policy knows."""
        return {
            name: NamespaceStat(
                policy.used_bytes(name),
                *policy.bounds_bytes(name),
                one.entries,
                one.hits,
                dict(one.reservations),
                dict(one.removals),
            )
            for name, one in self.spaces.items()
        }

    def reserved(self, app: str, answers: Sequence[Reservation | ReserveRefusal]) -> None:
        """Reservations were answered."""
        counts = self.spaces[self._name_of(app)].reservations
        for answer in answers:
            counts[answer.value if isinstance(answer, ReserveRefusal) else GIVEN] += 1

    def added(self, app: str) -> None:
        """An entry was published."""
        self.spaces[self._name_of(app)].entries += 1

    def removed(self, app: str, cause: RemovalCause) -> None:
        """An entry is no longer in the store."""
        space = self.spaces[self._name_of(app)]
        space.entries -= 1
        space.removals[cause] += 1

    def evicted(self, app: str, unused_s: float) -> None:
        """An entry makes room for another one, so long after its last use; `removed` counts it too."""
        self.spaces[self._name_of(app)].ages.note(max(0.0, unused_s))


class AppBytes:
    """Room that entries and reservations of each app have."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def charge(self, app: str, room: int) -> None:
        """Add room that the app takes; less than 0: that it gives back."""
        self._bytes[app] = self._bytes.get(app, 0) + room
        if not self._bytes[app]:
            del self._bytes[app]

    def largest(self) -> dict[str, int]:
        """App -> bytes, of the STAT_APPS with most; all others together under OTHER_APPS."""
        largest = dict(heapq.nlargest(STAT_APPS, self._bytes.items(), key=lambda each: each[1]))
        if len(self._bytes) > STAT_APPS:
            largest[OTHER_APPS] = sum(self._bytes.values()) - sum(largest.values())
        return largest


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Copies: the loop that made them changes none of them."""

    stat: StoreStat
    memory_bytes: int
    clients: int
    ages: Mapping[str, Samples]
    """Namespace -> ages of its evicted entries."""
    answers: Mapping[str, Samples]
    """Request -> seconds of the loop that each answer took."""


class StoreTelemetry:
    """Used by the daemon's loop alone. `show` gets a snapshot at each tick; None: none is made."""

    def __init__(self, index: StoreIndex, clients: Sized) -> None:
        self.show: Callable[[StoreSnapshot], None] | None = None
        self._index, self._clients = index, clients
        self._answers = {kind: TimeHistogram(ANSWER_BUCKETS_S) for kind in REQUESTS}

    def answered(self, request: messages.Request, began_s: float) -> None:
        """Count the answer to a request that was taken up at `began_s` of time.perf_counter."""
        times = self._answers.get(type(request))
        if times is not None:
            times.note(time.perf_counter() - began_s)

    def tick(self) -> None:
        """Show the figures of now."""
        if self.show is not None:
            self.show(self.snapshot())

    def snapshot(self) -> StoreSnapshot:
        """The figures of now."""
        return StoreSnapshot(
            self._index.stat(),
            self._index.placement.end_bytes,
            len(self._clients),
            {name: one.ages.copy() for name, one in self._index.counters.spaces.items()},
            {REQUESTS[kind]: times.copy() for kind, times in self._answers.items()},
        )
