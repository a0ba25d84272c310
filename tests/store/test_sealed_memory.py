"""Shared memory that one process hands out."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os

import pytest

from cornplug.store import arena as module
from cornplug.store.arena import create_sealed_memory

SIZE = 4096


@pytest.mark.parametrize("others_write", [True, False])
def test_sealed_memory_others_write_only_where_they_may(others_write: bool) -> None:
    fd, mine = create_sealed_memory("test", SIZE, others_write=others_write)
    try:
        mine[:3] = b"own"
        assert mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)[:3] == b"own"
        if others_write:
            mmap.mmap(fd, SIZE)[:3] = b"you"
        else:
            with pytest.raises(PermissionError):
                mmap.mmap(fd, SIZE)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def test_sealed_memory_on_an_older_kernel_is_made_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def older(fd: int, command: int, seals: int) -> int:
        if seals & module._F_SEAL_FUTURE_WRITE:
            raise OSError(errno.EINVAL, "unknown seal")
        return real(fd, command, seals)

    monkeypatch.setattr(fcntl, "fcntl", older)
    fd, mine = create_sealed_memory("test", SIZE, others_write=False)
    try:
        mine[:3] = b"own"
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
