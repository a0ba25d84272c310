"""One connection of a client to the daemon: hello, arena, then one request at a time.

Not thread-safe, and unforgiving: after a timeout the next bytes would be the answer to an
older question, so whoever sees an error here closes the connection for good.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import time
from pathlib import Path
from typing import Final

import msgspec

from cornplug.errors import ConfigError
from cornplug.store import wire
from cornplug.store.arena import MappedArena

_CHUNK_BYTES: Final = 256 << 10
_CREDENTIALS: Final = struct.Struct("3i")


class Connection:
    """A greeted connection and the arena that came with it."""

    def __init__(self, path: Path, secret: bytes, *, timeout_s: float) -> None:
        """Connect and say hello.

        Raises OSError when nobody answers in time, ConfigError when the store will not talk
        to us (other protocol, other secret, other user)."""
        self._received = bytearray()
        self._answered_s = 0.0
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self._sock.close)
            self._sock.settimeout(timeout_s)
            self._sock.connect(str(path))
            self._check_peer(path)
            self.arena = self._hello(secret, time.monotonic() + timeout_s)
            on_error.pop_all()

    def send(self, frame: bytes, end_s: float) -> None:
        """Send a framed request until `end_s` (of time.monotonic). Raises TimeoutError or OSError."""
        self._sock.settimeout(max(end_s - time.monotonic(), 1e-6))
        self._sock.sendall(frame)

    def receive(self, end_s: float) -> wire.Reply:
        """The next answer. Raises TimeoutError or OSError, ValueError or msgspec's error for
        bytes that are no answer."""
        now_s = time.monotonic()
        # A daemon that has just answered is awake, so sleeping here would cost more than its
        # answer; one that sleeps is woken best on this very core, by sleeping too.
        awake = now_s - self._answered_s < wire.ALERT_S
        alert_until_s = min(now_s + wire.ALERT_S / 2, end_s) if awake else 0.0
        while (body := wire.take_frame(self._received)) is None:
            data = self._wait(alert_until_s, end_s)
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._received += data
        self._answered_s = time.monotonic()
        reply: wire.Reply = wire.reply_decoder.decode(body)
        return reply

    def wait_end(self) -> None:
        """Return when the other side is gone or `shutdown` was called here."""
        poller = select.poll()
        poller.register(self._sock, select.POLLRDHUP)
        poller.poll()

    def shutdown(self) -> None:
        """End the connection now; `close` frees its descriptor. Safe from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor. In a forked child this leaves the parent's connection alone."""
        self._sock.close()

    def _wait(self, alert_until_s: float, end_s: float) -> bytes:
        if alert_until_s:
            self._sock.setblocking(False)
        while time.monotonic() < alert_until_s:
            with contextlib.suppress(BlockingIOError):
                return self._sock.recv(_CHUNK_BYTES)
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left_s)
        return self._sock.recv(_CHUNK_BYTES)

    def _check_peer(self, path: Path) -> None:
        raw = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(raw)
        if uid != os.getuid():
            raise ConfigError("store.socket", f"{path} is served by user {uid}", "Name a socket of yours.")

    def _hello(self, secret: bytes, end_s: float) -> MappedArena:
        self._sock.sendall(wire.frame(wire.Hello(wire.PROTOCOL_VERSION, wire.secret_tag(secret))))
        data, fds, _, _ = socket.recv_fds(self._sock, _CHUNK_BYTES, 1)
        try:
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._received += data
            try:
                reply = self.receive(end_s)
            except msgspec.MsgspecError as e:
                raise ConnectionResetError(f"no store answers there: {e}") from e
            if isinstance(reply, wire.Rejected):
                field = "store.secret_file" if reply.reason == "secret" else "store.socket"
                raise ConfigError(field, reply.message, _REMEDIES[reply.reason])
            if not isinstance(reply, wire.Welcome) or not fds:
                raise ConnectionResetError("no store answers there")
            return MappedArena(fds[0], reply.arena_id, reply.capacity_bytes)
        finally:
            for fd in fds:
                os.close(fd)


_REMEDIES: Final = {
    "secret": "Use one secret file for all who share a store, or another store.socket.",
    "version": "Stop the old store (it ends once idle), or name another store.socket.",
}
