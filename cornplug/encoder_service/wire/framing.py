"""Length-prefixed frames over a non-blocking socket. Knows no messages, keeps no clock."""

from __future__ import annotations

import collections
import socket
import struct
from collections.abc import Iterator
from typing import Final

from cornplug.encoder_service.wire.messages import MAX_FRAME_BYTES

LENGTH: Final = struct.Struct("<I")
_CHUNK_BYTES: Final = 1 << 20


class ProtocolError(ValueError):
    """The other side does not send frames of ours."""


class FrameBuffer:
    """What is to be sent, and what has come so far. Not thread-safe: its owner locks."""

    def __init__(self) -> None:
        self._out: collections.deque[tuple[int, memoryview]] = collections.deque()
        self._sent_of_first = 0
        self._in = bytearray()
        self.unsent_bytes = 0

    def add(self, number: int, frame: bytes) -> None:
        """Queue a frame; `number` names it for `drop`. ValueError when it is over the limit."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(frame)} bytes, at most {MAX_FRAME_BYTES}")
        whole = memoryview(LENGTH.pack(len(frame)) + frame)
        self._out.append((number, whole))
        self.unsent_bytes += len(whole)

    def drop(self, numbers: set[int]) -> None:
        """Forget frames that nobody waits for, except one whose first bytes are sent."""
        kept: collections.deque[tuple[int, memoryview]] = collections.deque()
        for place, (number, frame) in enumerate(self._out):
            if number in numbers and not (place == 0 and self._sent_of_first):
                self.unsent_bytes -= len(frame)
            else:
                kept.append((number, frame))
        self._out = kept

    def clear(self) -> None:
        """Forget everything, as after the end of a connection."""
        self._out.clear()
        self._in.clear()
        self._sent_of_first = 0
        self.unsent_bytes = 0

    def send(self, sock: socket.socket) -> None:
        """Send what the socket takes now. Raises OSError when the connection is gone."""
        while self._out:
            frame = self._out[0][1]
            try:
                sent = sock.send(frame[self._sent_of_first :])
            except BlockingIOError:
                return
            self._sent_of_first += sent
            self.unsent_bytes -= sent
            if self._sent_of_first == len(frame):
                self._out.popleft()
                self._sent_of_first = 0

    def receive(self, sock: socket.socket) -> Iterator[bytes]:
        """Whole frames that have come. Raises Garbage for a length out of bounds,
        ConnectionResetError at the end of the connection, OSError when it is broken."""
        try:
            data = sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("closed by the other side")
        self._in += data
        at = 0
        while len(self._in) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._in, at)
            if not 0 < size <= MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes")
            end = at + LENGTH.size + size
            if len(self._in) < end:
                break
            with memoryview(self._in) as whole:
                frame = bytes(whole[at + LENGTH.size : end])
            yield frame
            at = end
        del self._in[:at]
