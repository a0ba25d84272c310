"""One client of the daemon: its socket, what it has sent so far, what it has not read yet.

Knows frames and credentials; knows nothing of keys. Raises ClientFault for whatever a
well-behaved client never does: the daemon ends that one connection, and nobody else notices.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from typing import Final

import msgspec

from cornplug.store import wire

_CHUNK_BYTES: Final = 256 << 10
_CREDENTIALS: Final = struct.Struct("3i")


class ClientFault(Exception):
    """This client must go; the message says why."""


class Session:
    """Buffers of one connection. `owner` is its number in the index."""

    def __init__(self, sock: socket.socket, owner: int, *, since_s: float) -> None:
        self.sock = sock
        self.owner = owner
        self.since_s = since_s
        self.welcomed = False
        self._received = bytearray()
        self._unsent = b""

    @property
    def stuck(self) -> bool:
        """The client does not read its answers: nothing more is read from it until it does."""
        return bool(self._unsent)

    def check_peer(self) -> None:
        """Raises ClientFault when another user is on the other end."""
        raw = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            raise ClientFault(f"user {uid} is not user {os.getuid()}")

    def requests(self) -> Iterator[wire.Request]:
        """Read once and yield each whole request. Raises ClientFault for garbage or at the end."""
        try:
            data = self.sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e
        if not data:
            raise ClientFault("closed")
        self._received += data
        yield from self.waiting()

    def waiting(self) -> Iterator[wire.Request]:
        """Requests already received, as long as the client takes its answers."""
        while not self.stuck:
            try:
                body = wire.take_frame(self._received)
                if body is None:
                    return
                request = wire.request_decoder.decode(body)
            except (msgspec.MsgspecError, ValueError) as e:
                raise ClientFault(f"not a request: {e}") from e
            yield request

    def send(self, reply: wire.Reply, *, fd: int | None = None) -> None:
        """Send, or keep for `flush` what the socket does not take. Raises ClientFault when it is gone."""
        data = wire.frame(reply)
        try:
            sent = self.sock.send(data) if fd is None else socket.send_fds(self.sock, [data], [fd])
        except BlockingIOError:
            sent = 0
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e
        self._unsent = data[sent:]

    def flush(self) -> None:
        """Send more of what is kept. Raises ClientFault when the client is gone."""
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e

    def close(self) -> None:
        self.sock.close()
