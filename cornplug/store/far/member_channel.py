"""Messages between two members of a sharing domain, over TCP, authenticated by the domain's secret.

    asker ──> listener    16 random bytes; the listener replies with 16 random bytes
    message               u32 length | 16 bytes of HMAC-SHA256(key, direction | number | body) | body

The key is derived from the secret and both sides' random bytes, so that no message is valid on another
connection, in the other direction or a second time. Bodies are not encrypted.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import secrets
import socket
import struct
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final

MOST_BYTES: Final = 1 << 20
_NONCE_BYTES: Final = 16
_MAC_BYTES: Final = 16
_DOMAIN: Final = b"cornplug member 1"
_REST: Final = struct.pack("@ll", 2, 0)
"""Time limit for the rest of a message whose first bytes have arrived. This is 2 s as `struct timeval`."""


class MemberChannel:
    """Authenticated connection to another member, used by one thread at a time. Calls raise OSError or
    EOFError. After such an error, the channel is unusable.

    Args:
        connected: TCP connection, which the channel closes.
        key: Key derived from the domain's secret.
        asks: Whether this side opened the connection.
        within_s: Maximum time in seconds that the constructor waits for the exchange of random bytes.
    """

    def __init__(self, connected: socket.socket, key: bytes, *, asks: bool, within_s: float) -> None:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connected.setsockopt(socket.SOL_SOCKET, option, _REST)
        self._connection = Connection(connected.detach())
        try:
            mine = secrets.token_bytes(_NONCE_BYTES)
            self._connection.send_bytes(mine)
            theirs = self._take(within_s, _NONCE_BYTES)
        except BaseException:
            self._connection.close()
            raise
        asker, listener = (mine, theirs) if asks else (theirs, mine)
        self._key = hmac.digest(key, _DOMAIN + asker + listener, hashlib.sha256)
        # Each direction has its own mark, so that a side's own message is not valid for itself.
        self._sends, self._gets = (b">", b"<") if asks else (b"<", b">")
        self._sent, self._got = itertools.count(), itertools.count()

    def send(self, body: bytes) -> None:
        """Send a message of at most `MOST_BYTES`."""
        self._connection.send_bytes(self._mac(self._sends, next(self._sent), body) + body)

    def receive(
        self, within_s: float | None, meanwhile: Callable[[], object] | None = None, every_s: float = 0.0
    ) -> bytes:
        """Return the next message. Until it arrives, call `meanwhile` repeatedly, with pauses of `every_s`.

        Raises TimeoutError after `within_s`. Raises PermissionError if the message is not authenticated as
        the next message to this side.
        """
        message = self._take(within_s, MOST_BYTES + _MAC_BYTES, meanwhile, every_s)
        mac, body = message[:_MAC_BYTES], message[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self._gets, next(self._got), body)):
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

    def _take(
        self,
        within_s: float | None,
        most_bytes: int,
        meanwhile: Callable[[], object] | None = None,
        every_s: float = 0.0,
    ) -> bytes:
        end_s = None if within_s is None else time.monotonic() + within_s
        while True:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if self._connection.poll(left_s if meanwhile is None else every_s):
                return self._connection.recv_bytes(most_bytes)
            if left_s == 0.0:
                raise TimeoutError(f"no message within {within_s:g} s")
            if meanwhile is not None:
                meanwhile()
