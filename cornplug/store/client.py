"""Client of the host's store daemon, the default store. Payloads are in shared memory.

While no daemon is running, every call raises `StoreUnavailable("store_down")` immediately, and a background
thread tries to connect (`daemon_link.py`).

`find_in_table` reads an entry from the store's table in shared memory, without a message to the daemon and
without a lease. `FarLookups` remembers absent keys that this process has looked up in far stores.

`open_store` opens the store that the setting `store.backend` selects, NAME or NAME:ADDRESS. `pool` is the
host's store. A package provides another store with an entry point in the group `cornplug.stores`. The entry
point is a callable with the arguments and result of `open_store`. It reads the address from
`config.backend`.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Final

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store import messages
from cornplug.store.arena import MappedArena
from cornplug.store.base import (
    LOCATION,
    Leases,
    LookupMiss,
    PayloadLocation,
    PurgeCount,
    PurgeRule,
    Reservation,
    ReserveRefusal,
    ReserveTerms,
    Store,
    Tier,
)
from cornplug.store.connection import DaemonConnection
from cornplug.store.daemon_link import IDLE_EXIT_S, DaemonLink, PostedCommit, PostedReserve
from cornplug.store.entry_table import ABSENT, PRESENT, UNLISTED, ClientNotes, EntryRecord, MappedEntryTable
from cornplug.store.messages import (
    check_entries,
    check_keys,
    check_meta,
    check_purge,
    check_terms,
    check_ttl,
)
from cornplug.store.store_stats import StoreStat

FAR_LOOKUP_INTERVAL_S: Final = 1.0
"""Minimum seconds between two lookups of the same key in far stores."""
FAR_LOOKUP_TIMEOUT_S: Final = 0.5
"""Maximum time in seconds that callers wait for a far-store lookup to complete. A far store must reply within
0.25 s. The wait is limited, because a later lookup may have overwritten the ticket of a completed lookup."""
_MAX_KEYS: Final = 1 << 14
_NO_LOOKUP: Final = (-math.inf, 0)
_UNLISTED_AS_PRESENT: Final = bytes.maketrans(bytes([UNLISTED]), bytes([PRESENT]))
ENTRY_POINT_GROUP: Final = "cornplug.stores"
_HOST_STORE: Final = "pool"
_UPDATE_REMEDY: Final = "Update the package that provides it."


@dataclass(frozen=True, slots=True)
class TableEntry:
    """`UnleasedEntry` that was found in the table of one connection."""

    record: EntryRecord
    payload: memoryview
    table: MappedEntryTable
    notes: ClientNotes

    @property
    def meta(self) -> bytes:
        return self.record.meta

    def confirm(self) -> bool:
        if not self.table.is_unchanged(self.record):
            return False
        self.notes.record_hit(self.record.number)
        return True


def find_in_table(
    key: bytes, arena: MappedArena, table: MappedEntryTable, notes: ClientNotes | None
) -> TableEntry | LookupMiss:
    """Return the result of `Store.find_unleased` from the table.

    Raises StoreUnavailable if the daemon has shut down.
    """
    if notes is None:
        return LookupMiss.UNKNOWN
    number = table.find_record(key)
    if number == 0:
        notes.record_miss()
        return LookupMiss.ABSENT
    record = table.read_record(number)
    if record is None or record.offset + record.size > arena.capacity_bytes:
        return LookupMiss.UNKNOWN
    return TableEntry(record, arena.bytes_at(record.offset, record.size), table, notes)


class FarLookups:
    """Keys that were most recently looked up in far stores, and the tickets of these lookups. Thread-safe.

    If several threads look up the same keys at about the same time, only one request is sent.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._lookups: OrderedDict[bytes, tuple[float, int]] = OrderedDict()

    def begin(self, keys: Sequence[bytes], now_s: float) -> tuple[list[bytes], int]:
        """Return the keys to look up now, and the ticket to wait for.

        If any key is new, the ticket is new too. The daemon completes it after all earlier lookups. Otherwise
        the ticket is that of the latest lookup of one of these keys, or 0 if that lookup began at least
        `FAR_LOOKUP_TIMEOUT_S` ago.
        """
        if os.getpid() != self._pid:
            # In a forked child, a thread of the parent may have held the lock.
            self._pid, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            asked = [self._lookups.get(key, _NO_LOOKUP) for key in keys]
            new = [
                key
                for key, (asked_s, _) in zip(keys, asked, strict=True)
                if now_s - asked_s >= FAR_LOOKUP_INTERVAL_S
            ]
            if not new:
                asked_s, ticket = max(asked, default=_NO_LOOKUP)
                return [], ticket if now_s - asked_s < FAR_LOOKUP_TIMEOUT_S else 0
            # Forked processes share the state of `random`.
            ticket = 1 + secrets.randbits(63)
            for key in new:
                self._lookups[key] = now_s, ticket
                self._lookups.move_to_end(key)
            while len(self._lookups) > _MAX_KEYS:
                self._lookups.popitem(last=False)
            return new, ticket


class PoolStore(Store):
    """Client of the daemon at `config.socket`.

    All threads share one connection, and no thread waits for the reply to another thread's request. Large
    requests are split.

    Args:
        autostart: Start a daemon if none is running. None: use `config.autostart`.
        connect_timeout_s: Maximum time that the constructor waits for a connection. None: 5 s with autostart,
            otherwise until the first attempt has ended.
        idle_exit_s: Time in seconds that a daemon started by this client keeps running without any client.

    The constructor does not fail if there is no daemon, or if the daemon rejects this client because of
    another protocol, secret or user. The reason is logged, every call raises StoreUnavailable, and the client
    keeps trying to connect.

    Raises ConfigError if the secret cannot be read.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        autostart: bool | None = None,
        connect_timeout_s: float | None = None,
        idle_exit_s: float = IDLE_EXIT_S,
    ) -> None:
        self._link = DaemonLink(
            config, autostart=autostart, connect_timeout_s=connect_timeout_s, idle_exit_s=idle_exit_s
        )
        self._far_lookups = FarLookups()

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection to a daemon."""
        self._link.ensure_thread()
        return self._link.connection is not None

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        connection = self._link.require_connection()
        mask = connection.table.contains(keys)
        if UNLISTED in mask:
            mask = self._query_unlisted(mask, keys, deadline_s)
        if connection.notes is not None:
            connection.notes.record_lookup(mask.count(PRESENT), mask.count(ABSENT))
        return mask

    def _query_unlisted(self, mask: bytes, keys: Sequence[bytes], deadline_s: float) -> bytes:
        """Complete the mask with the daemon's reply for keys that the table does not list."""
        presence = bytearray(mask)
        unlisted = [i for i, state in enumerate(mask) if state == UNLISTED]
        told = self.contains_by_message([keys[i] for i in unlisted], deadline_s=deadline_s)
        for i, state in zip(unlisted, told, strict=True):
            presence[i] = state
        return bytes(presence)

    @property
    def has_disk(self) -> bool:
        connection = self._link.connection
        return connection is not None and connection.table.has_disk

    def tiers(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        return self._tiers_with_disk(keys, lambda: self.contains(keys, deadline_s=deadline_s))

    @property
    def can_peek(self) -> bool:
        return True

    def peek(self, keys: Sequence[bytes]) -> bytes:
        return self._tiers_with_disk(
            keys, lambda: self._link.require_connection().table.contains(keys).translate(_UNLISTED_AS_PRESENT)
        )

    def _tiers_with_disk(self, keys: Sequence[bytes], look_up_memory: Callable[[], bytes]) -> bytes:
        """Return a `Tier` per key.

        The disk is checked before memory. In the other order, an entry that is recalled between the two
        checks would be missed by both checks.
        """
        table = self._link.require_connection().table
        on_disk = table.on_disk_mask(keys) if table.has_disk else b""
        mask = look_up_memory()
        if not on_disk:
            return mask
        return bytes([tier or Tier.DISK * there for tier, there in zip(mask, on_disk, strict=True)])

    def recall(self, keys: Sequence[bytes]) -> None:
        self._send_recall(keys)

    def _send_recall(self, keys: Sequence[bytes], ticket: int = 0) -> None:
        check_keys(keys)
        connection = self._link.require_connection()
        *before, last = messages.split_batches(keys, messages.MAX_KEYS)
        for some in before:
            connection.send_one_way(messages.RecallRequest(b"".join(some)))
        connection.send_one_way(messages.RecallRequest(b"".join(last), ticket))

    @property
    def is_far_up(self) -> bool:
        connection = self._link.connection
        return connection is not None and connection.table.is_far_up

    def start_far_lookup(self, keys: Sequence[bytes]) -> int:
        if not self.is_far_up:
            return 0
        new, ticket = self._far_lookups.begin(keys, time.monotonic())
        if new:
            # The daemon looks up recalled keys in the far stores if the host's store does not have them.
            self._send_recall(new, ticket)
        elif ticket and self.is_far_lookup_done(ticket):
            return 0
        return ticket

    def is_far_lookup_done(self, ticket: int) -> bool:
        connection = self._link.connection
        return connection is not None and connection.table.has_ticket(ticket)

    def contains_by_message(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """Return the same as `contains`, but from the daemon's reply instead of the table."""
        connection, end_s = self._link.require_connection(), time.monotonic() + deadline_s
        masks = []
        for some in messages.split_batches(keys, messages.MAX_LOOKUP_KEYS):
            request = messages.ContainsRequest(b"".join(some))
            masks.append(connection.call(request, messages.ContainsReply, end_s, deadline_s).mask)
        return b"".join(masks)

    def find_unleased(self, key: bytes) -> TableEntry | LookupMiss:
        check_keys([key])
        connection = self._link.require_connection()
        return find_in_table(key, connection.arena, connection.table, connection.notes)

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        check_keys(keys)
        check_ttl(ttl_s)
        connection, end_s = self._link.require_connection(), time.monotonic() + deadline_s
        found: list[Leases] = []
        at = 0
        try:
            while at < len(keys):
                some = keys[at : at + messages.MAX_KEYS]
                request = messages.LeaseRequest(b"".join(some), ttl_s)
                reply = connection.call(request, messages.LeaseReply, end_s, deadline_s)
                leases = _decode_leases(connection, some, reply)
                found.append(leases)
                at += len(leases)
        except StoreUnavailable:
            with contextlib.suppress(StoreUnavailable):
                connection.release([token for leases in found for token in leases.unique_tokens])
            raise
        return Leases.concat(connection.arena.id, found)

    def reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
    ) -> list[Reservation | ReserveRefusal]:
        return self.post_reserve(entries, terms, deadline_s=deadline_s).wait()

    def post_reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
    ) -> PostedReserve:
        """Send a `reserve` request, whose result the caller reads later."""
        check_entries(entries)
        check_terms(terms)
        return PostedReserve(self._link.require_connection(), entries, terms, deadline_s)

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        return self.post_commit(written, deadline_s=deadline_s).wait()

    def post_commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> PostedCommit:
        """Send a `commit` request, whose result the caller reads later."""
        for _, meta in written:
            check_meta(meta)
        return PostedCommit(self._link.require_connection(), written, deadline_s)

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        self._link.require_connection().release(tokens)

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        connection, end_s, dropped = self._link.require_connection(), time.monotonic() + deadline_s, 0
        for some in messages.split_batches(keys, messages.MAX_KEYS):
            request = messages.DeleteRequest(b"".join(some))
            dropped += connection.call(request, messages.DeleteReply, end_s, deadline_s).count
        return dropped

    def purge(self, rule: PurgeRule, *, deadline_s: float) -> PurgeCount:
        check_purge(rule)
        connection, begins, more = self._link.require_connection(), True, True
        entries = size_bytes = leased = writing = 0
        while more:
            request, end_s = messages.PurgeRequest(rule, begins), time.monotonic() + deadline_s
            reply = connection.call(request, messages.PurgeReply, end_s, deadline_s)
            entries, size_bytes = entries + reply.count.entries, size_bytes + reply.count.size_bytes
            leased, writing = leased + reply.count.leased, writing + reply.count.writing
            begins, more = False, reply.more
        return PurgeCount(entries, size_bytes, leased, writing)

    def stat(self, *, deadline_s: float) -> StoreStat:
        end_s = time.monotonic() + deadline_s
        return (
            self._link.require_connection()
            .call(messages.StatRequest(), messages.StatReply, end_s, deadline_s)
            .stat
        )

    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        arena = self._link.arena
        if arena is None:
            raise StoreUnavailable("the location is in another arena", reason="stale_location")
        return arena.view(location, writable=writable)

    def are_writable(self, locations: Sequence[PayloadLocation]) -> list[bool]:
        arena = self._link.arena
        return [False] * len(locations) if arena is None else arena.are_writable(locations)

    def arena_memory(self, arena_id: bytes) -> memoryview | None:
        arena = self._link.arena
        if arena is None or arena.id != arena_id:
            return None
        return arena.bytes_at(0, arena.capacity_bytes, writable=True)

    def close(self) -> None:
        self._link.close()


def is_host_store(config: StoreConfig) -> bool:
    """Return whether the settings select the host's store, which has a socket, a daemon and a secret."""
    return config.backend == _HOST_STORE


def open_store(
    config: StoreConfig, *, autostart: bool | None = None, connect_timeout_s: float | None = None
) -> Store:
    """Connect to the store selected by `store.backend`.

    Args:
        autostart: Whether to start a store if no store is running. None: use the setting.
        connect_timeout_s: Maximum seconds that this call waits for a connection. None: the store's default.

    Raises ConfigError for an unknown name or an object that is not a `Store`, and the backend's own errors
    for settings that it rejects.
    """
    if is_host_store(config):
        return PoolStore(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    name = config.backend.partition(":")[0]
    offered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in offered:
        raise ConfigError(
            "store.backend",
            f"no installed package provides a store {name!r}",
            f"Available stores: {', '.join(sorted({_HOST_STORE, *offered}))}.",
        )
    create = offered[name].load()
    if inspect.isabstract(create):
        lacks = ", ".join(sorted(create.__abstractmethods__))
        raise ConfigError("store.backend", f"store {name!r} lacks the methods {lacks}", _UPDATE_REMEDY)
    store = create(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    if not isinstance(store, Store):
        raise ConfigError(
            "store.backend", f"store {name!r} does not inherit from cornplug.store.base.Store", _UPDATE_REMEDY
        )
    return store


def _decode_leases(connection: DaemonConnection, keys: Sequence[bytes], reply: messages.LeaseReply) -> Leases:
    """Return the leases in a reply, which may cover only the first of the requested keys."""
    count = len(reply.metas)
    if not 0 < count <= len(keys) or len(reply.places) != count * LOCATION.size:
        raise StoreUnavailable("the store's reply covers too few keys", reason="store_fault")
    return Leases(connection.arena.id, keys[:count], reply.metas, reply.places, [reply.token] * count)
