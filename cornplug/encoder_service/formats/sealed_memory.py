"""Memory without a name (memfd) that one process fills and another process of this user reads.

The sender writes the contents and sends the descriptor over a unix socket. The receiver seals the memory
before it reads it. The sender can then neither change nor shorten bytes that the receiver has validated."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Final

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


def create_memfd(contents: Iterable[bytes | memoryview]) -> int:
    """Return the descriptor of a new memfd that contains `contents`. The caller must close it."""
    fd = os.memfd_create("cornplug-media", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        for part in contents:
            rest = memoryview(part).cast("B")
            while rest:
                rest = rest[os.write(fd, rest) :]
    except OSError:
        os.close(fd)
        raise
    return fd


def seal_and_map(fd: int, size: int) -> mmap.mmap:
    """Seal a memfd, so that no process can change it, and return its bytes. Closes the descriptor.

    Raises ValueError if the memfd does not have `size` bytes, and OSError if it cannot be sealed.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        if os.fstat(fd).st_size != size or size == 0:
            raise ValueError(f"{os.fstat(fd).st_size} bytes, expected {size}")
        # Torch requires writable memory, so map a private copy.
        return mmap.mmap(fd, size, access=mmap.ACCESS_COPY)
    finally:
        os.close(fd)
