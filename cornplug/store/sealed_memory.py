"""Unnamed shared memory of fixed length, which one process makes and hands out by descriptor."""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Final

_F_SEAL_FUTURE_WRITE: Final = 0x0010
"""Linux 5.1; the standard library has no name for it."""


def sealed_memory(name: str, size_bytes: int, *, others_write: bool) -> tuple[int, mmap.mmap]:
    """The descriptor and this process's writable map of `size_bytes` of zeros.

    No process can cut it short under the others. Unless `others_write`, only this map can be written, whoever
    has the descriptor. Raises OSError where the kernel gives no such memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size_bytes)
    mapped = mmap.mmap(fd, size_bytes)
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals if others_write else seals | _F_SEAL_FUTURE_WRITE)
    return fd, mapped
