"""Unnamed shared memory of fixed length, which one process makes and hands out by descriptor."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import Final

_F_SEAL_FUTURE_WRITE: Final = 0x0010
"""Linux 5.1; the standard library has no name for it."""


def sealed_memory(name: str, size_bytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    """The descriptor and this process's writable map of `size_bytes` of zeros.

    No process can cut it short under the others. Unless `others_write`, only this map can be written, whoever
    has the descriptor; Linux before 5.1 cannot enforce that, and readers verify what they read on any.
    Raises OSError where the kernel gives no such memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    mapped = mmap.mmap(fd, size_bytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    if not others_write:
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
    return fd, mapped
