"""The embedded default: a client of the host's daemon, payloads in shared memory.

While there is no daemon every call raises `StoreUnavailable("store_down")` at once; a
thread of its own looks for one, starts one if allowed, and shares again when it is there.
No caller ever waits for a connection, except in the constructor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from cornplug.config import StoreConfig, read_secret
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store import autostart as starter
from cornplug.store import wire
from cornplug.store.arena import MappedArena
from cornplug.store.base import Lease, Location, Part, Refusal, Reservation, StoreStat
from cornplug.store.checks import check_entries, check_keys, check_meta, check_part
from cornplug.store.connection import Connection

_FIRST_BACKOFF_S: Final = 0.1
_LAST_BACKOFF_S: Final = 1.0
_HELLO_S: Final = 1.0
_START_WAIT_S: Final = 5.0

_log = logging.getLogger("cornplug.store")
_open_stores: weakref.WeakSet[PoolStore] = weakref.WeakSet()

R = TypeVar("R", bound=wire.Reply)


class PoolStore:
    """A `Store` on the daemon at `config.socket`. One connection, shared by all threads.

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
        idle_exit_s: float = starter.IDLE_EXIT_S,
    ) -> None:
        self._config = config
        self._secret = read_secret(config.secret_file)
        self._autostart = config.autostart if autostart is None else autostart
        self._idle_exit_s = idle_exit_s
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._arena: MappedArena | None = None
        self._refused = False
        self._why = "no store has answered yet"
        self._said = ""
        self._settled = threading.Event()
        self._closing = threading.Event()
        _open_stores.add(self)
        threading.Thread(target=self._keep_connected, name="cornplug-store", daemon=True).start()
        if connect_timeout_s is None:
            connect_timeout_s = _START_WAIT_S if self._autostart else _HELLO_S
        self._settled.wait(connect_timeout_s)

    @property
    def connected(self) -> bool:
        """Whether the next call would be sent at all."""
        return self._connection is not None

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        check_keys(keys)
        return self._ask(wire.Contains(b"".join(keys)), wire.Mask, deadline_s).mask

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> list[Lease | None]:
        check_keys(keys)
        return self._ask(wire.TakeLeases(b"".join(keys), ttl_s), wire.Leases, deadline_s).leases

    def reserve(
        self,
        entries: Sequence[tuple[bytes, int]],
        *,
        app: str,
        deadline_s: float,
        part: Part | None = None,
    ) -> list[Reservation | Refusal]:
        check_entries(entries)
        check_part(part)
        keys, sizes = b"".join(key for key, _ in entries), [size for _, size in entries]
        request = wire.Reserve(keys, sizes, app, part)
        answers = self._ask(request, wire.Reserved, deadline_s).answers
        return [Refusal(answer) if isinstance(answer, str) else answer for answer in answers]

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        for _, meta in written:
            check_meta(meta)
        request = wire.Commit([r.token for r, _ in written], [meta for _, meta in written])
        return self._ask(request, wire.Committed, deadline_s).done

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        end_s = time.monotonic() + deadline_s
        frame = wire.frame(wire.Release(list(tokens)))
        with self._turn(deadline_s) as connection:
            connection.send(frame, end_s)

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        check_keys(keys)
        return self._ask(wire.Delete(b"".join(keys)), wire.Deleted, deadline_s).count

    def stat(self, *, deadline_s: float) -> StoreStat:
        return self._ask(wire.Stat(), wire.Stats, deadline_s).stat

    def view(self, location: Location, *, writable: bool = False) -> memoryview:
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

    def _ask(self, request: wire.Request, kind: type[R], deadline_s: float) -> R:
        end_s = time.monotonic() + deadline_s
        frame = wire.frame(request)
        with self._turn(deadline_s) as connection:
            connection.send(frame, end_s)
            reply = connection.receive(end_s)
            if not isinstance(reply, kind):
                raise ValueError(f"{type(reply).__name__} where {kind.__name__} was due")
            return reply

    @contextlib.contextmanager
    def _turn(self, deadline_s: float) -> Iterator[Connection]:
        """The connection for one exchange. Whatever goes wrong ends it: a late answer would be
        taken for that of the next question."""
        if not self._lock.acquire(timeout=deadline_s):
            raise StoreUnavailable(f"no turn within {deadline_s * 1e3:.0f} ms", reason="store_timeout")
        try:
            connection = self._connection
            if connection is None:
                raise StoreUnavailable(self._why, reason="store_refused" if self._refused else "store_down")
            try:
                yield connection
            except TimeoutError:
                self._drop(connection, "the store did not answer in time")
                raise StoreUnavailable(self._why, reason="store_timeout") from None
            except (OSError, ValueError, msgspec.MsgspecError) as e:
                self._drop(connection, f"the store is gone: {e}")
                raise StoreUnavailable(self._why, reason="store_down") from e
        finally:
            self._lock.release()

    def _drop(self, connection: Connection, why: str) -> None:
        self._why = why
        self._connection = None
        connection.shutdown()

    def _keep_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing.is_set():
            connection = self._attempt()
            if connection is None:
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
                continue
            backoff_s = _FIRST_BACKOFF_S
            self._arena = connection.arena
            self._connection = connection
            self._refused = False
            self._said = ""
            self._settled.set()
            if not self._closing.is_set():
                connection.wait_end()
            with self._lock:
                if self._connection is connection:
                    self._drop(connection, "the store has ended")
                connection.close()

    def _attempt(self) -> Connection | None:
        connection = self._connect()
        if connection is None and self._autostart and not self._refused:
            return self._start()
        self._settled.set()
        return connection

    def _start(self) -> Connection | None:
        if self._closing.is_set():
            return None
        try:
            with starter.start_lock(self._config.socket) as ours:
                # Somebody may have started one since we asked.
                connection = self._connect() if ours else None
                if not ours or connection is not None:
                    return connection
                starter.spawn(self._config, idle_exit_s=self._idle_exit_s)
                return self._await_start()
        except (OSError, ConfigError) as e:
            self._say_why(f"cannot start a store: {e}")
            return None

    def _await_start(self) -> Connection | None:
        give_up_s = time.monotonic() + _START_WAIT_S
        while time.monotonic() < give_up_s and not self._closing.wait(0.02):
            connection = self._connect()
            if connection is not None:
                return connection
        return None

    def _connect(self) -> Connection | None:
        try:
            return Connection(self._config.socket, self._secret, timeout_s=_HELLO_S)
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
        """In a child the socket is the parent's: two processes on it would mix their answers."""
        self._why = f"this connection belongs to the parent of process {os.getpid()}"
        connection = self._connection
        self._connection = None
        self._lock = threading.Lock()
        if connection is not None:
            connection.close()


def _after_fork() -> None:
    for store in list(_open_stores):
        store.abandon_in_child()


os.register_at_fork(after_in_child=_after_fork)
