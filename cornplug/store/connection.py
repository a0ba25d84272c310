"""Connection of a client to the daemon, shared by all threads of the process.

    ask: number the request, queue it, send it when the socket accepts it  ──> daemon, in order
    wait: one waiting thread reads for all threads until its own reply has arrived
    post: number, queue and send the request as in ask; the caller polls for the reply later

No thread waits for the reply to another thread's request. The daemon handles requests in order. If a thread
stops waiting, the leases and reservations in its late reply are released when the reply arrives. A late reply
therefore costs one miss, and the connection is kept until the socket closes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from cornplug.errors import ConfigError, ProtocolError, StoreUnavailable
from cornplug.local_socket import foreign_peer_uid
from cornplug.store import messages
from cornplug.store.arena import MappedArena, MappedFences
from cornplug.store.base import Reservation
from cornplug.store.entry_table import NO_NOTES_PAGE, ClientNotes, MappedEntryTable

_CHUNK_BYTES: Final = 256 << 10
_WELCOME_FDS: Final = 4
"""Number of descriptors that accompany `DaemonWelcome`: arena, write fences, table of entries, and notes of
reads."""
_log = logging.getLogger("cornplug.store")

_LAST_NUMBER: Final = (1 << 32) - 1

R = TypeVar("R", bound=messages.Reply)
_REMEDIES: Final = {
    "secret": "Use the same secret file for all clients of a store, or another store.socket.",
    "version": "Stop the old store (it ends when it is idle), or use another store.socket.",
}
_PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Request to the daemon whose caller has not received the reply."""

    sent_s: float
    timeout_s: float
    """Maximum time that the caller waits for the reply, in seconds."""
    abandoned: bool = False
    reply_body: memoryview | None = None


class DaemonConnection:
    """Established connection to the daemon, and the memory that the daemon shares with this client.

    The shared memory consists of the `arena`, the `table` of entries and this client's page of `notes`.
    `notes` is None if all pages are in use. Calls raise StoreUnavailable: "store_down" after the connection
    has ended, "store_slow" if an older request has no reply yet or the daemon was slow recently, and
    "store_fault" for an unexpected reply.
    """

    def __init__(self, path: Path, secret: bytes, *, timeout_s: float) -> None:
        """Connect to the daemon and exchange greetings.

        Raises OSError if no daemon replies in time, and ConfigError if the daemon rejects this client
        (because of another protocol, secret or user).
        """
        self._received = bytearray()
        self._chunk = memoryview(bytearray(_CHUNK_BYTES))
        """Buffer for received bytes. It is reused, because allocating a buffer for each reply would take
        longer than the reply."""
        self._outbox = bytearray()
        self._last_reply_s = 0.0
        self._last_number = 0
        self._pending: dict[int, PendingRequest] = {}
        self._breaker = CircuitBreaker()
        self._condition = threading.Condition(threading.Lock())
        self._reading = False
        self._end_reason: OSError | None = None
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._sock.close)
            self._sock.settimeout(timeout_s)
            self._sock.connect(str(path))
            self._check_peer(path)
            self.arena, self.table, self.notes = self._exchange_hello(secret, time.monotonic() + timeout_s)
            self._sock.setblocking(False)
            on_error.pop_all()

    def call(self, request: messages.Request, reply_type: type[R], end_s: float, timeout_s: float) -> R:
        """Send a request and wait for the reply until `end_s` (time.monotonic).

        Raises StoreUnavailable("store_timeout") if the reply is late, and StoreUnavailable("store_slow") if
        the request is not sent because the store is too slow for a caller that waits at most `timeout_s`.
        """
        return self.wait_reply(self.post(request, timeout_s), reply_type, end_s)

    def post(self, request: messages.Request, timeout_s: float) -> PendingRequest:
        """Send a request and return a handle, with which `poll_reply` polls or `wait_reply` waits for the
        reply."""
        now_s = time.monotonic()
        with self._condition:
            self._check_responsive(timeout_s, now_s)
            waiter = PendingRequest(now_s, timeout_s)
            self._last_number = self._last_number % _LAST_NUMBER + 1
            self._queue(request, self._last_number)
            self._pending[self._last_number] = waiter
            self._flush()
        return waiter

    def wait_reply(self, pending: PendingRequest, reply_type: type[R], end_s: float) -> R:
        """Wait for the reply to a posted request until `end_s` (time.monotonic)."""
        with self._condition:
            body = self._wait_body(pending, end_s)
        return self._decode_as(body, reply_type)

    def poll_reply(self, pending: PendingRequest, reply_type: type[R], end_s: float) -> R | None:
        """Return the reply to a posted request, or None if it has not arrived. Never waits.

        Raises StoreUnavailable("store_timeout") if the reply has not arrived by `end_s` (time.monotonic).
        """
        with self._condition:
            if pending.reply_body is None and not self._reading:
                self._check_alive()
                self._receive_replies()
            if pending.reply_body is None:
                self._check_alive()
                if time.monotonic() < end_s:
                    return None
                raise self._time_out(pending)
            self._breaker.record_success(pending.timeout_s)
        return self._decode_as(pending.reply_body, reply_type)

    def release(self, tokens: Sequence[int]) -> None:
        """Send a release of leases or reservations, or queue it until the socket accepts it. Never waits."""
        with self._condition:
            self._queue_release(tokens)
            self._flush()

    def send_one_way(self, request: messages.RecallRequest) -> None:
        """Send a request that has no reply, or queue it until the socket accepts it. Never waits."""
        with self._condition:
            self._queue(request, 0)
            self._flush()

    def _check_responsive(self, timeout_s: float, now_s: float) -> None:
        """Raise StoreUnavailable("store_slow") if a reply within `timeout_s` is unlikely."""
        if self._is_late(timeout_s, now_s) and not self._reading:
            self._receive_replies()
        if self._is_late(timeout_s, now_s):
            raise StoreUnavailable("the store has not replied for a while", reason="store_slow")
        if self._breaker.is_open(timeout_s, now_s):
            raise StoreUnavailable("the store was slow a moment ago", reason="store_slow")

    def _is_late(self, timeout_s: float, now_s: float) -> bool:
        """Return whether the oldest request without a reply has waited for more than `timeout_s`."""
        oldest = next(iter(self._pending.values()), None)
        return oldest is not None and now_s - oldest.sent_s > timeout_s

    def _queue(self, request: messages.Request, number: int) -> None:
        self._check_alive()
        self._outbox += messages.frame(request, number)

    def _check_alive(self) -> None:
        if self._end_reason is not None:
            raise disconnected_error(self._end_reason)

    def _flush(self) -> None:
        """Send as much as the socket accepts without blocking."""
        while self._outbox:
            try:
                sent = self._sock.send(self._outbox)
            except BlockingIOError:
                return
            except OSError as e:
                raise self._disconnect(e) from e
            del self._outbox[:sent]

    def _wait_body(self, pending: PendingRequest, end_s: float) -> memoryview:
        while pending.reply_body is None:
            self._check_alive()
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise self._time_out(pending)
            if self._reading:
                self._condition.wait(left_s)
                continue
            self._reading = True
            self._condition.release()
            try:
                self._wait_readable(end_s)
            finally:
                self._condition.acquire()
                self._reading = False
                self._condition.notify_all()
            self._receive_replies()
        self._breaker.record_success(pending.timeout_s)
        return pending.reply_body

    def _time_out(self, pending: PendingRequest) -> StoreUnavailable:
        """Mark the request as abandoned and return the error for its caller."""
        pending.abandoned = True
        self._breaker.record_failure(pending.timeout_s, time.monotonic())
        return StoreUnavailable("the store did not reply in time", reason="store_timeout")

    def _wait_readable(self, end_s: float) -> None:
        """Wait until the socket is readable, or writable if data is queued, or until `end_s`."""
        now_s = time.monotonic()
        wanted = select.POLLIN | (select.POLLOUT if self._outbox else 0)
        poller = select.poll()
        poller.register(self._sock, wanted)
        # A daemon that has just replied is awake, and its next reply arrives before this thread could sleep
        # and wake up. A sleeping daemon wakes up fastest on this core, so this thread must sleep too.
        if now_s - self._last_reply_s < messages.BUSY_POLL_S:
            alert_until_s = min(now_s + messages.BUSY_POLL_S / 2, end_s)
            while time.monotonic() < alert_until_s:
                if poller.poll(0):
                    return
        left_ms = (end_s - time.monotonic()) * 1e3
        if left_ms > 0:
            poller.poll(left_ms)

    def _receive_replies(self) -> None:
        """Pass received replies to their waiters, and send queued requests, without blocking."""
        try:
            size = self._sock.recv_into(self._chunk)
            if not size:
                raise ConnectionResetError("the store closed the connection")
            self._received += self._chunk[:size]
        except BlockingIOError:
            pass
        except OSError as e:
            raise self._disconnect(e) from e
        while (numbered_body := self._next_reply()) is not None:
            number, body = numbered_body
            if number == 0:
                _log.warning("the store rejected a request: %s", self._decode_reply(body))
                continue
            waiter = self._pending.pop(number, None)
            if waiter is None:
                raise self._disconnect(ConnectionAbortedError(f"reply to unknown request {number}"))
            self._last_reply_s = time.monotonic()
            if waiter.abandoned:
                self._release_late_reply(body)
            else:
                waiter.reply_body = body
        self._flush()

    def _next_reply(self) -> tuple[int, memoryview] | None:
        try:
            body = messages.take_frame(self._received)
            return None if body is None else messages.split_number(body)
        except ProtocolError as e:
            raise self._disconnect(ConnectionAbortedError(f"malformed frame: {e}")) from e

    def _release_late_reply(self, body: memoryview) -> None:
        """Release the leases and reservations in a reply that arrived too late."""
        reply, tokens = self._decode_reply(body), []
        if isinstance(reply, messages.LeaseReply):
            tokens = [reply.token]
        elif isinstance(reply, messages.ReserveReply):
            tokens = [each.token for each in reply.results if isinstance(each, Reservation)]
        self._queue_release(tokens)

    def _queue_release(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), messages.MAX_TOKENS):
            self._queue(messages.ReleaseRequest(list(tokens[start : start + messages.MAX_TOKENS])), 0)

    def _decode_as(self, body: memoryview, reply_type: type[R]) -> R:
        reply = self._decode_reply(body)
        if not isinstance(reply, reply_type):
            why = reply.message if isinstance(reply, messages.RequestFault) else type(reply).__name__
            raise StoreUnavailable(f"the store rejected the request: {why}", reason="store_fault")
        return reply

    def _decode_reply(self, body: memoryview) -> messages.Reply:
        try:
            reply: messages.Reply = messages.reply_decoder.decode(body)
        except (msgspec.MsgspecError, ValueError) as e:
            raise self._disconnect(ConnectionAbortedError(f"malformed reply: {e}")) from e
        return reply

    def _disconnect(self, why: OSError) -> StoreUnavailable:
        """End this connection for all threads, and return the error to raise."""
        # The traceback refers to this connection, and would keep the arena until a garbage collection.
        self._end_reason = self._end_reason or why.with_traceback(None)
        self.shutdown()
        return disconnected_error(why)

    def wait_end(self) -> None:
        """Wait until the daemon closes the connection, or `shutdown` is called."""
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        poller.poll()

    def shutdown(self) -> None:
        """End the connection now. `close` frees its descriptor. Thread-safe."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection, and free its descriptor when no thread reads from it."""
        self.shutdown()
        with self._condition:
            self._end_reason = self._end_reason or ConnectionResetError("this connection is closed")
            while self._reading:
                self._condition.wait()
            self._sock.close()

    def close_in_child(self) -> None:
        """Free the descriptor in a forked child, without ending the parent's connection."""
        self._sock.close()

    def _check_peer(self, path: Path) -> None:
        if (uid := foreign_peer_uid(self._sock)) is not None:
            raise ConfigError(
                "store.socket", f"{path} is served by user {uid}", "Use a socket that belongs to you."
            )

    def _exchange_hello(
        self, secret: bytes, end_s: float
    ) -> tuple[MappedArena, MappedEntryTable, ClientNotes | None]:
        self._sock.sendall(
            messages.frame(messages.ClientHello(messages.PROTOCOL_VERSION, messages.secret_tag(secret)))
        )
        data, fds, _, _ = socket.recv_fds(self._sock, _CHUNK_BYTES, _WELCOME_FDS)
        try:
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._received += data
            try:
                reply = self._read_welcome(end_s)
            except (msgspec.MsgspecError, ProtocolError, ValueError) as e:
                raise ConnectionResetError(f"no store responds on this socket: {e}") from e
            if isinstance(reply, messages.ClientRejected):
                field = "store.secret_file" if reply.reason == "secret" else "store.socket"
                raise ConfigError(field, reply.message, _REMEDIES[reply.reason])
            if not isinstance(reply, messages.DaemonWelcome) or len(fds) != _WELCOME_FDS:
                raise ConnectionResetError("no store responds on this socket")
            arena_fd, fences_fd, table_fd, notes_fd = fds
            try:
                arena = MappedArena(arena_fd, reply.arena_id, reply.capacity_bytes, MappedFences(fences_fd))
                notes = None if reply.notes_page == NO_NOTES_PAGE else ClientNotes(notes_fd, reply.notes_page)
                return arena, MappedEntryTable(table_fd), notes
            except ValueError as e:
                raise ConnectionResetError(f"no store responds on this socket: {e}") from e
        finally:
            for fd in fds:
                os.close(fd)

    def _read_welcome(self, end_s: float) -> messages.Reply:
        while (body := messages.take_frame(self._received)) is None:
            self._sock.settimeout(max(end_s - time.monotonic(), 1e-6))
            data = self._sock.recv(_CHUNK_BYTES)
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._received += data
        reply: messages.Reply = messages.reply_decoder.decode(body)
        return reply


def disconnected_error(why: OSError) -> StoreUnavailable:
    """Return the error for a connection that has ended."""
    return StoreUnavailable(f"the connection to the store ended: {why}", reason="store_down")


class CircuitBreaker:
    """Circuit breaker that counts late replies by deadline, and rejects requests that would probably fail
    too.

    Without it, an engine would wait 0.1 s in every step for a store that does not reply in time. The pause
    grows with each failure. Callers with longer deadlines may still get replies, so failures are counted
    separately for each binary order of magnitude of the deadline. All times are of one monotonic clock. Not
    thread-safe, so callers hold a lock.
    """

    def __init__(self) -> None:
        self._failures: dict[int, tuple[int, float]] = {}

    def is_open(self, deadline_s: float, now_s: float) -> bool:
        """Return whether a caller with this deadline should not send a request yet."""
        missed = self._failures.get(_deadline_class(deadline_s))
        return missed is not None and now_s < missed[1]

    def record_failure(self, deadline_s: float, now_s: float) -> None:
        """Record that a reply was late."""
        kind = _deadline_class(deadline_s)
        times, until_s = self._failures.get(kind, (0, 0.0))
        # Callers that waited at the same time count as one failure.
        if now_s >= until_s:
            pause_s = _PAUSES_S[min(times, len(_PAUSES_S) - 1)]
            self._failures[kind] = (times + 1, now_s + pause_s)

    def record_success(self, deadline_s: float) -> None:
        """Record that a reply arrived in time."""
        if self._failures:
            self._failures.pop(_deadline_class(deadline_s), None)


def _deadline_class(deadline_s: float) -> int:
    return math.frexp(deadline_s)[1]
