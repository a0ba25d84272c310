"""Process with a NIXL agent, which replies to its daemon (`client_process.py`) and to the processes of the
other members. A member is a host of the far store.

    put            ──> only this member's memory
    exists, delete ──> all members, by `MemberChannel`
    get            ──> the member that has the record writes it into this member's memory, by NIXL

Members exchange messages over TCP, authenticated by the domain's secret:

    asker ──> listener    16 random bytes; the listener replies with 16 random bytes
    message               u32 length | 16 bytes of HMAC-SHA256(key, direction | number | body) | body

The key is derived from the secret and both sides' random bytes, so that no message is valid on another
connection, in the other direction or a second time. Bodies are not encrypted.

Only members of the domain receive the addresses to which NIXL may write, in authenticated messages. NIXL's
own exchange of metadata is not authenticated. Records are sealed, so NIXL's transfers need not be trusted.

Usage: nixl_client.py DESCRIPTOR ... < SETTINGS
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Final, Literal

import msgspec

from cornplug.store.far.client_process import FarReply, FarRequest, read_settings, serve
from cornplug.store.far.nixl_agent import NixlAgent, RecordRing

MAX_RECORD_BYTES: Final = 32 << 20
_REPLY_TIMEOUT_S: Final = 0.2
"""Deadline for the replies of all members in seconds. The daemon's deadline for a lookup is 0.25 s."""
_TRANSFER_TIMEOUT_S: Final = 1.5
"""Deadline for the transfer of a record in seconds. The daemon's deadline for a transfer is 2 s."""
_PROGRESS_S: Final = 0.0001
_RETRY_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0)
_MAX_CALLERS: Final = 64
_MAX_FOUND: Final = 1 << 16
MAX_MESSAGE_BYTES: Final = 1 << 20
_NONCE_BYTES: Final = 16
_MAC_BYTES: Final = 16
_CHANNEL_DOMAIN: Final = b"cornplug member 1"
_REST_TIMEOUT: Final = struct.pack("@ll", 2, 0)
"""Time limit for the rest of a message whose first bytes have arrived. This is 2 s as `struct timeval`."""


class MemberSettings(msgspec.Struct, frozen=True):
    """Members of a domain, and the memory that this member contributes."""

    members: Sequence[tuple[str, int]]
    """Hosts and ports of all members, including this one."""
    own: int
    """Index of this member in `members`. -1: this member is the first in the list whose address belongs to
    this host and whose port is free."""
    segment_bytes: int
    """Size of the memory for records that this member contributes."""
    key: bytes
    """Key derived from the domain's secret."""


class MemberRequest(msgspec.Struct, array_like=True):
    """Request from one member to another."""

    call: Literal["join", "exists", "send", "delete"]
    names: Sequence[str] = ()
    metadata: bytes = b""
    """For "join": metadata of the sender's agent."""
    member: int = 0
    """For "join": index of the sender."""
    address: int = 0
    """For "send": address of the requesting member's receive buffer for the record."""


class MemberReply(msgspec.Struct, array_like=True):
    """Reply to a `MemberRequest`."""

    there: Sequence[bool] = ()
    size_bytes: int = -1
    """Size of the record that was sent, in bytes. -1: there is no record of this name."""


class RemoteMember:
    """Connection from this member, whose index is `own_index`, to another member. A thread connects, and
    reconnects after a failure."""

    def __init__(self, address: tuple[str, int], key: bytes, agent: NixlAgent, own_index: int) -> None:
        self._address, self._key, self._agent, self._own_index = address, key, agent, own_index
        self.lock = threading.Lock()
        """Lock that a caller holds from sending a request until the reply arrives."""
        self._channel: MemberChannel | None = None
        self._attempted, self._disconnected, self._connect_requested = (
            threading.Event(),
            threading.Event(),
            threading.Event(),
        )
        threading.Thread(target=self._keep_connected, name="cornplug-member", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Whether requests can be sent."""
        return self._channel is not None

    def wait_for_attempt(self, within_s: float) -> None:
        """Wait until the first attempt to connect has ended."""
        self._attempted.wait(within_s)

    def connect_now(self) -> None:
        """Let the thread connect immediately, because the other member has connected to this member and is
        therefore running."""
        self._connect_requested.set()

    def send(self, request: MemberRequest) -> bool:
        """Send a request, and return whether it was sent. The caller must hold `lock`."""
        channel = self._channel
        if channel is None:
            return False
        try:
            channel.send(msgspec.msgpack.encode(request))
        except (OSError, EOFError) as e:
            self._disconnect(e)
            return False
        return True

    def receive_reply(self, end_s: float, *, run_nixl: bool = False) -> MemberReply | None:
        """Return the reply to the last request, or None if it does not arrive in time. The caller must hold
        `lock`.

        Args:
            run_nixl: Whether to let NIXL process incoming data during the wait.
        """
        channel = self._channel
        if channel is None:
            return None
        left_s = max(0.001, end_s - time.monotonic())
        try:
            body = channel.receive(left_s, self._agent.progress if run_nixl else None, _PROGRESS_S)
            return msgspec.msgpack.decode(body, type=MemberReply)
        except (OSError, EOFError, msgspec.MsgspecError) as e:
            self._disconnect(e)
            return None

    def _disconnect(self, why: Exception) -> None:
        """Close the connection, because a late reply would be mistaken for the reply to another request."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()
            _log_line(
                f"member {self._address[0]}:{self._address[1]} does not respond: {type(why).__name__} {why}"
            )
            self._disconnected.set()

    def _keep_connected(self) -> None:
        failures = 0
        while True:
            try:
                connected = socket.create_connection(self._address, timeout=_REPLY_TIMEOUT_S * 5)
                channel = MemberChannel(connected, self._key, is_client=True, within_s=_REPLY_TIMEOUT_S * 5)
                join = MemberRequest("join", metadata=self._agent.metadata, member=self._own_index)
                channel.send(msgspec.msgpack.encode(join))
                channel.receive(_REPLY_TIMEOUT_S * 10)
            except (OSError, EOFError):
                self._attempted.set()
                self._connect_requested.wait(_RETRY_S[min(failures, len(_RETRY_S) - 1)])
                self._connect_requested.clear()
                failures += 1
                continue
            failures = 0
            self._disconnected.clear()
            self._channel = channel
            self._attempted.set()
            self._disconnected.wait()


class Member:
    """This member. It replies to its daemon's calls with its own records and the records of other members."""

    def __init__(self, agent: NixlAgent, others: Mapping[int, RemoteMember]) -> None:
        self._agent, self._others_by_index, self._others = agent, others, list(others.values())
        self._ring = RecordRing(agent.segment.view)
        self._last_holder: OrderedDict[str, RemoteMember] = OrderedDict()
        """Member that was last found to have a record, by the record's name."""

    def handle(self, request: FarRequest) -> FarReply:
        """Execute a call of this member's daemon and return the reply."""
        names = list(request.names)
        try:
            match request.call:
                case "put":
                    self._ring.put(names[0], request.record)
                    return FarReply()
                case "delete":
                    for name in names:
                        self._ring.delete(name)
                    replies = self._request_all(MemberRequest("delete", names))
                    if len(replies) < len(self._others):
                        # A disconnected member may still have the records. The daemon deletes them again.
                        return FarReply(failure="not every member has deleted the records")
                    return FarReply()
                case "exists":
                    return FarReply(there=self._find(names))
                case "get":
                    return FarReply(record=self._get(names[0]))
        except (OSError, ValueError) as e:
            return FarReply(failure=str(e))

    def handle_member(self, request: MemberRequest, sender: str) -> MemberReply:
        """Execute a request of another member, whose agent has the name `sender`, and return the reply."""
        match request.call:
            case "join":
                if request.member in self._others_by_index:
                    self._others_by_index[request.member].connect_now()
            case "exists":
                return MemberReply(there=[name in self._ring for name in request.names])
            case "send":
                with self._ring.hold(request.names[0]) as place:
                    if place is None:
                        return MemberReply()
                    self._agent.send(place, sender, request.address, _TRANSFER_TIMEOUT_S)
                    return MemberReply(size_bytes=place[1])
            case "delete":
                for name in request.names:
                    self._ring.delete(name)
        return MemberReply()

    def _find(self, names: Sequence[str]) -> list[bool]:
        there = [name in self._ring for name in names]
        for other, reply in self._request_all(MemberRequest("exists", names)):
            for number, has in enumerate(reply.there[: len(names)]):
                if has and not there[number]:
                    there[number] = True
                    self._last_holder[names[number]] = other
        while len(self._last_holder) > _MAX_FOUND:
            self._last_holder.popitem(last=False)
        return there

    def _request_all(self, request: MemberRequest) -> list[tuple[RemoteMember, MemberReply]]:
        """Send a request to all connected members. Return the replies that arrive within
        `_REPLY_TIMEOUT_S`."""
        end_s = time.monotonic() + _REPLY_TIMEOUT_S
        asked = []
        with contextlib.ExitStack() as locks:
            for other in self._others:
                if other.is_connected and other.lock.acquire(timeout=max(0.0, end_s - time.monotonic())):
                    locks.callback(other.lock.release)
                    if other.send(request):
                        asked.append(other)
            replies = [(other, other.receive_reply(end_s)) for other in asked]
        return [(other, reply) for other, reply in replies if reply is not None]

    def _get(self, name: str) -> bytes | None:
        own = self._ring.get(name)
        if own is not None:
            return own
        first = self._last_holder.pop(name, None)
        others = sorted(self._others, key=lambda other: other is not first)
        end_s = time.monotonic() + _TRANSFER_TIMEOUT_S
        for other in others:
            if not other.is_connected:
                continue
            left_s = max(0.0, end_s - time.monotonic())
            with contextlib.suppress(TimeoutError), self._agent.receive_buffer(left_s) as buffer, other.lock:
                if not other.send(MemberRequest("send", [name], address=buffer.address)):
                    continue
                reply = other.receive_reply(end_s, run_nixl=True)
                if reply is None:
                    raise TimeoutError  # The memory is not reused yet, because the record may still arrive.
                if 0 <= reply.size_bytes <= buffer.view.nbytes:
                    return bytes(buffer.view[: reply.size_bytes])
        return None


class Listener:
    """Accepts connections from other members, and serves each connection on its own thread."""

    def __init__(self, listening: socket.socket, key: bytes, agent: NixlAgent, member: Member) -> None:
        self._listening, self._key, self._agent, self._member = listening, key, agent, member
        self._free_slots = threading.Semaphore(_MAX_CALLERS)
        threading.Thread(target=self._accept, name="cornplug-members", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connected, _ = self._listening.accept()
            if not self._free_slots.acquire(blocking=False):
                connected.close()
                continue
            # Keepalive detects a host that has lost its power, so that the connection's thread ends.
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            threading.Thread(target=self._serve, args=(connected,), daemon=True).start()

    def _serve(self, connected: socket.socket) -> None:
        channel, asker = None, ""
        try:
            channel = MemberChannel(connected, self._key, is_client=False, within_s=_REPLY_TIMEOUT_S * 5)
            within_s: float | None = _REPLY_TIMEOUT_S * 5
            while True:
                question = msgspec.msgpack.decode(channel.receive(within_s), type=MemberRequest)
                if not asker:
                    asker, within_s = self._agent.add_agent(question.metadata), None
                channel.send(msgspec.msgpack.encode(self._member.handle_member(question, asker)))
        except EOFError:
            pass
        except (OSError, msgspec.MsgspecError) as e:
            _log_line(f"the connection from another member ended: {type(e).__name__} {e}")
        finally:
            if asker:
                self._agent.remove_agent(asker)
            if channel is not None:
                channel.close()
            self._free_slots.release()


def main(settings: MemberSettings, descriptors: Sequence[int]) -> None:
    """Reply to the daemon's calls until the daemon has closed all sockets."""
    number, listening = _listen(settings)
    try:
        agent = NixlAgent(segment_bytes=settings.segment_bytes, buffer_bytes=MAX_RECORD_BYTES)
    except ImportError as e:
        sys.exit(f"cornplug: cannot import NIXL: {e}. Run: pip install 'cornplug[far-nixl]'")
    others = {
        i: RemoteMember(address, settings.key, agent, number)
        for i, address in enumerate(settings.members)
        if i != number
    }
    member = Member(agent, others)
    Listener(listening, settings.key, agent, member)
    # Connect to the members that are running before the daemon's first requests are handled.
    for other in others.values():
        other.wait_for_attempt(_REPLY_TIMEOUT_S)
    serve(member.handle, descriptors)
    # Skip NIXL's shutdown, because it waits for other agents, and there is nothing to save.
    os._exit(0)


def _listen(settings: MemberSettings) -> tuple[int, socket.socket]:
    """Return the index of this member, and a socket that listens on its address."""
    problem = ""
    for number, (host, port) in enumerate(settings.members):
        if settings.own not in (-1, number):
            continue
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            return number, socket.create_server((address[0], port), family=family)
        except OSError as e:
            problem = f"{host}:{port}: {e}"
    sys.exit(
        f"cornplug: none of the members of nixl:// is an address of this host with a free port ({problem}). "
        "Add its address to the list."
    )


def _log_line(what: str) -> None:
    print(f"cornplug: nixl://: {what}", file=sys.stderr, flush=True)


class MemberChannel:
    """Authenticated connection to another member, used by one thread at a time. Calls raise OSError or
    EOFError if the connection fails. The channel is then unusable.

    Args:
        connected: TCP connection, which the channel closes.
        key: Key derived from the domain's secret.
        is_client: Whether this side opened the connection.
        within_s: Maximum time in seconds that the constructor waits for the exchange of random bytes.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, is_client: bool, within_s: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _REST_TIMEOUT)
        self._connection = Connection(connected.detach())
        try:
            mine = secrets.token_bytes(_NONCE_BYTES)
            self._connection.send_bytes(mine)
            theirs = self._receive_bytes(within_s, _NONCE_BYTES)
        except BaseException:
            self._connection.close()
            raise
        asker, listener = (mine, theirs) if is_client else (theirs, mine)
        self._key = hmac.digest(key, _CHANNEL_DOMAIN + asker + listener, hashlib.sha256)
        # Each direction has its own mark, so that a message that is sent back to its sender is not valid.
        self._send_mark, self._receive_mark = (b">", b"<") if is_client else (b"<", b">")
        self._send_numbers, self._receive_numbers = itertools.count(), itertools.count()

    def send(self, body: bytes) -> None:
        """Send a message of at most `MAX_MESSAGE_BYTES`."""
        self._connection.send_bytes(self._mac(self._send_mark, next(self._send_numbers), body) + body)

    def receive(
        self, within_s: float | None, on_idle: Callable[[], object] | None = None, interval_s: float = 0.0
    ) -> bytes:
        """Return the next message. Until it arrives, call `on_idle` repeatedly, with pauses of `interval_s`.

        Raises TimeoutError after `within_s`. Raises PermissionError if the message is not authenticated as
        the next message to this side.
        """
        message = self._receive_bytes(within_s, MAX_MESSAGE_BYTES + _MAC_BYTES, on_idle, interval_s)
        mac, body = message[:_MAC_BYTES], message[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._receive_mark, next(self._receive_numbers), body)):
            raise PermissionError(
                "the other side does not have this domain's secret, or its messages were changed"
            )
        return body

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _mac(self, direction: bytes, number: int, body: bytes) -> bytes:
        text = direction + number.to_bytes(8, "little") + body
        return hmac.digest(self._key, text, hashlib.sha256)[:_MAC_BYTES]

    def _receive_bytes(
        self,
        within_s: float | None,
        max_bytes: int,
        on_idle: Callable[[], object] | None = None,
        interval_s: float = 0.0,
    ) -> bytes:
        end_s = None if within_s is None else time.monotonic() + within_s
        while True:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if self._connection.poll(left_s if on_idle is None else interval_s):
                return self._connection.recv_bytes(max_bytes)
            if left_s == 0.0:
                raise TimeoutError(f"no message within {within_s:g} s")
            if on_idle is not None:
                on_idle()


if __name__ == "__main__":
    main(read_settings(MemberSettings), [int(number) for number in sys.argv[1:]])
