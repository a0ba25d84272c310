"""Unix sockets for processes of one user: frames, exclusive claims of a path, and the peer's user.

    frame   u32 little-endian length, then a body of that length, at least 1 byte
    claim   PATH.lock    file that the server has locked; the lock is void if PATH.lock is another file
            PATH         socket of the process that holds the lock, mode 0600
    peer    SO_PEERCRED: the user that connected, or that started to listen

A claim compares the inodes of these files with its open files. If a cleaner of /tmp has removed a file, or
another process has replaced it, the claim creates the file again. A claim never removes another process's
file.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import logging
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cornplug.errors import ConfigError, ProtocolError, SocketTaken
from cornplug.private_paths import open_file, open_folder

if TYPE_CHECKING:
    from asyncio import StreamReader

_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")
"""Layout of Linux's `struct ucred`: pid, uid and gid."""
_CHUNK_BYTES: Final = 1 << 20
_BACKLOG: Final = 128
_RETRY_S: Final = 0.05
_TOUCH_S: Final = 3600.0
"""Interval in seconds at which the timestamps of the socket, its lock and its folder are updated, because
cleaners of /tmp remove files that are a few days old."""

_log = logging.getLogger("cornplug.local_socket")

_Inode = tuple[int, int]


# -- frames --


def frame(body: bytes, *, limit: int) -> bytes:
    """Return the frame for a body. Raises ValueError if the body has more than `limit` bytes."""
    if len(body) > limit:
        raise ValueError(f"message has {len(body)} bytes, the limit is {limit}")
    return _LENGTH.pack(len(body)) + body


def take_frame(buffer: bytearray, *, limit: int) -> bytes | None:
    """Remove the first frame from `buffer` and return its body, or None if the frame is incomplete.

    Raises ProtocolError if the length is 0 or above `limit`.
    """
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _checked(_LENGTH.unpack_from(buffer)[0], limit)
    if len(buffer) < end:
        return None
    body = bytes(memoryview(buffer)[_LENGTH.size : end])
    del buffer[:end]
    return body


def receive_frame(sock: socket.socket, *, limit: int) -> bytes:
    """Receive a frame from a blocking socket and return its body.

    Raises ProtocolError if the length is 0 or above `limit`, ConnectionResetError if the peer closed the
    connection, and TimeoutError after the socket's timeout.
    """
    (size,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    return _receive_exactly(sock, _checked(size, limit))


async def read_frame(reader: StreamReader, *, limit: int) -> bytes:
    """Read a frame from a stream and return its body.

    Raises ProtocolError if the length is 0 or above `limit`, and IncompleteReadError at the end of the
    stream.
    """
    return await reader.readexactly(await read_frame_length(reader, limit=limit))


async def read_frame_length(reader: StreamReader, *, limit: int) -> int:
    """Read the length of the next frame's body from a stream.

    Raises the same errors as `read_frame`.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return _checked(size, limit)


def _checked(size: int, limit: int) -> int:
    if not 0 < size <= limit:
        raise ProtocolError(f"frame has {size} bytes, must be between 1 and {limit}")
    return size


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = sock.recv(min(size - len(data), _CHUNK_BYTES))
        if not more:
            raise ConnectionResetError("connection closed by the peer")
        data += more
    return bytes(data)


class FrameBuffer:
    """Buffers unsent and partially received frames of a non-blocking socket. Not thread-safe.

    Args:
        limit: Maximum size of a body in bytes, in both directions.
    """

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._out: collections.deque[tuple[int, memoryview]] = collections.deque()
        self._sent_of_first = 0
        self._in = bytearray()
        self.unsent_bytes = 0

    def add(self, number: int, body: bytes) -> None:
        """Queue a frame. `number` identifies the frame for `drop`. Raises ValueError if the body is too
        large."""
        whole = memoryview(frame(body, limit=self._limit))
        self._out.append((number, whole))
        self.unsent_bytes += len(whole)

    def drop(self, numbers: set[int]) -> None:
        """Remove the frames with these numbers from the queue, except a frame that has been sent in part."""
        kept: collections.deque[tuple[int, memoryview]] = collections.deque()
        for place, (number, whole) in enumerate(self._out):
            if number in numbers and not (place == 0 and self._sent_of_first):
                self.unsent_bytes -= len(whole)
            else:
                kept.append((number, whole))
        self._out = kept

    def clear(self) -> None:
        """Discard all unsent and received data, for example after the end of a connection."""
        self._out.clear()
        self._in.clear()
        self._sent_of_first = 0
        self.unsent_bytes = 0

    def send(self, sock: socket.socket) -> None:
        """Send as many queued bytes as the socket accepts without blocking.

        Raises OSError if the connection is closed.
        """
        while self._out:
            whole = self._out[0][1]
            try:
                sent = sock.send(whole[self._sent_of_first :])
            except BlockingIOError:
                return
            self._sent_of_first += sent
            self.unsent_bytes -= sent
            if self._sent_of_first == len(whole):
                self._out.popleft()
                self._sent_of_first = 0

    def receive(self, sock: socket.socket) -> Iterator[bytes]:
        """Receive data and yield the bodies of all complete frames.

        Raises ProtocolError if a length is invalid, ConnectionResetError if the peer closed the connection,
        and OSError if the connection failed.
        """
        try:
            data = sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("connection closed by the peer")
        self._in += data
        while (body := take_frame(self._in, limit=self._limit)) is not None:
            yield body


# -- the peer --


def foreign_user(sock: socket.socket) -> int | None:
    """Return the peer's user id if the peer is another user, or None if it is this process's user.

    The peer of a server is the user that connected. The peer of a client is the user that started to listen.
    """
    uid: int = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[
        1
    ]
    return None if uid == os.getuid() else uid


# -- claims of a path --


def try_lock(fd: int) -> bool:
    """Try to lock an open file exclusively, and return whether it is locked now.

    The lock lasts until the last descriptor of the file is closed.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class SocketClaim:
    """Exclusive claim of a socket path, with the socket that listens on it.

    Args:
        setting: Name of the setting that contains the path, for error messages.
        wait_s: Maximum time in seconds to wait for the lock if another process is about to end.

    Raises SocketTaken if another process is listening on the path. Raises ConfigError if the path cannot be a
    socket, or if another user could create a socket there.
    """

    def __init__(self, path: Path, *, setting: str, wait_s: float = 0.0) -> None:
        self._path = path
        self._setting = setting
        self._lock_name = path.name + ".lock"
        self._folder = self._lock = -1
        self._socket: _Inode | None = None
        self._touched_s = time.monotonic()
        self._logged = ""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._take(wait_s=wait_s)
        except OSError as e:
            self.close()
            raise ConfigError(setting, f"{path}: {e.strerror}", "Use another path.") from e
        except ConfigError:
            self.close()
            raise

    def renew(self) -> socket.socket | None:
        """Claim the path again if its files were removed, and return the listening socket.

        The socket is new if the path was claimed again. Returns None if another process has claimed the path.
        """
        try:
            if not self._stands():
                _log.warning("%s or its lock was removed or replaced: trying to create it again", self._path)
                self._take(wait_s=0.0)
            self._touch()
            self._logged = ""
        except SocketTaken:
            return None
        except (OSError, ConfigError) as e:
            # Keep serving connected clients. Without the folder, another process cannot claim the path
            # either.
            if str(e) != self._logged:
                _log.warning("new clients cannot connect to %s: %s", self._path, e)
            self._logged = str(e)
        return self.listener

    def close(self) -> None:
        """Release the claim, and remove the socket's file if it still belongs to this claim."""
        with contextlib.suppress(OSError):
            if self._stands():
                os.unlink(self._path.name, dir_fd=self._folder)
        self.listener.close()
        for fd in (self._lock, self._folder):
            if fd >= 0:
                os.close(fd)
        self._lock = self._folder = -1

    def _stands(self) -> bool:
        here, open_here = self._inode(self._path.parent, None), _inode(os.fstat(self._folder))
        lock = self._inode(self._lock_name, self._folder)
        return (
            here == open_here
            and lock == _inode(os.fstat(self._lock))
            and self._socket is not None
            and self._inode(self._path.name, self._folder) == self._socket
        )

    def _take(self, *, wait_s: float) -> None:
        folder = open_folder(self._path.parent, setting=self._setting)
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = folder
        self._take_lock(time.monotonic() + wait_s)
        if self._socket is None or self._inode(self._path.name, folder) != self._socket:
            self._listen()

    def _take_lock(self, give_up_s: float) -> None:
        while self._lock < 0 or self._inode(self._lock_name, self._folder) != _inode(os.fstat(self._lock)):
            fd = open_file(self._folder, self._lock_name, os.O_RDWR)
            if not try_lock(fd):
                os.close(fd)
                if time.monotonic() >= give_up_s:
                    raise SocketTaken(self._setting, self._path)
                time.sleep(_RETRY_S)
                continue
            if self._lock >= 0:
                os.close(self._lock)
            # Check again, because the file may have been replaced before it was locked.
            self._lock = fd

    def _listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path.name, dir_fd=self._folder)
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            fresh.bind(str(self._path))
            fresh.listen(_BACKLOG)
            self._socket = self._inode(self._path.name, self._folder)
        except OSError as e:
            fresh.close()
            problem = f"cannot listen on {self._path}: {e}"
            raise ConfigError(self._setting, problem, "Use a shorter path.") from e
        finally:
            os.umask(mask)
        self.listener.close()
        self.listener = fresh

    def _touch(self) -> None:
        if time.monotonic() - self._touched_s > _TOUCH_S:
            self._touched_s = time.monotonic()
            os.utime(self._path.name, dir_fd=self._folder)
            for fd in (self._lock, self._folder):
                os.utime(fd)

    @staticmethod
    def _inode(name: str | Path, folder: int | None) -> _Inode | None:
        try:
            return _inode(os.stat(name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return None


def _inode(about: os.stat_result) -> _Inode:
    return about.st_dev, about.st_ino
