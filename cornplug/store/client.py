"""The embedded default: a client of the host's daemon, payloads in shared memory.

While there is no daemon every call raises `StoreUnavailable("store_down")` at once; a
background thread looks for one, starts one if allowed, and shares again when it is there.
No caller ever waits for a connection, except in the constructor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol, TypeVar

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.private_paths import read_secret
from cornplug.store import messages
from cornplug.store.arena import MappedArena
from cornplug.store.autostart import IDLE_EXIT_S, spawn, start_lock
from cornplug.store.base import (
    Lease,
    PayloadLocation,
    Reservation,
    ReserveRefusal,
    StoreStat,
    Unfound,
    WriterPart,
)
from cornplug.store.connection import DaemonConnection
from cornplug.store.posted import Posted, PostedCommit, PostedReserve, as_unavailable, gone
from cornplug.store.table import unleased
from cornplug.store.table.entry_table import UNLISTED
from cornplug.store.table.unleased import TableEntry
from cornplug.store.validation import check_app, check_entries, check_keys, check_meta, check_part, check_ttl

_FIRST_BACKOFF_S: Final = 0.1
_LAST_BACKOFF_S: Final = 1.0
_HELLO_S: Final = 1.0
_START_WAIT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 60.0
"""Between starts of a daemon that does not come up: each is an interpreter, on the engine's cores."""

_log = logging.getLogger("cornplug.store")
_open_stores: weakref.WeakSet[PoolStore] = weakref.WeakSet()

R = TypeVar("R", bound=messages.Reply)
G = TypeVar("G")


class _Ask(Protocol):
    def __call__(self, request: messages.Request, kind: type[R]) -> R: ...


class PoolStore:
    """A `Store` on the daemon at `config.socket`. One connection, shared by all threads: none waits
    for another's answer. Large questions are asked in portions.

    Args:
        autostart: start a daemon when none answers; None: as `config.autostart` says.
        connect_timeout_s: how long the constructor waits for the first connection; None: 5 s
            with autostart, else until the first attempt has ended.
        idle_exit_s: when a daemon that we start ends after its last client.

    It never raises because no daemon came, or one that will not talk to us (another protocol,
    secret or user): the log says why, every call is a miss, and another daemon may come.

    Raises ConfigError when the secret cannot be read.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        autostart: bool | None = None,
        connect_timeout_s: float | None = None,
        idle_exit_s: float = IDLE_EXIT_S,
    ) -> None:
        self._config = config
        self._secret = read_secret(config.secret_file)
        self._autostart = config.autostart if autostart is None else autostart
        self._idle_exit_s = idle_exit_s
        self._connection: DaemonConnection | None = None
        self._arena: MappedArena | None = None
        self._refused = False
        self._why = "no store has answered yet"
        self._said = ""
        self._next_start_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._keeping = threading.Lock()
        """Held for ever once the thread runs that keeps this process connected."""
        _open_stores.add(self)
        self._keep()
        if connect_timeout_s is None:
            connect_timeout_s = _START_WAIT_S if self._autostart else _HELLO_S
        self._settled.wait(connect_timeout_s)

    @property
    def connected(self) -> bool:
        """Whether the next call would be sent at all."""
        self._keep()
        return self._connection is not None

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        connection = self._reachable()
        try:
            mask = connection.table.contains(keys)
        except OSError as e:
            raise gone(e) from e
        if UNLISTED not in mask:
            return mask
        answers = bytearray(mask)
        unlisted = [i for i, answer in enumerate(mask) if answer == UNLISTED]
        told = self.contains_by_message([keys[i] for i in unlisted], deadline_s=deadline_s)
        for i, answer in zip(unlisted, told, strict=True):
            answers[i] = answer
        return bytes(answers)

    def contains_by_message(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        """As `contains`, answered by the daemon."""
        ask = self._asker(deadline_s)
        some = messages.batches(keys, messages.MAX_LOOKUP_KEYS)
        return b"".join(
            ask(messages.ContainsRequest(b"".join(each)), messages.ContainsReply).mask for each in some
        )

    def find_unleased(self, key: bytes) -> TableEntry | Unfound:
        """As `UnleasedReads.find_unleased`, for `payload.py`."""
        check_keys([key])
        connection = self._reachable()
        try:
            return unleased.find(key, connection.arena, connection.table, connection.notes)
        except OSError as e:
            raise gone(e) from e

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> list[Lease | None]:
        check_keys(keys)
        check_ttl(ttl_s)
        ask = self._asker(deadline_s)

        def some(start: int) -> list[Lease | None]:
            blob = b"".join(keys[start : start + messages.MAX_KEYS])
            return ask(messages.TakeLeases(blob, ttl_s), messages.LeaseReply).leases

        return self._granted(len(keys), some)

    def reserve(
        self,
        entries: Sequence[tuple[bytes, int]],
        *,
        app: str,
        deadline_s: float,
        part: WriterPart | None = None,
        only_seen: bool = False,
    ) -> list[Reservation | ReserveRefusal]:
        check_entries(entries)
        check_app(app)
        check_part(part)
        ask = self._asker(deadline_s)

        def some(start: int) -> list[Reservation | str]:
            wanted = entries[start : start + messages.MAX_KEYS]
            return ask(_reserve_request(wanted, app, part, only_seen), messages.ReserveReply).answers

        answers = self._granted(len(entries), some)
        return [ReserveRefusal(answer) if isinstance(answer, str) else answer for answer in answers]

    def post_reserve(
        self,
        entries: Sequence[tuple[bytes, int]],
        *,
        app: str,
        deadline_s: float,
        part: WriterPart | None = None,
        only_seen: bool = False,
    ) -> Posted[list[Reservation | ReserveRefusal]]:
        """`reserve`, answered later."""
        check_entries(entries)
        check_app(app)
        check_part(part)

        def request(wanted: Sequence[tuple[bytes, int]]) -> messages.ReserveRequest:
            return _reserve_request(wanted, app, part, only_seen)

        def give_back(tokens: list[int]) -> None:
            self.release(tokens, deadline_s=0.0)

        with self._connected() as connection:
            return PostedReserve(connection, entries, request, give_back, deadline_s)

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        requests = _commit_requests(written)
        ask = self._asker(deadline_s)
        return [done for request in requests for done in ask(request, messages.CommitReply).done]

    def post_commit(
        self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float
    ) -> Posted[list[bool]]:
        """`commit`, answered later."""
        requests = _commit_requests(written)
        with self._connected() as connection:
            return PostedCommit(connection, requests, deadline_s)

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        with self._connected() as connection:
            for some in messages.batches(tokens, messages.MAX_KEYS):
                connection.tell(messages.ReleaseRequest(list(some)))

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        ask = self._asker(deadline_s)
        some = messages.batches(keys, messages.MAX_KEYS)
        return sum(ask(messages.DeleteRequest(b"".join(each)), messages.DeleteReply).count for each in some)

    def stat(self, *, deadline_s: float) -> StoreStat:
        return self._asker(deadline_s)(messages.StatRequest(), messages.StatReply).stat

    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        arena = self._arena
        if arena is None:
            raise StoreUnavailable("location of another arena", reason="stale_location")
        return arena.view(location, writable=writable)

    def close(self) -> None:
        self._closing.set()
        self._why = "this connection is closed"
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.shutdown()

    def _asker(self, deadline_s: float) -> _Ask:
        """A function that asks one request after the other, all of them within `deadline_s`."""
        end_s = time.monotonic() + deadline_s

        def ask(request: messages.Request, kind: type[R]) -> R:
            with self._connected() as connection:
                reply = connection.ask(request, end_s, deadline_s)
            if not isinstance(reply, kind):
                why = reply.message if isinstance(reply, messages.RequestFault) else type(reply).__name__
                raise StoreUnavailable(f"the store did not do it: {why}", reason="store_fault")
            return reply

        return ask

    def _reachable(self) -> DaemonConnection:
        connection = self._connection
        if connection is None:
            self._keep()
            raise StoreUnavailable(self._why, reason="store_refused" if self._refused else "store_down")
        return connection

    @contextlib.contextmanager
    def _connected(self) -> Iterator[DaemonConnection]:
        connection = self._reachable()
        with as_unavailable():
            yield connection

    def _granted(self, count: int, some: Callable[[int], list[G]]) -> list[G]:
        """Answers for all of `count` keys, asked for in the portions that the daemon cuts. Where
        one portion fails, the leases and reservations of the others are given back."""
        out: list[G] = []
        try:
            while True:
                more = some(len(out))
                out += more
                if len(out) >= count:
                    return out
                if not more:
                    raise StoreUnavailable("the store answered for too few keys", reason="store_fault")
        except StoreUnavailable:
            tokens = [each.token for each in out if isinstance(each, Lease | Reservation)]
            with contextlib.suppress(StoreUnavailable):
                self.release(tokens, deadline_s=0.0)
            raise

    def _keep(self) -> None:
        """Start the thread that connects, once in each process."""
        if not self._closing.is_set() and self._keeping.acquire(blocking=False):
            threading.Thread(target=self._keep_connected, name="cornplug-store", daemon=True).start()

    def _keep_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing.is_set():
            connection = self._attempt()
            if connection is None:
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
                continue
            backoff_s, self._pause_s = _FIRST_BACKOFF_S, _FIRST_PAUSE_S
            self._arena = connection.arena
            self._connection = connection
            self._refused = False
            self._said = ""
            self._settled.set()
            if not self._closing.is_set():
                connection.wait_end()
            self._why = "the store has ended"
            self._connection = None
            connection.close()

    def _attempt(self) -> DaemonConnection | None:
        connection = self._connect()
        if connection is None and self._autostart and not self._refused:
            return self._start()
        self._settled.set()
        return connection

    def _start(self) -> DaemonConnection | None:
        if self._closing.is_set() or time.monotonic() < self._next_start_s:
            return None
        try:
            with start_lock(self._config.socket) as ours:
                # Somebody may have started one since we asked.
                connection = self._connect() if ours else None
                if not ours or connection is not None:
                    return connection
                spawn(self._config, idle_exit_s=self._idle_exit_s)
                connection = self._await_start()
                if connection is None:
                    self._next_start_s = time.monotonic() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
                return connection
        except (OSError, ConfigError) as e:
            self._say_why(f"cannot start a store: {e}")
            return None

    def _await_start(self) -> DaemonConnection | None:
        give_up_s = time.monotonic() + _START_WAIT_S
        while time.monotonic() < give_up_s and not self._closing.wait(0.02):
            connection = self._connect()
            if connection is not None:
                return connection
        return None

    def _connect(self) -> DaemonConnection | None:
        try:
            return DaemonConnection(self._config.socket, self._secret, timeout_s=_HELLO_S)
        except ConfigError as e:
            self._refused = True
            self._say_why(str(e))
        except OSError as e:
            # One that refused us may have gone since: another may be started.
            self._refused = False
            self._why = f"no store answers at {self._config.socket}: {e}"
        return None

    def _say_why(self, why: str) -> None:
        if why != self._said:
            _log.warning("no sharing: %s", why)
        self._why = self._said = why

    def abandon_in_child(self) -> None:
        """In a child the socket is the parent's: two processes on it would mix their answers. One of
        its own is made when it first asks; many children never do."""
        self._why = f"process {os.getpid()} was forked and has no connection of its own yet"
        # Threads that are not here may have held the parent's locks.
        closed, self._closing = self._closing.is_set(), threading.Event()
        self._settled, self._keeping = threading.Event(), threading.Lock()
        if closed:
            self._closing.set()
        connection = self._connection
        self._connection = None
        if connection is not None:
            connection.abandon()


def _reserve_request(
    wanted: Sequence[tuple[bytes, int]], app: str, part: WriterPart | None, only_seen: bool
) -> messages.ReserveRequest:
    keys, sizes = b"".join([key for key, _ in wanted]), [size for _, size in wanted]
    return messages.ReserveRequest(keys, sizes, app, part, only_seen)


def _commit_requests(written: Sequence[tuple[Reservation, bytes]]) -> list[messages.CommitRequest]:
    for _, meta in written:
        check_meta(meta)
    return [
        messages.CommitRequest([r.token for r, _ in some], [meta for _, meta in some])
        for some in messages.commit_batches(written)
    ]


def _after_fork() -> None:
    for store in list(_open_stores):
        store.abandon_in_child()


os.register_at_fork(after_in_child=_after_fork)
