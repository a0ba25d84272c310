"""One far store as the daemon's loop uses it: its threads, a breaker, and the keys of its entries.

    ask(keys)  ──> one question at a time, of all keys asked meanwhile ──> found(peer, keys), over()
    fetch(key) ──> its record, head open
    offer(key) ──> queue ──> sealed and put, unless it has the record
    forget(key) ─> its record is deleted, where the entry was

It begins turned off. A question or a read that fails, or that is beyond its deadline, turns it off for a
pause that grows. Then a probe of its own finds out whether it answers, so that no request pays for that.
While it is off nothing else is asked of it.

Writes and deletions have pauses of their own: a store that is full, or that refuses them, still serves reads.
A write that failed is tried again after the pause, if its entry is still in memory. A deletion is tried again
until it succeeds.

A far store may lose records: it restarts empty, or evicts them. When an entry in memory is read, the store is
asked whether it still has the record, at most once in `CONFIRM_S` and after each failure. A lost record is
written again.
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

from cornplug.store.circuit_breaker import CircuitBreaker
from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers
from cornplug.store.far.far_questions import FarQuestions, taken
from cornplug.store.far.far_record import FarRecord, FarSealer
from cornplug.store.far.far_store import ASK_S, MOVE_S, FarFailure, FarStore
from cornplug.store.store_stats import FarStat

_KIND_S: Final = 1.0
"""The deadline that is passed to the breaker, which keeps its counts by deadline. Each kind of call has its
own breaker, so one value serves all."""
_log = logging.getLogger("cornplug.store")
ABSENT_S: Final = 1.0
"""How long an answer "absent" is remembered."""
CONFIRM_S: Final = 60.0
"""Time after which a read of an entry in memory has the store asked again whether it has the record."""
MOST_KNOWN: Final = 1 << 17
"""Keys of which it is remembered that the store has them."""
MOST_QUEUED: Final = 1 << 12
"""Entries that wait to be written; of more the newest are not."""
_WRITING: Final = 2
_DELETED_AT_ONCE: Final = 64
"""Records that one call deletes."""
_END_S: Final = 0.2
T = TypeVar("T")
Write = Callable[[FarStore, bool], tuple[str, int]]
"""Seals an entry and puts it there, over another record if told so: the outcome and the record's bytes."""


class RecentKeys:
    """Each key is recent for `seconds`, and the `most` newest ones only. Not thread-safe."""

    def __init__(self, *, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def holds(self, key: bytes, now_s: float) -> bool:
        """Whether a key is recent."""
        return self._until_s.get(key, now_s) > now_s

    def note(self, keys: Iterable[bytes], now_s: float) -> None:
        """These keys are recent from now on."""
        for key in keys:
            self._until_s[key] = now_s + self._seconds
            self._until_s.move_to_end(key)
        while self._until_s and (
            len(self._until_s) > self._most or next(iter(self._until_s.values())) <= now_s
        ):
            self._until_s.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """A key is recent no longer."""
        self._until_s.pop(key, None)


class CallHealth:
    """Health of the reads, writes or deletions of one far store. Used by the daemon's loop alone.

    Reads, writes and deletions fail separately: a store that is full, or that refuses this host's writes,
    still answers reads.

    Args:
        label: Name of the far store in log lines.
        failing: What the log says when calls begin to fail.
        working: What the log says when calls succeed again.
    """

    def __init__(self, label: str, *, failing: str, working: str) -> None:
        self._label, self._failing, self._working = label, failing, working
        self._breaker = CircuitBreaker()
        self.state: bool | None = None
        """Whether the last call succeeded; None before the first call."""

    def succeeded(self) -> bool:
        """Note a call that succeeded. Returns whether it is the first one after a failure."""
        self._breaker.answered(_KIND_S)
        was, self.state = self.state, True
        if was is False:
            _log.info("far store %s %s again", self._label, self._working)
        return was is False

    def failed(self, why: str) -> None:
        """Note a call that failed, or that is late."""
        if self.state is not False:
            _log.warning("far store %s %s: %s", self._label, self._failing, why)
        self.state = False
        self._breaker.missed(_KIND_S, time.monotonic())

    def refuses(self, now_s: float) -> bool:
        """Whether calls must still pause after a failure."""
        return self._breaker.refuses(_KIND_S, now_s)


@dataclass(slots=True)
class _OpenWrite:
    """One write under way."""

    replaces_ended: bool
    """Whether it is written over a record that is to be deleted."""
    ended: bool = False
    """Whether its entry was deleted since the write began."""


class FarPeer:
    """Used by the loop alone.

    Args:
        found: Gets the keys that an answer names as present.
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
        """Calls under way: (health of their kind, began, deadline in seconds)."""
        self._questions = FarQuestions()
        self._absent = RecentKeys(seconds=ABSENT_S, most=1 << 16)
        self._known: OrderedDict[bytes, float] = OrderedDict()
        """Keys whose record is there, and when that was last seen."""
        self._back_s = 0.0
        """When it answered again after a failure: it may have restarted empty."""
        self._shunned: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose record there is damaged, or was ended here: not read, and written over."""
        self._ended: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose record there is to be deleted."""
        self._delete_open = False
        """Whether a deletion is under way."""
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._writing: dict[bytes, _OpenWrite] = {}
        self._asks: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self._writes: Counter[str] = Counter()
        self._read_bytes = self._written_bytes = 0

    @property
    def pollable(self) -> Sequence[DiskWorkers]:
        """Readable when `step` has something to do."""
        return self._mover, self._asker

    @property
    def answers(self) -> bool:
        """Whether it answers. If not, nothing but a probe is asked of it."""
        return self._reading.state is True

    def knows(self, key: bytes) -> bool:
        """Whether it had this entry when that was last seen."""
        return key in self._known

    def has(self, key: bytes) -> bool:
        """Whether it had this entry since it last failed."""
        return self._known.get(key, -1.0) >= self._back_s

    def ask(self, keys: Sequence[bytes], over: Callable[[], None]) -> None:
        """Have it asked for these entries, unless it was a moment ago. `over` is called once it has answered,
        or will not: at once where it is not asked."""
        now_s = time.monotonic()
        for key in keys if self.answers else ():
            if key in self._questions or key in self._shunned or self._absent.holds(key, now_s):
                continue
            if not self._questions.add(key):
                self._asks["dropped"] += 1
        self._questions.tell(over)

    def fetch(self, key: bytes, done: Callable[[FarRecord | DiskFailure | None], None]) -> None:
        """Read a record; None where it has none."""
        self._mover.read(
            self._timed(self._reading, functools.partial(self._fetch, key), MOVE_S),
            functools.partial(self._fetched, done),
        )

    def open_into(self, work: Callable[[], bool], done: Callable[[bool | DiskFailure], None]) -> None:
        """Do `work`, which opens a record into its room, on a thread that reads."""
        self._mover.read(work, done)

    def offer(self, key: bytes) -> None:
        """An entry is in memory: it will be written."""
        if key in self._queue or key in self._writing or (key in self._known and key not in self._shunned):
            return
        if len(self._queue) < MOST_QUEUED:
            self._queue[key] = None
        else:
            self._writes["dropped"] += 1

    def confirm(self, key: bytes, payload_bytes: int) -> None:
        """Have an entry, which is in memory and was just read, written if the store lacks its record or has
        lost it."""
        seen_s = self._known.get(key)
        if seen_s is None:
            if payload_bytes <= self._store.most_bytes:
                self.offer(key)
            return
        # More of these than fit in one question would delay those of clients. A later read asks again.
        may_ask = (
            self.answers and len(self._questions) < self._store.most_names and key not in self._questions
        )
        if may_ask and seen_s < max(self._back_s, time.monotonic() - CONFIRM_S):
            self._questions.add(key)

    def forget(self, key: bytes, *, shun: bool, delete: bool = False) -> None:
        """Read this entry there no more, until it is found again; `shun`: until it is written again.

        Args:
            delete: Delete its record, if it is known to be there.
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
        """Take the results of the threads, and give them more to do. `write` makes the writing of a key."""
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
            # The new record takes the place of one that is to be deleted, which must not end the new one.
            ended = key in self._ended
            self._ended.pop(key, None)
            self._writing[key] = _OpenWrite(replaces_ended=ended)
            job = functools.partial(work, self._store, ended or key in self._shunned)
            timed = self._timed(self._putting, job, MOVE_S + ASK_S)
            self._mover.write(timed, functools.partial(self._written, key))

    def stat(self) -> FarStat:
        """A snapshot."""
        queued = len(self._queue) + len(self._writing)
        return FarStat(
            self.answers, queued, dict(self._asks), dict(self.reads), dict(self._writes),
            read_bytes=self._read_bytes, written_bytes=self._written_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """End; entries that wait are not written."""
        self._queue.clear()
        for workers in self.pollable:
            workers.close(within_s=_END_S)
        self._store.close()

    def _timed(self, health: CallHealth, work: Callable[[], T], deadline_s: float) -> Callable[[], T]:
        """`work`, seen by `step` while it is under way."""

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
        """On the thread that writes: behind the writing of the same entries, before a new one."""
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
        """On a thread."""
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
            # This record is deleted next. The key may have a new entry.
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
        """Ask for a name that it does not have, once the pause is over."""
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
