"""Counts of one store by namespace: reads, reservations, removals, and ages of evicted entries.

The counts begin when the store starts. Each call of the index increments one or two counters. `stat` reads
the counts. `/metrics` (`metrics_endpoint.py`) reads copies of the counts, and the latency of the daemon's
replies.
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
from cornplug.store.entry_table import NotedReads
from cornplug.store.store_stats import OTHER_APPS, NamespaceStat, StoreStat

if TYPE_CHECKING:
    from cornplug.store.daemon.index import StoreIndex


MAX_STAT_APPS: Final = 256
GIVEN: Final = "given"
"""Name of the result of a successful reservation. Other results have the names in `ReserveRefusal`."""
RemovalCause = Literal["evicted", "expired", "deleted", "purged"]
AGE_BUCKETS_S: Final = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 24 * 3600.0)
REQUEST_BUCKETS_S: Final = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 0.1, 1.0)
REQUEST_NAMES: Final[Mapping[type[msgspec.Struct], str]] = {
    messages.ContainsRequest: "contains",
    messages.LeaseRequest: "lease",
    messages.ReserveRequest: "reserve",
    messages.CommitRequest: "commit",
    messages.ReleaseRequest: "release",
    messages.DeleteRequest: "delete",
    messages.StatRequest: "stat",
    messages.PurgeRequest: "purge",
}
"""Name of each kind of request in metrics."""
HistogramSamples = tuple[tuple[int, ...], float]
"""Samples as returned by `TimeHistogram.copy`."""


class CountedEntry(Protocol):
    """Fields of a stored entry that the counters use."""

    @property
    def app(self) -> str: ...


class TimeHistogram:
    """Histogram of times in seconds. `bounds_s` are the upper bounds of all buckets except the last bucket,
    which has no upper bound."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add a sample."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._sum_s += seconds

    def copy(self) -> tuple[tuple[int, ...], float]:
        """Return the number of samples in each bucket (not cumulative), and the sum of all samples in
        seconds."""
        return tuple(self._counts), self._sum_s


class NamespaceCounts:
    """Counters of one namespace since the store started."""

    def __init__(self) -> None:
        self.entries = self.hits = 0
        self.removals: Counter[str] = Counter()
        self.reservations: Counter[str] = Counter()
        self.eviction_ages = TimeHistogram(AGE_BUCKETS_S)
        """Seconds since the last use of evicted entries."""


class StoreCounters:
    """Counters of a store since it started. `namespace_of` returns the namespace of an app."""

    def __init__(self, names: Iterable[str], namespace_of: Callable[[str], str]) -> None:
        self.namespaces = {name: NamespaceCounts() for name in names}
        self.misses = self.unattributed_hits = self.found = self.absent = 0
        """`unattributed_hits` counts reads of entries that were removed before the daemon read the notes."""
        self._namespace_of = namespace_of

    @property
    def hits(self) -> int:
        """Number of hits in all namespaces."""
        return self.unattributed_hits + sum(one.hits for one in self.namespaces.values())

    @property
    def refusals(self) -> int:
        """Number of reservations rejected with FULL or TOO_LARGE."""
        return sum(
            one.reservations[refusal.value]
            for one in self.namespaces.values()
            for refusal in (ReserveRefusal.FULL, ReserveRefusal.TOO_LARGE)
        )

    def count_reads(self, entries: Sequence[CountedEntry]) -> None:
        """Count reads of entries."""
        by_app: dict[str, int] = {}
        for entry in entries:
            by_app[entry.app] = by_app.get(entry.app, 0) + 1
        for app, count in by_app.items():
            self.namespaces[self._namespace_of(app)].hits += count

    def count_noted_reads(self, reads: NotedReads, entries: Sequence[CountedEntry]) -> None:
        """Count reads and lookups that a client has noted. `entries` are the read entries that still
        exist."""
        self.count_reads(entries[: reads.hits])
        self.unattributed_hits += max(0, reads.hits - len(entries))
        self.misses += reads.misses
        self.found += reads.found
        self.absent += reads.absent

    def namespace_stats(self, policy: EvictionPolicy[E]) -> dict[str, NamespaceStat]:
        """Return copies of the counts, with the sizes from the policy."""
        return {
            name: NamespaceStat(
                policy.used_bytes(name),
                *policy.bounds_bytes(name),
                one.entries,
                one.hits,
                dict(one.reservations),
                dict(one.removals),
            )
            for name, one in self.namespaces.items()
        }

    def count_reservations(self, app: str, results: Sequence[Reservation | ReserveRefusal]) -> None:
        """Count the results of reservations."""
        counts = self.namespaces[self._namespace_of(app)].reservations
        for result in results:
            counts[result.value if isinstance(result, ReserveRefusal) else GIVEN] += 1

    def count_added(self, app: str) -> None:
        """Count a published entry."""
        self.namespaces[self._namespace_of(app)].entries += 1

    def count_removed(self, app: str, cause: RemovalCause) -> None:
        """Count a removed entry."""
        space = self.namespaces[self._namespace_of(app)]
        space.entries -= 1
        space.removals[cause] += 1

    def record_eviction_age(self, app: str, unused_s: float) -> None:
        """Record the time since the last use of an evicted entry. `count_removed` has to be called as
        well."""
        self.namespaces[self._namespace_of(app)].eviction_ages.observe(max(0.0, unused_s))


class AppBytes:
    """Bytes of each app's entries and reservations."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def charge(self, app: str, size_bytes: int) -> None:
        """Add `size_bytes` bytes to an app, or subtract them if negative."""
        self._bytes[app] = self._bytes.get(app, 0) + size_bytes
        if not self._bytes[app]:
            del self._bytes[app]

    def largest_apps(self) -> dict[str, int]:
        """Return bytes by app for the MAX_STAT_APPS largest apps. The bytes of all other apps are summed
        under OTHER_APPS."""
        largest = dict(heapq.nlargest(MAX_STAT_APPS, self._bytes.items(), key=lambda each: each[1]))
        if len(self._bytes) > MAX_STAT_APPS:
            largest[OTHER_APPS] = sum(self._bytes.values()) - sum(largest.values())
        return largest


@dataclass(frozen=True, slots=True)
class StoreSnapshot:
    """Copies of a store's counts, so that the endpoint's thread can read them while the daemon's loop
    runs."""

    stat: StoreStat
    memory_bytes: int
    clients: int
    eviction_ages: Mapping[str, HistogramSamples]
    """Ages of evicted entries in seconds, by namespace."""
    request_times: Mapping[str, HistogramSamples]
    """Time in seconds that the loop spent on each request, by kind."""


class StoreTelemetry:
    """Metrics of the daemon's loop. `publish` is called with a snapshot at each tick, unless it is None."""

    def __init__(self, index: StoreIndex, clients: Sized) -> None:
        self.publish: Callable[[StoreSnapshot], None] | None = None
        self._index, self._clients = index, clients
        self._request_times = {kind: TimeHistogram(REQUEST_BUCKETS_S) for kind in REQUEST_NAMES}

    def record_request(self, request: messages.Request, began_s: float) -> None:
        """Count a request whose handling began at `began_s` of time.perf_counter."""
        times = self._request_times.get(type(request))
        if times is not None:
            times.observe(time.perf_counter() - began_s)

    def tick(self) -> None:
        """Call `publish` with a snapshot."""
        if self.publish is not None:
            self.publish(self.snapshot())

    def snapshot(self) -> StoreSnapshot:
        """Return a snapshot of the current counts."""
        return StoreSnapshot(
            self._index.stat(),
            self._index.placement.end_bytes,
            len(self._clients),
            {name: one.eviction_ages.copy() for name, one in self._index.counters.namespaces.items()},
            {REQUEST_NAMES[kind]: times.copy() for kind, times in self._request_times.items()},
        )
