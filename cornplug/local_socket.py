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
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError, ProtocolError, SocketInUse
from cornplug.private_paths import open_file, open_folder

_LENGTH: Final = struct.Struct("<I")
_CREDENTIALS: Final = struct.Struct("3i")
"""Layout of Linux's `struct ucred`: pid, uid and gid."""
_CHUNK_BYTES: Final = 1 << 20
_FD_BYTES: Final = 4
_BACKLOG: Final = 128
_RETRY_S: Final = 0.05
_REFRESH_S: Final = 3600.0
"""Interval in seconds at which the timestamps of the socket, its lock and its folder are updated, because
cleaners of /tmp remove files that are a few days old."""

_log = logging.getLogger("cornplug.local_socket")

_Inode = tuple[int, int]


# -- frames --


def encode_frame(body: bytes, *, limit: int) -> bytes:
    """Return the frame for a body. Raises ValueError if the body has more than `limit` bytes."""
    if len(body) > limit:
        raise ValueError(f"message has {len(body)} bytes, the limit is {limit}")
    return _LENGTH.pack(len(body)) + body


def pop_frame(buffer: bytearray, *, limit: int) -> bytes | None:
    """Remove the first frame from `buffer` and return its body, or None if the frame is incomplete.

    Raises ProtocolError if the length is 0 or above `limit`.
    """
    if len(buffer) < _LENGTH.size:
        return None
    end = _LENGTH.size + _check_length(_LENGTH.unpack_from(buffer)[0], limit)
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
    return _receive_exactly(sock, _check_length(size, limit))


def _check_length(size: int, limit: int) -> int:
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


@dataclass(slots=True)
class _UnsentFrame:
    number: int
    whole: memoryview
    fd: int | None
    """Descriptor to send with the first byte of the frame. None if there is none, or if it was sent."""


class FrameBuffer:
    """Buffers unsent and partially received frames of a non-blocking socket. Not thread-safe.

    Args:
        limit: Maximum size of a body in bytes, in both directions.
        receive_limit: Maximum size of a received body in bytes, if it differs.
        max_fds: Maximum number of received descriptors that `take_fd` has not returned yet.
    """

    def __init__(self, *, limit: int, receive_limit: int | None = None, max_fds: int = 0) -> None:
        self.receive_limit = limit if receive_limit is None else receive_limit
        self._limit, self._max_fds = limit, max_fds
        self._send_queue: collections.deque[_UnsentFrame] = collections.deque()
        self._first_sent_bytes = 0
        self._receive_buffer = bytearray()
        self._received_fds: collections.deque[int] = collections.deque()
        self.unsent_bytes = 0

    def add(self, number: int, body: bytes, fd: int | None = None) -> None:
        """Queue a frame. `number` identifies the frame for `drop`. `fd` is sent with the frame, and closed
        when it was sent or dropped. Raises ValueError if the body is too large. The caller must then close
        the descriptor."""
        whole = memoryview(encode_frame(body, limit=self._limit))
        self._send_queue.append(_UnsentFrame(number, whole, fd))
        self.unsent_bytes += len(whole)

    def drop(self, numbers: set[int]) -> set[int]:
        """Remove the frames with these numbers from the queue, except a frame that has been sent in part.
        Return the numbers of the removed frames."""
        dropped = set[int]()
        kept: collections.deque[_UnsentFrame] = collections.deque()
        for place, frame in enumerate(self._send_queue):
            if frame.number in numbers and not (place == 0 and self._first_sent_bytes):
                self.unsent_bytes -= len(frame.whole)
                _close_fd(frame)
                dropped.add(frame.number)
            else:
                kept.append(frame)
        self._send_queue = kept
        return dropped

    def clear(self) -> None:
        """Discard all unsent and received data, for example after the end of a connection."""
        for frame in self._send_queue:
            _close_fd(frame)
        while self._received_fds:
            os.close(self._received_fds.popleft())
        self._send_queue.clear()
        self._receive_buffer.clear()
        self._first_sent_bytes = 0
        self.unsent_bytes = 0

    def send(self, sock: socket.socket) -> None:
        """Send as many queued bytes as the socket accepts without blocking.

        Raises OSError if the connection is closed.
        """
        while self._send_queue:
            frame = self._send_queue[0]
            whole = frame.whole
            try:
                if frame.fd is not None:
                    sent = socket.send_fds(sock, [whole], [frame.fd])
                else:
                    sent = sock.send(whole[self._first_sent_bytes :])
            except BlockingIOError:
                return
            _close_fd(frame)
            self._first_sent_bytes += sent
            self.unsent_bytes -= sent
            if self._first_sent_bytes == len(whole):
                self._send_queue.popleft()
                self._first_sent_bytes = 0

    def receive(self, sock: socket.socket) -> Iterator[bytes]:
        """Yield the bodies of all complete frames, first of data that was received earlier.

        Raises ProtocolError if a length is invalid, ConnectionResetError if the peer closed the connection,
        and OSError if the connection failed.
        """
        yield from self._pop_frames()
        try:
            data = self._receive_with_fds(sock) if self._max_fds else sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise ConnectionResetError("connection closed by the peer")
        if len(self._received_fds) > self._max_fds:
            raise ProtocolError(f"more than {self._max_fds} descriptors without their frames")
        self._receive_buffer += data
        yield from self._pop_frames()

    def _receive_with_fds(self, sock: socket.socket) -> bytes:
        # `socket.recv_fds` ignores its flags (Python 3.11), so child processes would inherit the descriptors.
        space = socket.CMSG_SPACE(self._max_fds * _FD_BYTES)
        data, extra, _, _ = sock.recvmsg(_CHUNK_BYTES, space, socket.MSG_CMSG_CLOEXEC)
        for level, kind, packed in extra:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                count = len(packed) // _FD_BYTES
                self._received_fds.extend(struct.unpack(f"{count}i", packed[: count * _FD_BYTES]))
        return data

    def _pop_frames(self) -> Iterator[bytes]:
        while (body := pop_frame(self._receive_buffer, limit=self.receive_limit)) is not None:
            yield body

    def take_fd(self) -> int:
        """Return the next received descriptor, which the caller must close. Descriptors arrive no later than
        their frames, in the same order. Raises ProtocolError if there is none."""
        if not self._received_fds:
            raise ProtocolError("a frame refers to a descriptor that was not sent")
        return self._received_fds.popleft()


def _close_fd(frame: _UnsentFrame) -> None:
    if frame.fd is not None:
        os.close(frame.fd)
        frame.fd = None


# -- the peer --


def foreign_peer_uid(sock: socket.socket) -> int | None:
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
        wait_s: Maximum time in seconds to wait for the lock while the process that holds it ends.

    Raises SocketInUse if another process is listening on the path. Raises ConfigError if the path cannot be a
    socket, or if another user could create a socket there.
    """

    def __init__(self, path: Path, *, setting: str, wait_s: float = 0.0) -> None:
        self._path = path
        self._setting = setting
        self._lock_name = path.name + ".lock"
        self._folder_fd = self._lock_fd = -1
        self._socket_inode: _Inode | None = None
        self._refreshed_s = time.monotonic()
        self._last_problem = ""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._claim(wait_s=wait_s)
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
            if not self._is_valid():
                _log.warning("%s or its lock was removed or replaced: trying to create it again", self._path)
                self._claim(wait_s=0.0)
            self._refresh_timestamps()
            self._last_problem = ""
        except SocketInUse:
            return None
        except (OSError, ConfigError) as e:
            # Keep serving connected clients. Without the folder, another process cannot claim the path
            # either.
            if str(e) != self._last_problem:
                _log.warning("new clients cannot connect to %s: %s", self._path, e)
            self._last_problem = str(e)
        return self.listener

    def close(self) -> None:
        """Release the claim, and remove the socket's file if it still belongs to this claim."""
        with contextlib.suppress(OSError):
            if self._is_valid():
                os.unlink(self._path.name, dir_fd=self._folder_fd)
        self.listener.close()
        for fd in (self._lock_fd, self._folder_fd):
            if fd >= 0:
                os.close(fd)
        self._lock_fd = self._folder_fd = -1

    def _is_valid(self) -> bool:
        here, open_here = self._stat_inode(self._path.parent, None), _inode_of(os.fstat(self._folder_fd))
        lock = self._stat_inode(self._lock_name, self._folder_fd)
        return (
            here == open_here
            and lock == _inode_of(os.fstat(self._lock_fd))
            and self._socket_inode is not None
            and self._stat_inode(self._path.name, self._folder_fd) == self._socket_inode
        )

    def _claim(self, *, wait_s: float) -> None:
        folder = open_folder(self._path.parent, setting=self._setting)
        if self._folder_fd >= 0:
            os.close(self._folder_fd)
        self._folder_fd = folder
        self._acquire_lock(time.monotonic() + wait_s)
        if self._socket_inode is None or self._stat_inode(self._path.name, folder) != self._socket_inode:
            self._listen()

    def _acquire_lock(self, deadline_s: float) -> None:
        while self._lock_fd < 0 or self._stat_inode(self._lock_name, self._folder_fd) != _inode_of(
            os.fstat(self._lock_fd)
        ):
            fd = open_file(self._folder_fd, self._lock_name, os.O_RDWR)
            if not try_lock(fd):
                os.close(fd)
                if time.monotonic() >= deadline_s:
                    raise SocketInUse(self._setting, self._path)
                time.sleep(_RETRY_S)
                continue
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            # Check again, because the file may have been replaced before it was locked.
            self._lock_fd = fd

    def _listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path.name, dir_fd=self._folder_fd)
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            fresh.bind(str(self._path))
            fresh.listen(_BACKLOG)
            self._socket_inode = self._stat_inode(self._path.name, self._folder_fd)
        except OSError as e:
            fresh.close()
            problem = f"cannot listen on {self._path}: {e}"
            raise ConfigError(self._setting, problem, "Use a shorter path.") from e
        finally:
            os.umask(mask)
        self.listener.close()
        self.listener = fresh

    def _refresh_timestamps(self) -> None:
        if time.monotonic() - self._refreshed_s > _REFRESH_S:
            self._refreshed_s = time.monotonic()
            os.utime(self._path.name, dir_fd=self._folder_fd)
            for fd in (self._lock_fd, self._folder_fd):
                os.utime(fd)

    @staticmethod
    def _stat_inode(name: str | Path, folder: int | None) -> _Inode | None:
        try:
            return _inode_of(os.stat(name, dir_fd=folder, follow_symlinks=False))
        except FileNotFoundError:
            return None


def _inode_of(stat_result: os.stat_result) -> _Inode:
    return stat_result.st_dev, stat_result.st_ino
