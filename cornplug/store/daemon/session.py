"""One client of the daemon: its socket, its received bytes, the bytes that it has not read yet.

Knows frames and credentials; knows nothing of keys. Raises ClientFault where a connection
cannot go on: its other end is gone, or sends bytes that are no frames. Other clients do not notice.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final

from cornplug.errors import ProtocolError
from cornplug.local_socket import foreign_user
from cornplug.store import messages
from cornplug.store.table.use_notes import NO_PAGE

_CHUNK_BYTES: Final = 256 << 10


class ClientFault(Exception):
    """This client must go; the message says why."""


class ClientSession:
    """Buffers of one connection. `owner` is its number in the index."""

    def __init__(self, sock: socket.socket, owner: int, *, since_s: float) -> None:
        self.sock = sock
        self.owner = owner
        self.since_s = since_s
        self.welcomed = False
        self.notes_page = NO_PAGE
        self._received = bytearray()
        self._unsent = b""

    @property
    def stuck(self) -> bool:
        """The client does not read its answers: nothing more is read from it until it does."""
        return bool(self._unsent)

    def check_peer(self) -> None:
        """Raises ClientFault when another user is on the other end."""
        if (uid := foreign_user(self.sock)) is not None:
            raise ClientFault(f"user {uid} is not user {os.getuid()}")

    def read(self) -> None:
        """Read the bytes that have come. Raises ClientFault at the end."""
        try:
            data = self.sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e
        if not data:
            raise ClientFault("closed")
        self._received += data

    def next(self) -> bytes | None:
        """The body of the next whole frame, None while there is none, or while the client does not
        take its answers. Raises ClientFault for bytes that are no frames."""
        if self.stuck:
            return None
        try:
            return messages.take_frame(self._received)
        except ProtocolError as e:
            raise ClientFault(f"no frames: {e}") from e

    def send(self, reply: messages.Reply, *, number: int | None = None, fds: Sequence[int] = ()) -> None:
        """Send, and keep bytes that the socket does not take for `flush`. Raises ClientFault at its end."""
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
        """Send more of the kept bytes. Raises ClientFault when the client is gone."""
        try:
            self._unsent = self._unsent[self.sock.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError as e:
            raise ClientFault(f"connection lost: {e.strerror}") from e

    def close(self) -> None:
        self.sock.close()
