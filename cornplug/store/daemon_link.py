"""Link of a process to the host's daemon. A thread keeps the process connected, and starts a daemon if the
settings allow this. Posted requests have replies that are read later, so that a scheduler can continue its
step.

The daemon is independent of its clients: it has its own session, no inherited descriptors, and a log file
next to the socket. It ends automatically some time after its last client has disconnected.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final

import cornplug
from cornplug.config import Config, StoreConfig, dump_portable
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.local_socket import try_lock
from cornplug.private_paths import open_file, open_folder, read_secret
from cornplug.store import messages
from cornplug.store.arena import MappedArena
from cornplug.store.base import PostedRequest, Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.connection import DaemonConnection

_FIRST_BACKOFF_S: Final = 0.1
_LAST_BACKOFF_S: Final = 1.0
_HELLO_TIMEOUT_S: Final = 1.0
_START_WAIT_S: Final = 5.0
_FIRST_PAUSE_S: Final = 1.0
_LAST_PAUSE_S: Final = 60.0
"""Longest pause in seconds between attempts to start a daemon that fails. Each attempt uses the engine's
cores."""

_log = logging.getLogger("cornplug.store")
_open_links: weakref.WeakSet[DaemonLink] = weakref.WeakSet()
IDLE_EXIT_S: Final = 600.0
_SPAWN_TIMEOUT_S: Final = 20.0
"""Time limit in seconds for the process that starts the daemon. That process returns when the daemon's
interpreter has started, which is before the daemon accepts clients."""
LOG_BYTES: Final = 1 << 20
"""Size beyond which the log of an auto-started daemon is emptied."""
# The daemon's module is run directly. It starts in a third of the time that cornplug's command line takes,
# and a broken optional package cannot prevent its start. cornplug's folder is last on the module search path,
# and the engine's folder is not on it, so that a user's secrets.py does not replace the standard library's
# module.
_START_PROGRAM: Final = (
    "import json, sys; sys.path.append(sys.argv.pop(1)); "
    "from cornplug.store.daemon.main import main; sys.exit(main(sys.argv[1:], json.load(sys.stdin)))"
)


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
        self._was_rejected = False
        self._unavailable_reason = "not connected to a store yet"
        self._logged_reason = ""
        self._next_start_s, self._pause_s = 0.0, _FIRST_PAUSE_S
        self._first_attempt_done = threading.Event()
        self._closing = threading.Event()
        self._thread_claimed = threading.Lock()
        """Lock that is never released. The call of `ensure_thread` that acquires it starts this process's
        thread."""
        _open_links.add(self)
        self.ensure_thread()
        if connect_timeout_s is None:
            connect_timeout_s = _START_WAIT_S if self._autostart else _HELLO_TIMEOUT_S
        self._first_attempt_done.wait(connect_timeout_s)

    def require_connection(self) -> DaemonConnection:
        """Return the connection. Raises StoreUnavailable if this process is not connected."""
        connection = self.connection
        if connection is None:
            self.ensure_thread()
            raise StoreUnavailable(
                self._unavailable_reason, reason="store_refused" if self._was_rejected else "store_down"
            )
        return connection

    def close(self) -> None:
        """Close the connection permanently."""
        self._closing.set()
        self._unavailable_reason = "this connection is closed"
        connection = self.connection
        self.connection = None
        if connection is not None:
            connection.shutdown()

    def ensure_thread(self) -> None:
        """Start the thread that connects, once in each process."""
        if not self._closing.is_set() and self._thread_claimed.acquire(blocking=False):
            threading.Thread(target=self._keep_connected, name="cornplug-store", daemon=True).start()

    def _keep_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while not self._closing.is_set():
            connection = self._try_connect()
            if connection is None:
                self._closing.wait(backoff_s)
                backoff_s = min(2 * backoff_s, _LAST_BACKOFF_S)
                continue
            backoff_s, self._pause_s = _FIRST_BACKOFF_S, _FIRST_PAUSE_S
            self.arena = connection.arena
            self.connection = connection
            self._was_rejected = False
            self._logged_reason = ""
            self._first_attempt_done.set()
            if not self._closing.is_set():
                connection.wait_end()
            self._unavailable_reason = "the store has ended"
            self.connection = None
            connection.close()

    def _try_connect(self) -> DaemonConnection | None:
        connection = self._connect()
        if connection is None and self._autostart and not self._was_rejected:
            return self._start_daemon()
        self._first_attempt_done.set()
        return connection

    def _start_daemon(self) -> DaemonConnection | None:
        if self._closing.is_set() or time.monotonic() < self._next_start_s:
            return None
        try:
            with start_lock(self._config.socket) as ours:
                # Another process may have started a daemon since the last attempt.
                connection = self._connect() if ours else None
                if not ours or connection is not None:
                    return connection
                spawn_daemon(self._config, idle_exit_s=self._idle_exit_s)
                connection = self._wait_for_daemon()
                if connection is None:
                    self._next_start_s = time.monotonic() + self._pause_s
                    self._pause_s = min(2 * self._pause_s, _LAST_PAUSE_S)
                return connection
        except (OSError, ConfigError) as e:
            self._log_reason(f"cannot start a store: {e}")
            return None

    def _wait_for_daemon(self) -> DaemonConnection | None:
        give_up_s = time.monotonic() + _START_WAIT_S
        while time.monotonic() < give_up_s and not self._closing.wait(0.02):
            connection = self._connect()
            if connection is not None:
                return connection
        return None

    def _connect(self) -> DaemonConnection | None:
        try:
            return DaemonConnection(self._config.socket, self._secret, timeout_s=_HELLO_TIMEOUT_S)
        except ConfigError as e:
            self._was_rejected = True
            self._log_reason(str(e))
        except OSError as e:
            # If a daemon rejected this client before, it may have ended, so this client may start another.
            self._was_rejected = False
            self._unavailable_reason = f"no store is running at {self._config.socket}: {e}"
        return None

    def _log_reason(self, why: str) -> None:
        if why != self._logged_reason:
            _log.warning("nothing is shared while this process has no connection to a store: %s", why)
        self._unavailable_reason = self._logged_reason = why

    def abandon_in_child(self) -> None:
        """Close the connection in a forked child, because parent and child share the socket and would receive
        each other's replies. The child connects again at its first request, which many children never
        send."""
        self._unavailable_reason = f"process {os.getpid()} was forked and has no connection of its own yet"
        # Threads that do not exist in the child may have held the parent's locks.
        closed, self._closing = self._closing.is_set(), threading.Event()
        self._first_attempt_done, self._thread_claimed = threading.Event(), threading.Lock()
        if closed:
            self._closing.set()
        connection = self.connection
        self.connection = None
        if connection is not None:
            connection.close_in_child()


def _after_fork() -> None:
    for link in list(_open_links):
        link.abandon_in_child()


os.register_at_fork(after_in_child=_after_fork)


class PostedReserve(PostedRequest[list[Reservation | ReserveRefusal]]):
    """`reserve` request that was sent. The daemon truncates long replies. When a truncated reply arrives, the
    remaining entries are requested."""

    def __init__(
        self,
        connection: DaemonConnection,
        entries: Sequence[tuple[bytes, int]],
        terms: ReserveTerms,
        deadline_s: float,
    ) -> None:
        self._connection, self._entries, self._terms = connection, entries, terms
        self._deadline_s, self._end_s = deadline_s, time.monotonic() + deadline_s
        self._results_so_far: list[Reservation | str] = []
        self._send_next()

    def _send_next(self) -> None:
        wanted = self._entries[len(self._results_so_far) :][: messages.MAX_KEYS]
        keys, sizes = b"".join([key for key, _ in wanted]), [size for _, size in wanted]
        terms = self._terms
        request = messages.ReserveRequest(keys, sizes, terms.app, terms.part, terms.only_seen, terms.cost_s)
        self._pending = self._connection.post(request, self._deadline_s)

    def poll(self) -> list[Reservation | ReserveRefusal] | None:
        try:
            reply = self._connection.poll_reply(self._pending, messages.ReserveReply, self._end_s)
            return None if reply is None or not self._add_reply(reply) else self._results()
        except StoreUnavailable:
            self._release_results()
            raise

    def wait(self) -> list[Reservation | ReserveRefusal]:
        """Wait for the reply until the deadline, and return it."""
        try:
            while not self._add_reply(
                self._connection.wait_reply(self._pending, messages.ReserveReply, self._end_s)
            ):
                pass
        except StoreUnavailable:
            self._release_results()
            raise
        return self._results()

    def _add_reply(self, reply: messages.ReserveReply) -> bool:
        """Add a reply to the result and return whether the result is complete. If not, request the remaining
        entries."""
        if not reply.results and self._entries:
            raise StoreUnavailable("the store's reply covers too few keys", reason="store_fault")
        self._results_so_far += reply.results
        if len(self._results_so_far) >= len(self._entries):
            return True
        self._send_next()
        return False

    def _results(self) -> list[Reservation | ReserveRefusal]:
        return [ReserveRefusal(each) if isinstance(each, str) else each for each in self._results_so_far]

    def _release_results(self) -> None:
        tokens = [each.token for each in self._results_so_far if isinstance(each, Reservation)]
        with contextlib.suppress(StoreUnavailable):
            self._connection.release(tokens)


class PostedCommit(PostedRequest[list[bool]]):
    """`commit` request that was sent, in several messages if it is large."""

    def __init__(
        self, connection: DaemonConnection, written: Sequence[tuple[Reservation, bytes]], deadline_s: float
    ) -> None:
        self._connection, self._end_s = connection, time.monotonic() + deadline_s
        self._pending = [
            connection.post(
                messages.CommitRequest([r.token for r, _ in some], [meta for _, meta in some]), deadline_s
            )
            for some in messages.split_commits(written)
        ]
        self._done: list[bool] = []

    def poll(self) -> list[bool] | None:
        while self._pending:
            reply = self._connection.poll_reply(self._pending[0], messages.CommitReply, self._end_s)
            if reply is None:
                return None
            self._done += reply.done
            del self._pending[0]
        return self._done

    def wait(self) -> list[bool]:
        """Wait for the reply until the deadline, and return it."""
        for asked in self._pending:
            self._done += self._connection.wait_reply(asked, messages.CommitReply, self._end_s).done
        return self._done


@contextlib.contextmanager
def start_lock(socket_path: Path) -> Iterator[bool]:
    """Lock the start of a daemon, and yield whether this client holds the lock and may start a daemon.

    Raises ConfigError if other users have access to the socket's folder, and OSError if no file can be
    created.
    """
    folder = open_folder(socket_path.parent, setting="store.socket")
    try:
        fd = open_file(folder, socket_path.name + ".start", os.O_RDWR)
    finally:
        os.close(folder)
    try:
        yield try_lock(fd)
    finally:
        os.close(fd)


def log_path(socket_path: Path) -> Path:
    """Return the path of the log of a daemon that was started automatically."""
    return socket_path.with_suffix(".log")


def _open_log(path: Path) -> BinaryIO:
    folder = open_folder(path.parent, setting="store.socket")
    try:
        fd = open_file(folder, path.name, os.O_WRONLY | os.O_APPEND)
    finally:
        os.close(folder)
    if os.fstat(fd).st_size > LOG_BYTES:
        os.ftruncate(fd, 0)
    return os.fdopen(fd, "ab")


def spawn_daemon(config: StoreConfig, *, idle_exit_s: float) -> None:
    """Start a daemon and return. The daemon is ready a moment later, or logs why it failed.

    Raises OSError if no process can be created, and ConfigError if other users have access to the socket's
    folder.
    """
    command = [sys.executable, "-P", "-c", _START_PROGRAM, str(Path(cornplug.__file__).parents[1])]
    command += ["--clamp", "--detach", "--idle-exit-s", str(idle_exit_s)]
    # The socket is on the command line so that users who list the processes can see it.
    command += ["--socket", str(config.socket.absolute())]
    # The settings are not on the command line, which any user can read: a URL may have a password.
    settings = json.dumps(dump_portable(Config(store=config))).encode()
    path = log_path(config.socket)
    with _open_log(path) as log:
        try:
            done = subprocess.run(
                command, input=settings, stdout=log, stderr=log, timeout=_SPAWN_TIMEOUT_S, cwd="/",
                start_new_session=True, close_fds=True, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            _log.warning("the start of a store took more than %.0f s: see its log %s", _SPAWN_TIMEOUT_S, path)
            return
    if done.returncode:
        _log.warning("the store did not start (exit status %d), see %s", done.returncode, path)
    else:
        _log.info("started a store at %s; it logs to %s", config.socket, path)
