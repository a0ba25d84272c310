"""The figures of a daemon for `/metrics`: copies of its counts, and the seconds that its answers take."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Final

import msgspec

from cornplug.store import messages
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.store_counters import TimeHistogram
from cornplug.store.stats.store_stats import StoreStat

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
