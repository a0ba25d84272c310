"""A far store in this process, whose calls fail when a test says so, and a daemon that uses it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from cornplug.store.client import PoolStore
from cornplug.store.far.open_far import FarFailure, OpenedFar
from cornplug.store.store_stats import FarStat
from cornplug.testing.store import DEADLINE_S

LABEL = "memory://far"


class MemoryFarStore:
    """Attributes:
    records: Name -> record.
    failing: Calls ("exists", "get", "put", "delete") that fail until the test removes them.
    fail_once: Calls that fail once.
    failures: Calls that failed.
    gate: Calls of `exists` wait for this event.
    questions: Number of names in each call of `exists`.
    """

    max_bytes = 64 << 20
    max_names = 64

    def __init__(self) -> None:
        self.records: dict[str, bytes] = {}
        self.failing: set[str] = set()
        self.fail_once: set[str] = set()
        self.failures: Counter[str] = Counter()
        self.gate = threading.Event()
        self.gate.set()
        self.questions: list[int] = []

    def exists(self, names: Sequence[str]) -> list[bool]:
        self.questions.append(len(names))
        self.gate.wait(30)
        self._check("exists")
        return [name in self.records for name in names]

    def get(self, name: str) -> bytes | None:
        self._check("get")
        return self.records.get(name)

    def put(self, name: str, record: bytes) -> None:
        self._check("put")
        self.records[name] = bytes(record)

    def delete(self, names: Sequence[str]) -> None:
        self._check("delete")
        for name in names:
            self.records.pop(name, None)

    def close(self) -> None:
        """Nothing is held."""

    def _check(self, call: str) -> None:
        if call in self.failing or call in self.fail_once:
            self.fail_once.discard(call)
            self.failures[call] += 1
            raise FarFailure(f"{call} failed")

    def opened(self) -> OpenedFar:
        """This far store, as a daemon gets it."""
        return OpenedFar([(LABEL, self)], b"d" * 32)


def far_of(store: PoolStore) -> FarStat:
    """Counts of the far store."""
    found: FarStat = store.stat(deadline_s=DEADLINE_S).far[LABEL]
    return found


def written(store: PoolStore, entries: int) -> bool:
    """Whether so many entries were written to the far store, and none waits."""
    far = far_of(store)
    return (far.writes.get("written", 0), far.queued) == (entries, 0)
