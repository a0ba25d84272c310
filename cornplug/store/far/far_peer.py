"""One far store as used by the daemon's loop: its threads, a circuit breaker, and the keys of its entries.

    ask(keys)  ──> one lookup at a time, with all keys queued since ──> found(peer, keys), over()
    fetch(key) ──> the entry's record, with its head opened
    offer(key) ──> queue ──> sealed and put, unless the store has the record
    forget(key) ─> the record is deleted, if the entry was deleted

At first, a far store is off: only probes are sent, which check whether it responds. A lookup or a read that
fails or misses its deadline turns the store off again. The pause before the next probe grows with each
failure. Requests never wait for a probe.

Writes and deletions have their own pauses, because a store that is full, or that rejects them, still serves
reads. A failed write is retried after the pause, if its entry is still in memory. A deletion is retried until
it succeeds.

A far store may lose records by a restart or by eviction. When an entry in memory is read, the peer checks
whether the far store still has the record, at most once in `CONFIRM_S` and after each failure. A lost record
is written again.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from cornplug.store.connection import CircuitBreaker
from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers
from cornplug.store.far.far_questions import FarQuestions, taken
from cornplug.store.far.far_record import FarRecord, FarSealer
from cornplug.store.far.open_far import ASK_S, MOVE_S, FarFailure, FarStore
from cornplug.store.store_stats import FarStat

_KIND_S: Final = 1.0
"""Deadline that is passed to the circuit breakers, which count failures by deadline. Each kind of call has
its own circuit breaker, so all of them can use this value."""
_log = logging.getLogger("cornplug.store")
ABSENT_S: Final = 1.0
"""Seconds for which a key's absence is remembered."""
CONFIRM_S: Final = 60.0
"""Minimum time in seconds between two checks of whether the far store still has the record of an entry in
memory."""
MOST_KNOWN: Final = 1 << 17
"""Maximum number of keys that are remembered as stored in the far store."""
MOST_QUEUED: Final = 1 << 12
"""Maximum number of entries that wait to be written. If there are more, new entries are dropped."""
_WRITING: Final = 2
_DELETED_AT_ONCE: Final = 64
"""Maximum number of records that one call deletes."""
_END_S: Final = 0.2
T = TypeVar("T")
Write = Callable[[FarStore, bool], tuple[str, int]]
"""Function that seals an entry and puts it into the far store. If the flag is set, it replaces an existing
record. It returns the outcome and the number of bytes written."""


class RecentKeys:
    """Set of the `most` newest keys, each of which is remembered for `seconds`. Not thread-safe."""

    def __init__(self, *, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def holds(self, key: bytes, now_s: float) -> bool:
        """Return whether a key is recent."""
        return self._until_s.get(key, now_s) > now_s

    def note(self, keys: Iterable[bytes], now_s: float) -> None:
        """Mark these keys as recent."""
        for key in keys:
            self._until_s[key] = now_s + self._seconds
            self._until_s.move_to_end(key)
        while self._until_s and (
            len(self._until_s) > self._most or next(iter(self._until_s.values())) <= now_s
        ):
            self._until_s.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Remove a key."""
        self._until_s.pop(key, None)


class CallHealth:
    """Health of the reads, writes or deletions of one far store. Used only by the daemon's loop.

    Reads, writes and deletions fail separately, because a store that is full, or rejects this host's writes,
    still serves reads.

    Args:
        label: Name of the far store in log lines.
        failing: Verb phrase for the log line when calls begin to fail, such as "is not used for now".
        working: Verb phrase for the log line when calls succeed again, such as "responds".
    """

    def __init__(self, label: str, *, failing: str, working: str) -> None:
        self._label, self._failing, self._working = label, failing, working
        self._breaker = CircuitBreaker()
        self.state: bool | None = None
        """Whether the last call succeeded. None before the first call."""

    def succeeded(self) -> bool:
        """Record a successful call. Return whether this is the first successful call after a failure."""
        self._breaker.answered(_KIND_S)
        was, self.state = self.state, True
        if was is False:
            _log.info("far store %s %s again", self._label, self._working)
        return was is False

    def failed(self, why: str) -> None:
        """Record a call that failed, or whose reply is late."""
        if self.state is not False:
            _log.warning("far store %s %s: %s", self._label, self._failing, why)
        self.state = False
        self._breaker.missed(_KIND_S, time.monotonic())

    def refuses(self, now_s: float) -> bool:
        """Return whether calls must still pause after a failure."""
        return self._breaker.refuses(_KIND_S, now_s)


@dataclass(slots=True)
class _OpenWrite:
    """Write of a record in progress."""

    replaces_ended: bool
    """Whether the write replaces a record that is to be deleted."""
    ended: bool = False
    """Whether the entry was deleted since the write began."""


class FarPeer:
    """State of one far store. Used only by the daemon's loop.

    Args:
        found: Function that is called with this peer and the keys that a lookup has found.
    """

    def __init__(
        self,
        label: str,
        store: FarStore,
        sealer: FarSealer,
        found: Callable[[FarPeer, Sequence[bytes]], None],
    ) -> None:
        self.label = label
        self._store, self._sealer, self._found = store, sealer, found
        self._mover = DiskWorkers(name="cornplug-far")
        self._asker = DiskWorkers(name="cornplug-far", readers=0)
        self._reading = CallHealth(label, failing="is not used for now", working="responds")
        self._putting = CallHealth(label, failing="is not written for now", working="accepts records")
        self._deleting = CallHealth(label, failing="deletes no records for now", working="deletes records")
        self._asking = False
        self._calls: dict[object, tuple[CallHealth, float, float]] = {}
        """Calls in progress, as tuples of (health of this kind of call, start, deadline in seconds)."""
        self._questions = FarQuestions()
        self._absent = RecentKeys(seconds=ABSENT_S, most=1 << 16)
        self._known: OrderedDict[bytes, float] = OrderedDict()
        """Time at which the far store last had an entry's record, by the entry's key."""
        self._back_s = 0.0
        """Time at which the far store responded again after a failure. The far store may have restarted
        empty."""
        self._shunned: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose record in the far store is damaged or has ended. Such records are not read, and will be
        overwritten."""
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose record in the far store is to be deleted."""
        self._delete_open = False
        """Whether a deletion is in progress."""
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._writing: dict[bytes, _OpenWrite] = {}
        self._asks: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._read_bytes = self._written_bytes = 0

    @property
    def pollable(self) -> Sequence[DiskWorkers]:
        """Descriptors that are readable when `step` has work."""
        return self._mover, self._asker

    @property
    def answers(self) -> bool:
        """Whether the far store responds. If not, only probes are sent."""
        return self._reading.state is True

    def knows(self, key: bytes) -> bool:
        """Return whether the far store had this entry at the last lookup or write, even if that was before a
        failure."""
        return key in self._known

    def has(self, key: bytes) -> bool:
        """Return whether the far store is known to have had this entry since its last failure."""
        return self._known.get(key, -1.0) >= self._back_s

    def ask(self, keys: Sequence[bytes], over: Callable[[], None]) -> None:
        """Look up these entries, unless they were looked up recently. `over` is called when the lookup is
        complete or abandoned, or immediately if no lookup is needed."""
        now_s = time.monotonic()
        for key in keys if self.answers else ():
            if key in self._questions or key in self._shunned or self._absent.holds(key, now_s):
                continue
            if not self._questions.add(key):
                self._asks["dropped"] += 1
        self._questions.tell(over)

    def fetch(self, key: bytes, done: Callable[[FarRecord | DiskFailure | None], None]) -> None:
        """Read an entry's record and pass it to `done`. Passes None if the far store does not have the
        record."""
        self._mover.read(
            self._timed(self._reading, functools.partial(self._fetch, key), MOVE_S),
            functools.partial(self._fetched, done),
        )

    def open_into(self, work: Callable[[], bool], done: Callable[[bool | DiskFailure], None]) -> None:
        """Run `work`, which opens a record into reserved memory, on a reader's thread."""
        self._mover.read(work, done)

    def offer(self, key: bytes) -> None:
        """Queue an entry in memory for writing, unless the far store is known to have the entry."""
        if key in self._queue or key in self._writing or (key in self._known and key not in self._shunned):
            return
        if len(self._queue) < MOST_QUEUED:
            self._queue[key] = None
        else:
            self._writes["dropped"] += 1

    def confirm(self, key: bytes, payload_bytes: int) -> None:
        """Handle a read of an entry in memory. If the far store has no record of the entry, or has lost it,
        the entry is written."""
        seen_s = self._known.get(key)
        if seen_s is None:
            if payload_bytes <= self._store.most_bytes:
                self.offer(key)
            return
        # If more keys are queued than one lookup can have, clients' lookups would be delayed. A later read of
        # the entry tries again.
        may_ask = (
            self.answers and len(self._questions) < self._store.most_names and key not in self._questions
        )
        if may_ask and seen_s < max(self._back_s, time.monotonic() - CONFIRM_S):
            self._questions.add(key)

    def forget(self, key: bytes, *, shun: bool, delete: bool = False) -> None:
        """Stop reading this entry from the far store until a lookup finds it again, or with `shun`, until the
        entry is written again.

        Args:
            delete: Whether to delete the entry's record, if the far store is known to have it.
        """
        if delete and (key in self._known or key in self._writing):
            _bounded(self._ended, key, None)
        if key in self._writing:
            self._writing[key].ended = True
        self._known.pop(key, None)
        self._queue.pop(key, None)
        if shun:
            _bounded(self._shunned, key, None)

    def step(self, write: Callable[[bytes], Write | None]) -> None:
        """Process the results of the threads, and start more work. `write` returns the function that writes
        the entry of a key, or None if the entry has left memory."""
        self._mover.collect()
        self._asker.collect()
        now_s = time.monotonic()
        for health, began_s, deadline_s in self._calls.copy().values():
            if now_s - began_s > deadline_s:
                health.failed("no reply in time")
        if not self.answers:
            self._questions.clear()
            self._probe(now_s)
            return
        if self._questions and not self._asking:
            self._ask_some()
        if self._ended and not self._delete_open and not self._deleting.refuses(now_s):
            self._delete_some()
        most = 1 if self._putting.state is False else _WRITING
        while self._queue and len(self._writing) < most and not self._putting.refuses(now_s):
            key, _ = self._queue.popitem(last=False)
            work = write(key)
            if work is None:
                self._writes["gone"] += 1
                continue
            # If the new record replaces a record that is to be deleted, the deletion must not delete the new
            # record.
            ended = key in self._ended
            self._ended.pop(key, None)
            self._writing[key] = _OpenWrite(replaces_ended=ended)
            job = functools.partial(work, self._store, ended or key in self._shunned)
            timed = self._timed(self._putting, job, MOVE_S + ASK_S)
            self._mover.write(timed, functools.partial(self._written, key))

    def stat(self) -> FarStat:
        """Return a snapshot of the statistics."""
        queued = len(self._queue) + len(self._writing)
        return FarStat(
            self.answers, queued, dict(self._asks), dict(self.reads), dict(self._writes),
            read_bytes=self._read_bytes, written_bytes=self._written_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """Close the store. Waiting entries are not written."""
        self._queue.clear()
        for workers in self.pollable:
            workers.close(within_s=_END_S)
        self._store.close()

    def _timed(self, health: CallHealth, work: Callable[[], T], deadline_s: float) -> Callable[[], T]:
        """Return a function that runs `work`, and that registers the call for `step` while it runs."""

        def job() -> T:
            call = object()
            self._calls[call] = (health, time.monotonic(), deadline_s)
            try:
                return work()
            finally:
                del self._calls[call]

        return job

    def _ask_some(self) -> None:
        keys = self._questions.take(self._store.most_names)
        self._asking = True
        names = [self._sealer.name(key) for key in keys]
        work = functools.partial(self._store.exists, names)
        self._asker.write(self._timed(self._reading, work, ASK_S), functools.partial(self._asked, keys))

    def _delete_some(self) -> None:
        """Delete records on the writer's thread, after the queued writes of these entries and before new
        writes."""
        keys = taken(self._ended, _DELETED_AT_ONCE)
        self._delete_open = True
        work = functools.partial(self._store.delete, [self._sealer.name(key) for key in keys])
        timed = self._timed(self._deleting, work, MOVE_S)
        self._mover.write(timed, functools.partial(self._deleted, keys))

    def _deleted(self, keys: Sequence[bytes], result: DiskFailure | None) -> None:
        self._delete_open = False
        if result is None:
            self._deleting.succeeded()
            return
        self._deleting.failed(str(result))
        for key in keys:
            if key in self._writing:
                self._writing[key].replaces_ended = True
            else:
                _bounded(self._ended, key, None)

    def _asked(self, keys: Sequence[bytes], result: list[bool] | DiskFailure) -> None:
        self._asking = False
        if not isinstance(result, list):
            self._asks["error"] += len(keys)
            self._reading.failed(str(result))
            self._questions.end()
            return
        self._answered()
        found = [key for key, there in zip(keys, result, strict=True) if there]
        self._asks["found"] += len(found)
        self._asks["absent"] += len(keys) - len(found)
        absent = [key for key, there in zip(keys, result, strict=True) if not there]
        self._absent.note(absent, time.monotonic())
        for key in absent:
            if self._known.pop(key, None) is not None:
                self.offer(key)
        for key in found:
            self._note_known(key)
        self._found(self, found)
        self._questions.end()

    def _fetch(self, key: bytes) -> FarRecord | None:
        """Read and open a record. Runs on a worker thread."""
        record = self._store.get(self._sealer.name(key))
        if record is None:
            return None
        self._read_bytes += len(record)
        return self._sealer.open(key, record)

    def _fetched(
        self, done: Callable[[FarRecord | DiskFailure | None], None], result: FarRecord | DiskFailure | None
    ) -> None:
        if isinstance(result, FarFailure):
            self._reading.failed(str(result))
        else:
            self._answered()
        done(result)

    def _written(self, key: bytes, result: tuple[str, int] | DiskFailure) -> None:
        write = self._writing.pop(key)
        if not isinstance(result, tuple):
            outcome, size_bytes = "error", 0
            self._putting.failed(str(result))
            self.offer(key)
        else:
            outcome, size_bytes = result
        self._writes[outcome] += 1
        self._written_bytes += size_bytes
        if write.replaces_ended and outcome != "written":
            _bounded(self._ended, key, None)
        if outcome not in ("written", "present"):
            return
        self._putting.succeeded()
        if write.ended or key in self._ended:
            # This record is deleted next. The key may have a new entry, which has to be written.
            self.offer(key)
            return
        self._absent.forget(key)
        self._shunned.pop(key, None)
        self._note_known(key)

    def _note_known(self, key: bytes) -> None:
        _bounded(self._known, key, time.monotonic())

    def _answered(self) -> None:
        if self._reading.succeeded():
            self._back_s = time.monotonic()

    def _probe(self, now_s: float) -> None:
        """Look up a random name when the pause after a failure is over."""
        if self._asking or self._reading.refuses(now_s):
            return
        self._asking = True
        work = functools.partial(self._store.exists, [self._sealer.name(secrets.token_bytes(32))])
        self._asker.write(self._timed(self._reading, work, ASK_S), self._probed)

    def _probed(self, result: list[bool] | DiskFailure) -> None:
        self._asking = False
        if isinstance(result, list):
            self._answered()
        else:
            self._reading.failed(str(result))


def _bounded(keys: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    keys[key] = value
    keys.move_to_end(key)
    while len(keys) > MOST_KNOWN:
        keys.popitem(last=False)
