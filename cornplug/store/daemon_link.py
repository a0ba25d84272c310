"""Keeps a process connected to the host's daemon, and starts the daemon if that is allowed."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Final

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.private_paths import read_secret
from cornplug.store.arena import MappedArena
from cornplug.store.autostart import spawn, start_lock
from cornplug.store.connection import DaemonConnection

_FIRST_BACKOFF_S: Final = 0.1
_LAST_BACKOFF_S: Final = 1.0
_HELLO_S: Final = 1.0
_START_WAIT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 60.0
"""Longest pause in seconds between attempts to start a daemon that fails. Each attempt uses the engine's
cores."""

_log = logging.getLogger("cornplug.store")
_open_links: weakref.WeakSet[DaemonLink] = weakref.WeakSet()


class DaemonLink:
    """Connection to the daemon at `config.socket`, maintained by a background thread.

    Only the constructor waits for a connection. Its arguments and errors are the same as in `PoolStore`.
    """

    def __init__(
        self,
        config: StoreConfig,
        *,
        autostart: bool | None,
        connect_timeout_s: float | None,
        idle_exit_s: float,
    ) -> None:
        self._config = config
        self._secret = read_secret(config.secret_file)
        self._autostart = config.autostart if autostart is None else autostart
        self._idle_exit_s = idle_exit_s
        self.connection: DaemonConnection | None = None
        self.arena: MappedArena | None = None
        """Arena of the latest connection."""
        self._refused = False
        self._why = "not connected to a store yet"
        self._said = ""
        self._next_start_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._settled = threading.Event()
        self._closing = threading.Event()
        self._keeping = threading.Lock()
        """Lock that is never released. The call of `keep` that acquires it starts this process's thread."""
        _open_links.add(self)
        self.keep()
        if connect_timeout_s is None:
            connect_timeout_s = _START_WAIT_S if self._autostart else _HELLO_S
        self._settled.wait(connect_timeout_s)

    def reachable(self) -> DaemonConnection:
        """Return the connection. Raises StoreUnavailable if there is none."""
        connection = self.connection
        if connection is None:
            self.keep()
            raise StoreUnavailable(self._why, reason="store_refused" if self._refused else "store_down")
        return connection

    def close(self) -> None:
        """Close the connection permanently."""
        self._closing.set()
        self._why = "this connection is closed"
        connection = self.connection
        self.connection = None
        if connection is not None:
            connection.shutdown()

    def keep(self) -> None:
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
            self.arena = connection.arena
            self.connection = connection
            self._refused = False
            self._said = ""
            self._settled.set()
            if not self._closing.is_set():
                connection.wait_end()
            self._why = "the store has ended"
            self.connection = None
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
                # Another process may have started a daemon since the last attempt.
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
            # If a daemon rejected this client before, it may have ended, so this client may start another.
            self._refused = False
            self._why = f"no store is running at {self._config.socket}: {e}"
        return None

    def _say_why(self, why: str) -> None:
        if why != self._said:
            _log.warning("no sharing: %s", why)
        self._why = self._said = why

    def abandon_in_child(self) -> None:
        """Close the connection in a forked child. The child shares the socket with its parent, and each would
        receive some of the other's replies. The child connects at its first request, which many children
        never send."""
        self._why = f"process {os.getpid()} was forked and has no connection of its own yet"
        # Threads that do not exist in the child may have held the parent's locks.
        closed, self._closing = self._closing.is_set(), threading.Event()
        self._settled, self._keeping = threading.Event(), threading.Lock()
        if closed:
            self._closing.set()
        connection = self.connection
        self.connection = None
        if connection is not None:
            connection.abandon()


def _after_fork() -> None:
    for link in list(_open_links):
        link.abandon_in_child()


os.register_at_fork(after_in_child=_after_fork)
