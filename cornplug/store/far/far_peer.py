"""One far store as used by the daemon's loop: its threads, a circuit breaker, and the keys of its entries.

    look_up(keys) ──> one lookup at a time, with all keys queued since ──> on_found(peer, keys), on_done()
    fetch(key)    ──> the entry's record, with its head opened
    offer(key)    ──> queue ──> sealed and put, unless the store has the record
    delete(key)   ──> queue ──> the record is deleted
    forget(key)   ──> the record is no longer read

At first, a far store is off: only probes are sent, which check whether it responds. A lookup or a read that
fails or misses its deadline turns the store off again. The pause before the next probe grows with each
failure. Requests never wait for a probe.

Writes and deletions have their own pauses, because a store that is full, or that rejects them, still serves
reads. A failed write is retried after the pause, if its entry is still in memory. A deletion is retried until
it succeeds.

A far store may lose records by a restart or by eviction. When an entry in memory is read, the peer checks
whether the far store still has the record, at most once in `CONFIRM_INTERVAL_S` and after each failure. A
lost record is written again.
"""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from cornplug.store.connection import CircuitBreaker
from cornplug.store.disk.disk_workers import DiskFailure, DiskWorkers
from cornplug.store.disk.record_format import FarRecord, FarSealer
from cornplug.store.far.far_lookup_queue import FarLookupQueue, RecentKeys, pop_first
from cornplug.store.far.open_far import LOOKUP_TIMEOUT_S, TRANSFER_TIMEOUT_S, FarFailure, FarStore
from cornplug.store.store_stats import FarStat

_BREAKER_DEADLINE_S: Final = 1.0
"""Deadline that is passed to the circuit breakers, which count failures by deadline. Each kind of call has
its own circuit breaker, so all of them can use this value."""
_log = logging.getLogger("cornplug.store")
ABSENT_TTL_S: Final = 1.0
"""Seconds for which a key's absence is remembered."""
CONFIRM_INTERVAL_S: Final = 60.0
"""Minimum time in seconds between two checks of whether the far store still has the record of an entry in
memory."""
MAX_KNOWN: Final = 1 << 17
"""Maximum number of keys that are remembered as stored in the far store."""
MAX_QUEUED: Final = 1 << 12
"""Maximum number of entries that wait to be written. If there are more, new entries are dropped."""
_MAX_WRITES: Final = 2
_DELETE_BATCH: Final = 64
"""Maximum number of records that one call deletes."""
_JOIN_TIMEOUT_S: Final = 0.2
T = TypeVar("T")
WriteFunction = Callable[[FarStore, bool], tuple[str, int]]
"""Function that seals an entry and puts it into the far store. If the flag is set, it replaces an existing
record. It returns the outcome and the number of bytes written."""


class CallHealth:
    """Health of the reads, writes or deletions of one far store. Used only by the daemon's loop.

    Reads, writes and deletions fail separately, because a store that is full, or rejects this host's writes,
    still serves reads.

    Args:
        label: Name of the far store in log lines.
        failure_phrase: Verb phrase for the log line when calls begin to fail, such as "is not used for now".
        success_phrase: Verb phrase for the log line when calls succeed again, such as "responds".
    """

    def __init__(self, label: str, *, failure_phrase: str, success_phrase: str) -> None:
        self._label, self._failure_phrase, self._success_phrase = label, failure_phrase, success_phrase
        self._breaker = CircuitBreaker()
        self.is_healthy: bool | None = None
        """Whether the last call succeeded. None before the first call."""

    def record_success(self) -> bool:
        """Record a successful call. Return whether this is the first successful call after a failure."""
        self._breaker.record_success(_BREAKER_DEADLINE_S)
        was, self.is_healthy = self.is_healthy, True
        if was is False:
            _log.info("far store %s %s again", self._label, self._success_phrase)
        return was is False

    def record_failure(self, why: str) -> None:
        """Record a call that failed, or whose reply is late."""
        if self.is_healthy is not False:
            _log.warning("far store %s %s: %s", self._label, self._failure_phrase, why)
        self.is_healthy = False
        self._breaker.record_failure(_BREAKER_DEADLINE_S, time.monotonic())

    def must_pause(self, now_s: float) -> bool:
        """Return whether calls must still pause after a failure."""
        return self._breaker.is_open(_BREAKER_DEADLINE_S, now_s)


@dataclass(slots=True)
class _OpenWrite:
    """Record that is being written."""

    replaces_deleted: bool
    """Whether the write replaces a record that is to be deleted."""
    is_deleted: bool = False
    """Whether the entry was deleted since the write began."""


class FarPeer:
    """State of one far store. Used only by the daemon's loop.

    Args:
        on_found: Function that is called with this peer and the keys that a lookup has found.
    """

    def __init__(
        self,
        label: str,
        store: FarStore,
        sealer: FarSealer,
        on_found: Callable[[FarPeer, Sequence[bytes]], None],
    ) -> None:
        self.label = label
        self._store, self._sealer, self._on_found = store, sealer, on_found
        self._transfer_workers = DiskWorkers(name="cornplug-far")
        self._lookup_worker = DiskWorkers(name="cornplug-far", readers=0)
        self._read_health = CallHealth(label, failure_phrase="is not used for now", success_phrase="responds")
        self._write_health = CallHealth(
            label, failure_phrase="is not written for now", success_phrase="accepts records"
        )
        self._delete_health = CallHealth(
            label, failure_phrase="deletes no records for now", success_phrase="deletes records"
        )
        self._lookup_running = False
        self._calls: dict[object, tuple[CallHealth, float, float]] = {}
        """Calls in progress, as tuples of (health of this kind of call, start, deadline in seconds)."""
        self._lookups = FarLookupQueue()
        self._absent = RecentKeys(ttl_s=ABSENT_TTL_S, max_keys=1 << 16)
        self._known: OrderedDict[bytes, float] = OrderedDict()
        """Time at which the far store last had an entry's record, by the entry's key."""
        self._recovered_s = 0.0
        """Time at which the far store responded again after a failure. The far store may have restarted
        empty."""
        self._unusable: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose record in the far store is damaged or has ended. Such records are not read, and will be
        overwritten."""
        self._to_delete: OrderedDict[bytes, None] = OrderedDict()
        """Keys whose record in the far store is to be deleted."""
        self._delete_running = False
        """Whether a deletion is in progress."""
        self._queue: OrderedDict[bytes, None] = OrderedDict()
        self._writing: dict[bytes, _OpenWrite] = {}
        self._lookup_counts: Counter[str] = Counter()
        self.read_counts: Counter[str] = Counter()
        self._write_counts: Counter[str] = Counter()
        self._read_bytes = self._written_bytes = 0

    @property
    def wakeup_sources(self) -> Sequence[DiskWorkers]:
        """Descriptors that are readable when `step` has work."""
        return self._transfer_workers, self._lookup_worker

    @property
    def is_up(self) -> bool:
        """Whether the far store responds. If not, only probes are sent."""
        return self._read_health.is_healthy is True

    def was_stored(self, key: bytes) -> bool:
        """Return whether the far store had this entry at the last lookup or write, even if that was before a
        failure."""
        return key in self._known

    def is_stored(self, key: bytes) -> bool:
        """Return whether the far store is known to have had this entry since its last failure."""
        return self._known.get(key, -1.0) >= self._recovered_s

    def look_up(self, keys: Sequence[bytes], on_done: Callable[[], None]) -> None:
        """Look up these entries, unless they were looked up recently. `on_done` is called when the lookup is
        complete or abandoned, or immediately if no lookup is needed."""
        now_s = time.monotonic()
        for key in keys if self.is_up else ():
            if key in self._lookups or key in self._unusable or self._absent.is_recent(key, now_s):
                continue
            if not self._lookups.add(key):
                self._lookup_counts["dropped"] += 1
        self._lookups.notify_when_done(on_done)

    def fetch(self, key: bytes, on_done: Callable[[FarRecord | DiskFailure | None], None]) -> None:
        """Read an entry's record and pass it to `on_done`. Passes None if the far store does not have the
        record."""
        self._transfer_workers.read(
            self._track_call(
                self._read_health, functools.partial(self._read_record, key), TRANSFER_TIMEOUT_S
            ),
            functools.partial(self._on_fetched, on_done),
        )

    def run_on_reader(self, work: Callable[[], bool], on_done: Callable[[bool | DiskFailure], None]) -> None:
        """Run `work`, which opens a record into reserved memory, on a reader's thread."""
        self._transfer_workers.read(work, on_done)

    def offer(self, key: bytes) -> None:
        """Queue an entry in memory for writing, unless the far store is known to have the entry."""
        if key in self._queue or key in self._writing or (key in self._known and key not in self._unusable):
            return
        if len(self._queue) < MAX_QUEUED:
            self._queue[key] = None
        else:
            self._write_counts["dropped"] += 1

    def ensure_stored(self, key: bytes, payload_bytes: int) -> None:
        """Handle a read of an entry in memory. If the far store has no record of the entry, or has lost it,
        the entry is written."""
        seen_s = self._known.get(key)
        if seen_s is None:
            if payload_bytes <= self._store.max_bytes:
                self.offer(key)
            return
        # If more keys are queued than one lookup can have, clients' lookups would be delayed. A later read of
        # the entry tries again.
        may_ask = self.is_up and len(self._lookups) < self._store.max_names and key not in self._lookups
        if may_ask and seen_s < max(self._recovered_s, time.monotonic() - CONFIRM_INTERVAL_S):
            self._lookups.add(key)

    def delete(self, key: bytes) -> None:
        """Stop reading this entry from the far store until the entry is written again, and delete its record
        if the far store is known to have it."""
        if key in self._known or key in self._writing:
            _put_bounded(self._to_delete, key, None)
        self.forget(key, until_rewritten=True)

    def forget(self, key: bytes, *, until_rewritten: bool) -> None:
        """Stop reading this entry from the far store until a lookup finds it again, or with
        `until_rewritten`, until the entry is written again."""
        if key in self._writing:
            self._writing[key].is_deleted = True
        self._known.pop(key, None)
        self._queue.pop(key, None)
        if until_rewritten:
            _put_bounded(self._unusable, key, None)

    def step(self, make_write: Callable[[bytes], WriteFunction | None]) -> None:
        """Process the results of the threads, and start more work. `make_write` returns the function that
        writes the entry of a key, or None if the entry has left memory."""
        self._transfer_workers.collect()
        self._lookup_worker.collect()
        now_s = time.monotonic()
        for health, began_s, deadline_s in self._calls.copy().values():
            if now_s - began_s > deadline_s:
                health.record_failure("no reply in time")
        if not self.is_up:
            self._lookups.clear()
            self._probe(now_s)
            return
        if self._lookups and not self._lookup_running:
            self._start_lookup()
        if self._to_delete and not self._delete_running and not self._delete_health.must_pause(now_s):
            self._start_delete()
        most = 1 if self._write_health.is_healthy is False else _MAX_WRITES
        while self._queue and len(self._writing) < most and not self._write_health.must_pause(now_s):
            key, _ = self._queue.popitem(last=False)
            work = make_write(key)
            if work is None:
                self._write_counts["gone"] += 1
                continue
            # If the new record replaces a record that is to be deleted, the deletion must not delete the new
            # record.
            ended = key in self._to_delete
            self._to_delete.pop(key, None)
            self._writing[key] = _OpenWrite(replaces_deleted=ended)
            job = functools.partial(work, self._store, ended or key in self._unusable)
            timed = self._track_call(self._write_health, job, TRANSFER_TIMEOUT_S + LOOKUP_TIMEOUT_S)
            self._transfer_workers.write(timed, functools.partial(self._on_written, key))

    def stat(self) -> FarStat:
        """Return a snapshot of the statistics."""
        queued = len(self._queue) + len(self._writing)
        return FarStat(
            self.is_up, queued, dict(self._lookup_counts), dict(self.read_counts), dict(self._write_counts),
            read_bytes=self._read_bytes, written_bytes=self._written_bytes,
        )  # fmt: skip

    def close(self) -> None:
        """Close the store. Waiting entries are not written."""
        self._queue.clear()
        for workers in self.wakeup_sources:
            workers.close(within_s=_JOIN_TIMEOUT_S)
        self._store.close()

    def _track_call(self, health: CallHealth, work: Callable[[], T], deadline_s: float) -> Callable[[], T]:
        """Return a function that runs `work`, and that registers the call for `step` while it runs."""

        def job() -> T:
            call = object()
            self._calls[call] = (health, time.monotonic(), deadline_s)
            try:
                return work()
            finally:
                del self._calls[call]

        return job

    def _start_lookup(self) -> None:
        keys = self._lookups.take_batch(self._store.max_names)
        self._lookup_running = True
        names = [self._sealer.record_name(key) for key in keys]
        work = functools.partial(self._store.exists, names)
        self._lookup_worker.write(
            self._track_call(self._read_health, work, LOOKUP_TIMEOUT_S),
            functools.partial(self._on_lookup_done, keys),
        )

    def _start_delete(self) -> None:
        """Delete records on the writer's thread, after the queued writes of these entries and before new
        writes."""
        keys = pop_first(self._to_delete, _DELETE_BATCH)
        self._delete_running = True
        work = functools.partial(self._store.delete, [self._sealer.record_name(key) for key in keys])
        timed = self._track_call(self._delete_health, work, TRANSFER_TIMEOUT_S)
        self._transfer_workers.write(timed, functools.partial(self._on_deleted, keys))

    def _on_deleted(self, keys: Sequence[bytes], result: DiskFailure | None) -> None:
        self._delete_running = False
        if result is None:
            self._delete_health.record_success()
            return
        self._delete_health.record_failure(str(result))
        for key in keys:
            if key in self._writing:
                self._writing[key].replaces_deleted = True
            else:
                _put_bounded(self._to_delete, key, None)

    def _on_lookup_done(self, keys: Sequence[bytes], result: list[bool] | DiskFailure) -> None:
        self._lookup_running = False
        if not isinstance(result, list):
            self._lookup_counts["error"] += len(keys)
            self._read_health.record_failure(str(result))
            self._lookups.finish_batch()
            return
        self._record_response()
        found = [key for key, there in zip(keys, result, strict=True) if there]
        self._lookup_counts["found"] += len(found)
        self._lookup_counts["absent"] += len(keys) - len(found)
        absent = [key for key, there in zip(keys, result, strict=True) if not there]
        self._absent.add(absent, time.monotonic())
        for key in absent:
            if self._known.pop(key, None) is not None:
                self.offer(key)
        for key in found:
            self._remember_known(key)
        self._on_found(self, found)
        self._lookups.finish_batch()

    def _read_record(self, key: bytes) -> FarRecord | None:
        """Read and open a record. Runs on a worker thread."""
        record = self._store.get(self._sealer.record_name(key))
        if record is None:
            return None
        self._read_bytes += len(record)
        return self._sealer.open(key, record)

    def _on_fetched(
        self,
        on_done: Callable[[FarRecord | DiskFailure | None], None],
        result: FarRecord | DiskFailure | None,
    ) -> None:
        if isinstance(result, FarFailure):
            self._read_health.record_failure(str(result))
        else:
            self._record_response()
        on_done(result)

    def _on_written(self, key: bytes, result: tuple[str, int] | DiskFailure) -> None:
        write = self._writing.pop(key)
        if not isinstance(result, tuple):
            outcome, size_bytes = "error", 0
            self._write_health.record_failure(str(result))
            self.offer(key)
        else:
            outcome, size_bytes = result
        self._write_counts[outcome] += 1
        self._written_bytes += size_bytes
        if write.replaces_deleted and outcome != "written":
            _put_bounded(self._to_delete, key, None)
        if outcome not in ("written", "present"):
            return
        self._write_health.record_success()
        if write.is_deleted or key in self._to_delete:
            # This record is deleted next. The key may have a new entry, which has to be written.
            self.offer(key)
            return
        self._absent.forget(key)
        self._unusable.pop(key, None)
        self._remember_known(key)

    def _remember_known(self, key: bytes) -> None:
        _put_bounded(self._known, key, time.monotonic())

    def _record_response(self) -> None:
        if self._read_health.record_success():
            self._recovered_s = time.monotonic()

    def _probe(self, now_s: float) -> None:
        """Look up a random name when the pause after a failure is over."""
        if self._lookup_running or self._read_health.must_pause(now_s):
            return
        self._lookup_running = True
        work = functools.partial(self._store.exists, [self._sealer.record_name(secrets.token_bytes(32))])
        self._lookup_worker.write(
            self._track_call(self._read_health, work, LOOKUP_TIMEOUT_S), self._on_probe_done
        )

    def _on_probe_done(self, result: list[bool] | DiskFailure) -> None:
        self._lookup_running = False
        if isinstance(result, list):
            self._record_response()
        else:
            self._read_health.record_failure(str(result))


def _put_bounded(keys: OrderedDict[bytes, T], key: bytes, value: T) -> None:
    keys[key] = value
    keys.move_to_end(key)
    while len(keys) > MAX_KNOWN:
        keys.popitem(last=False)
