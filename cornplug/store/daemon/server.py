"""The daemon's loop: one thread, one index, one arena, any number of clients.

The loop replies to a request before it reads the next request, so the index needs no lock, and `contains`
takes one round trip on a socket. No request takes more than a few milliseconds. After the loop has handled
one client's requests for about 2 ms, it handles the requests of other clients. The reply to invalid bytes is
a `RequestFault`. Allocating memory takes long, so a separate thread allocates it in advance
(`arena_growth.py`).
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from cornplug.errors import ProtocolError
from cornplug.local_socket import foreign_peer_uid
from cornplug.settings import NamespaceConfig
from cornplug.store import messages
from cornplug.store.arena import SharedArena, WriteFences
from cornplug.store.base import ReserveRefusal, ReserveTerms
from cornplug.store.daemon.access_log import AccessLog
from cornplug.store.daemon.arena_growth import ArenaGrowth
from cornplug.store.daemon.entry_watchers import EntryTableWriter, EntryWatchers
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes
from cornplug.store.daemon.store_counters import StoreTelemetry
from cornplug.store.entry_table import NO_NOTES_PAGE, TableShape, UseNotes
from cornplug.store.messages import check_entries, check_meta, check_terms, check_ttl

if TYPE_CHECKING:
    from cornplug.store.disk.segment_files import OpenedDisk
    from cornplug.store.far.open_far import OpenedFar


_CHUNK_BYTES: Final = 256 << 10
HELLO_TIMEOUT_S: Final = 5.0
_TICK_S: Final = 0.5
_TURN_S: Final = 2e-3
"""Time in seconds for which one client's requests are handled before other clients' requests."""
_FAULT_CHARS: Final = 300
_REQUEST_FAULTS: Final = (ValueError, OverflowError, RecursionError, MemoryError, msgspec.MsgspecError)
"""Errors that decoding and validation of hostile bytes can raise."""
_log = logging.getLogger("cornplug.store")


class ClientFault(Exception):
    """Raised to disconnect a client. The message is the reason."""


class ClientSession:
    """Socket and buffers of one client. `owner` is the connection's number in the index.

    Raises ClientFault if the connection cannot continue, because the client has disconnected or sends bytes
    that are not frames. This does not affect other clients.
    """

    def __init__(self, sock: socket.socket, owner: int, *, connected_s: float) -> None:
        self.sock = sock
        self.owner = owner
        self.connected_s = connected_s
        self.is_welcomed = False
        self.notes_page = NO_NOTES_PAGE
        self._received = bytearray()
        self._unsent = b""

    @property
    def is_stuck(self) -> bool:
        """Whether the client does not read its replies. If so, its requests are not read either."""
        return bool(self._unsent)

    def check_peer(self) -> None:
        """Raise ClientFault if the client belongs to another user."""
        if (uid := foreign_peer_uid(self.sock)) is not None:
            raise ClientFault(f"user {uid} is not user {os.getuid()}")

    def read(self) -> None:
        """Read available bytes. Raises ClientFault if the connection has ended."""
        try:
            data = self.sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e
        if not data:
            raise ClientFault("closed")
        self._received += data

    def next_frame(self) -> bytes | None:
        """Return the body of the next complete frame. Returns None if there is no complete frame, or if the
        client does not read its replies. Raises ClientFault for bytes that are not frames."""
        if self.is_stuck:
            return None
        try:
            return messages.take_frame(self._received)
        except ProtocolError as e:
            raise ClientFault(f"no frames: {e}") from e

    def send(self, reply: messages.Reply, *, number: int | None = None, fds: Sequence[int] = ()) -> None:
        """Send a reply, and keep the bytes that the socket does not accept for `flush`. Raises ClientFault if
        the connection has ended."""
        try:
            data = messages.frame(reply, number)
        except ValueError as e:
            data = messages.frame(messages.RequestFault(str(e)), number)
        try:
            sent = self.sock.send(data) if not fds else socket.send_fds(self.sock, [data], fds)
        except BlockingIOError:
            sent = 0
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e
        self._unsent = data[sent:]

    def flush(self) -> None:
        """Send more of the kept bytes. Raises ClientFault if the client has disconnected."""
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e

    def close(self) -> None:
        self.sock.close()


@dataclass(frozen=True, slots=True)
class ServedSocket:
    """Socket on which a server accepts clients."""

    listener: socket.socket
    renew: Callable[[], socket.socket | None] | None = None
    """Function that the server calls regularly. It returns the socket to listen on, or None if another daemon
    serves the path. The server then ends."""
    idle_exit_s: float = 0.0
    """Time in seconds without clients after which the server ends. 0: it never ends."""


@dataclass(frozen=True, slots=True)
class OpenedTiers:
    """Slower tiers of a store, each of which is None if the store does not have it."""

    disk: OpenedDisk | None = None
    far: OpenedFar | None = None


MEMORY_ONLY: Final = OpenedTiers()


class StoreServer:
    """Server of one store, on the socket `served`."""

    def __init__(
        self,
        served: ServedSocket,
        arena: SharedArena,
        *,
        secret: bytes,
        times: ReservationTimes,
        namespaces: Mapping[str, NamespaceConfig] | None = None,
        access_log: Path | None = None,
        tiers: OpenedTiers = MEMORY_ONLY,
    ) -> None:
        self._listener, self._renew = served.listener, served.renew
        self._accepting = True
        self._arena = arena
        self._tag = messages.secret_tag(secret)
        self._idle_exit_s = served.idle_exit_s
        self._fences = WriteFences(shared=True)
        self._notes = UseNotes()
        disk, far = tiers.disk, tiers.far
        disk_bytes = 0 if disk is None else disk.size_bytes
        shape = TableShape.for_capacity(arena.capacity_bytes, disk_bytes, has_far=far is not None)
        self._table = EntryTableWriter(shape, has_disk=(disk or far) is not None)
        self._growth = ArenaGrowth(arena)
        log = AccessLog(access_log) if access_log is not None else None
        self._watchers = EntryWatchers(self._table, log)
        self._index = StoreIndex(
            arena.id, arena.capacity_bytes, times=times, grow=self._growth.grow, fences=self._fences,
            watchers=self._watchers, namespaces=namespaces,
        )  # fmt: skip
        if disk is not None:
            self._watchers.open_disk(disk, self._index, arena, self._fences)
        if far is not None:
            self._watchers.open_far(far, self._index, arena, self._fences)
        self._sessions: dict[int, ClientSession] = {}
        self.telemetry = StoreTelemetry(self._index, self._sessions)
        self._buffered_sessions: dict[int, ClientSession] = {}
        """Sessions with buffered requests, served first in the next iteration."""
        self._ending_owners: deque[int] = deque()
        """Numbers of disconnected clients whose leases and reservations have not all been ended yet."""
        self._owners = itertools.count(1)
        self._selector = selectors.DefaultSelector()
        self._last_busy_s, self.stop = time.monotonic(), False

    def serve(self) -> None:
        """Run until `stop` is set, or until the server has been idle for `idle_exit_s`."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._growth, selectors.EVENT_READ)
        for tier in self._watchers.wakeup_sources:
            self._selector.register(tier, selectors.EVENT_READ)
        # Allocate this memory now, so that it is available when the first client connects.
        self._index.placement.extend(self._growth.allocate_initial())
        next_tick_s = alert_until_s = time.monotonic() + _TICK_S
        while not self.stop:
            self._growth.keep_headroom(self._index.placement)
            now_s = time.monotonic()
            busy = (
                bool(self._buffered_sessions or self._ending_owners or self._watchers.has_pending_work)
                or now_s < alert_until_s
            )
            events = self._selector.select(0.0 if busy else max(0.0, next_tick_s - now_s))
            if events:
                alert_until_s = time.monotonic() + messages.BUSY_POLL_S
            eager, self._buffered_sessions = self._buffered_sessions, {}
            for session in eager.values():
                self._serve_session(session, 0)
            for key, mask in events:
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._growth:
                    self._index.placement.extend(self._growth.collect())
                elif key.data is not None and key.data.owner not in eager:
                    self._serve_session(key.data, mask)
            self._end_owners()
            self._watchers.step()
            if time.monotonic() >= next_tick_s:
                self._tick()
                next_tick_s = time.monotonic() + _TICK_S
        self._close_all()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as e:
            _log.error("cannot accept a client: %s", e.strerror)
            # The process has no free file descriptor. The listener stays readable, so the loop would spin
            # and delay connected clients. The next tick tries again.
            self._selector.unregister(self._listener)
            self._accepting = False
            return
        sock.setblocking(False)
        session = ClientSession(sock, next(self._owners), connected_s=time.monotonic())
        self._sessions[session.owner] = session
        self._selector.register(sock, selectors.EVENT_READ, session)
        try:
            session.check_peer()
        except ClientFault as e:
            self._disconnect(session, e)

    def _serve_session(self, session: ClientSession, mask: int) -> None:
        """Handle some requests of one client. Its remaining requests are handled after other clients'
        requests."""
        if session.owner not in self._sessions:
            return
        was_stuck = session.is_stuck
        try:
            if mask & selectors.EVENT_WRITE:
                session.flush()
            elif mask:
                session.read()
            end_s = time.monotonic() + _TURN_S
            while (body := session.next_frame()) is not None:
                self._handle_frame(session, body)
                if time.monotonic() > end_s:
                    self._buffered_sessions[session.owner] = session
                    break
            if session.is_stuck != was_stuck:
                wanted = selectors.EVENT_WRITE if session.is_stuck else selectors.EVENT_READ
                self._selector.modify(session.sock, wanted, session)
        except ClientFault as e:
            self._disconnect(session, e)

    def _handle_frame(self, session: ClientSession, body: bytes) -> None:
        if not session.is_welcomed:
            self._greet(session, body)
            return
        try:
            number, message = messages.split_number(body)
        except ProtocolError as e:
            raise ClientFault(str(e)) from e
        began_s = time.perf_counter()
        try:
            request = messages.request_decoder.decode(message)
            reply = self._execute(session.owner, request)
            self.telemetry.record_request(request, began_s)
        except _REQUEST_FAULTS as e:
            _log.warning("client %d: malformed request: %s", session.owner, e)
            reply = messages.RequestFault(f"{type(e).__name__}: {e}"[:_FAULT_CHARS])
        if reply is not None:
            session.send(reply, number=number)

    def _greet(self, session: ClientSession, body: bytes) -> None:
        try:
            hello = messages.request_decoder.decode(body)
        except _REQUEST_FAULTS as e:
            raise ClientFault(f"not a request: {e}") from e
        if not isinstance(hello, messages.ClientHello):
            raise ClientFault("the client sent a request before its hello")
        if hello.version != messages.PROTOCOL_VERSION:
            message = f"this store uses protocol {messages.PROTOCOL_VERSION}, the client {hello.version}"
            session.send(messages.ClientRejected("version", message))
            raise ClientFault(message)
        if hello.secret_tag != self._tag:
            message = "this store was started with another secret (store.secret_file)"
            session.send(messages.ClientRejected("secret", message))
            raise ClientFault(message)
        session.is_welcomed = True
        session.notes_page = self._notes.open_page()
        session.send(
            messages.DaemonWelcome(self._arena.id, self._arena.capacity_bytes, session.notes_page),
            fds=[self._arena.fd, self._fences.fd, self._table.fd, self._notes.fd],
        )

    def _execute(self, owner: int, request: messages.Request) -> messages.Reply | None:
        """Execute a request and return the reply to send, or None for a request without a reply. For a
        malformed request, raises one of _REQUEST_FAULTS before anything is changed."""
        index, now_s = self._index, time.monotonic()
        match request:
            case messages.ContainsRequest(keys):
                return messages.ContainsReply(
                    index.contains(messages.split_keys(keys, messages.MAX_LOOKUP_KEYS))
                )
            case messages.LeaseRequest(keys, ttl_s):
                check_ttl(ttl_s)
                asked = messages.split_keys(keys)
                leases = index.lease(owner, asked, ttl_s=ttl_s, now_s=now_s, reply_bytes=messages.BATCH_BYTES)
                return messages.LeaseReply(
                    max(leases.tokens, default=0), list(leases.metas), leases.locations
                )
            case messages.ReserveRequest(keys, sizes, app, part, only_seen, cost_s):
                wanted = list(zip(messages.split_keys(keys), sizes, strict=True))
                check_entries(wanted)
                terms = ReserveTerms(app, part, only_seen, cost_s)
                check_terms(terms)
                self._collect_reads()
                results = index.reserve(
                    owner, wanted, terms, now_s=now_s, truncate_after=messages.TRUNCATE_AFTER_EXAMINED
                )
                return messages.ReserveReply(
                    [a.value if isinstance(a, ReserveRefusal) else a for a in results]
                )
            case messages.CommitRequest(tokens, metas):
                messages.check_count(len(tokens))
                for meta in metas:
                    check_meta(meta)
                pairs = list(zip(tokens, metas, strict=True))
                # Commit the tail first, as if it were older, because the pages of one message continue each
                # other. If a token is repeated, its first occurrence counts.
                tail_first = dict(reversed(pairs))
                done = {token: index.commit(owner, token, meta) for token, meta in tail_first.items()}
                return messages.CommitReply([done.pop(token, False) for token in tokens])
            case messages.ReleaseRequest(tokens):
                messages.check_count(len(tokens), messages.MAX_TOKENS)
                index.release(owner, tokens, now_s=now_s)
                return None
            case messages.RecallRequest(keys, ticket):
                self._watchers.recall(messages.split_keys(keys), ticket)
                return None
            case messages.DeleteRequest(keys):
                return messages.DeleteReply(index.delete(messages.split_keys(keys)))
            case messages.StatRequest():
                self._collect_reads()
                return messages.StatReply(index.stat())
            case messages.PurgeRequest(rule, begins):
                self._collect_reads()
                return messages.PurgeReply(*index.purges.purge_batch(owner, rule, begins=begins, now_s=now_s))
            case _:
                raise ValueError(f"not a request: {type(request).__name__}")

    def _collect_reads(self) -> None:
        """Collect the reads that clients have noted. This is called before victims are chosen or counts are
        reported, and at each tick, so that the order of all clients' reads is about right."""
        for session in self._sessions.values():
            self._collect_reads_of(session)

    def _collect_reads_of(self, session: ClientSession) -> None:
        reads = self._notes.collect_reads(session.notes_page)
        if reads is not None:
            self._index.count_reads(reads)

    def _tick(self) -> None:
        self._renew_listener()
        now_s = time.monotonic()
        self._index.sweep(now_s)
        self._collect_reads()
        self.telemetry.tick()
        for session in list(self._sessions.values()):
            if not session.is_welcomed and now_s - session.connected_s > HELLO_TIMEOUT_S:
                self._disconnect(session, ClientFault("the client sent no hello"))
        if self._sessions:
            self._last_busy_s = now_s
        elif self._idle_exit_s and now_s - self._last_busy_s > self._idle_exit_s:
            _log.info("no client for %.0f s, so this store ends", self._idle_exit_s)
            self.stop = True

    def _renew_listener(self) -> None:
        listener = self._renew() if self._renew is not None else self._listener
        if listener is None:
            _log.warning("another store serves this socket now, so this store ends")
            self.stop = True
        elif listener is not self._listener or not self._accepting:
            if self._accepting:
                self._selector.unregister(self._listener)
            self._listener, self._accepting = listener, True
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def _disconnect(self, session: ClientSession, why: ClientFault) -> None:
        level = logging.DEBUG if str(why) == "closed" else logging.WARNING
        _log.log(level, "client %d ends: %s", session.owner, why)
        self._collect_reads_of(session)
        self._notes.free_page(session.notes_page)
        del self._sessions[session.owner]
        self._selector.unregister(session.sock)
        session.close()
        self._ending_owners.append(session.owner)

    def _end_owners(self) -> None:
        """End leases and reservations of disconnected clients in small steps, between requests of other
        clients."""
        if not self._ending_owners:
            return
        if not self._index.end_owner(self._ending_owners[0], now_s=time.monotonic(), limit=messages.MAX_KEYS):
            return
        self._ending_owners.popleft()
        if not self._sessions and not self._ending_owners:
            # The process runs without automatic collection (see `main.py`), so collect while no client waits.
            gc.collect()

    def _close_all(self) -> None:
        self._table.close()
        for session in list(self._sessions.values()):
            self._disconnect(session, ClientFault("closed"))
        self._watchers.close()
        self._growth.close()
        self._fences.close()
        self._notes.close()
        self._selector.close()
