"""Who serves a socket's path: one daemon, as long as the names in the folder are its own.

    store.sock.lock    locked by whoever serves; a name that points to another file locks nothing
    store.sock         of whoever has the lock

Names are compared by inode, of files that are held open: one that a cleaner of /tmp removed, or that
somebody replaced, is noticed and made again, and nobody ever removes what is another's.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from pathlib import Path
from typing import Final

from cornplug.errors import ConfigError
from cornplug.private_paths import open_file, open_folder

_LOCK_WAIT_S: Final = 2.0
_TOUCH_S: Final = 3600.0
"""Cleaners remove what is some days old."""

_log = logging.getLogger("cornplug.store")

_Inode = tuple[int, int]


class SocketTaken(Exception):
    """Another daemon has the lock."""


class SocketClaim:
    """The right to serve `path`, and the socket that listens there."""

    def __init__(self, path: Path) -> None:
        """Raises Taken when another daemon serves there, ConfigError when nobody can or should."""
        self._path = path
        self._lock_name = path.name + ".lock"
        self._folder = self._lock = -1
        self._socket: _Inode | None = None
        self._touched_s = time.monotonic()
        self._said = ""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._take(wait_s=_LOCK_WAIT_S)
        except OSError as e:
            self.close()
            raise ConfigError("store.socket", f"{path}: {e.strerror}", "Name another path.") from e
        except (ConfigError, SocketTaken):
            self.close()
            raise

    def renew(self) -> socket.socket | None:
        """What to listen on from now: the same, or one made again. None: another daemon serves here."""
        try:
            if not self._stands():
                _log.warning("%s or its lock is gone or replaced: making it again", self._path)
                self._take(wait_s=0.0)
            self._touch()
            self._said = ""
        except SocketTaken:
            return None
        except (OSError, ConfigError) as e:
            # Who is connected is served on: without a folder nobody else can serve there either.
            if str(e) != self._said:
                _log.warning("new clients cannot come to %s: %s", self._path, e)
            self._said = str(e)
        return self.listener

    def close(self) -> None:
        """Give it up. The socket's file goes with it where it is still ours."""
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
        folder = open_folder(self._path.parent, setting="store.socket")
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = folder
        self._take_lock(time.monotonic() + wait_s)
        if self._socket is None or self._inode(self._path.name, folder) != self._socket:
            self._listen()

    def _take_lock(self, give_up_s: float) -> None:
        while self._lock < 0 or self._inode(self._lock_name, self._folder) != _inode(os.fstat(self._lock)):
            fd = open_file(self._folder, self._lock_name, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                if time.monotonic() >= give_up_s:
                    raise SocketTaken from None
                # A daemon that is just ending lets go of it in a moment.
                time.sleep(0.05)
                continue
            if self._lock >= 0:
                os.close(self._lock)
            # Once more round: the file may have been replaced before it was locked.
            self._lock = fd

    def _listen(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path.name, dir_fd=self._folder)
        fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            fresh.bind(str(self._path))
            fresh.listen(128)
            self._socket = self._inode(self._path.name, self._folder)
        except OSError as e:
            fresh.close()
            problem = f"cannot listen at {self._path}: {e}"
            raise ConfigError("store.socket", problem, "Name a shorter path.") from e
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
