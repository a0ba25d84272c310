"""Table of the reservations that can be written now. The daemon writes it, and clients map it read-only.

A reservation has a slot, which holds its room's generation for as long as its writers may write.
The store cannot take a mapping back from a writer that comes late, perhaps in another process than the
one that reserved; but `view` looks here first, and a writer that passes has the quarantine to finish in.
"""

from __future__ import annotations

import mmap
import os
from typing import Final

from cornplug.store.base import PayloadLocation
from cornplug.store.sealed_memory import sealed_memory

SLOTS: Final = 1 << 16
"""Maximum number of open reservations of all clients."""
TABLE_BYTES: Final = 8 * SLOTS
NO_SLOT: Final = -1


class WriteFences:
    """The owner's side. Without `shared` the table is this process's own."""

    def __init__(self, *, shared: bool = False) -> None:
        if shared:
            self.fd, mapped = sealed_memory("cornplug-fences", TABLE_BYTES, others_write=False)
        else:
            self.fd, mapped = -1, mmap.mmap(-1, TABLE_BYTES)
        self._table = memoryview(mapped).cast("Q")
        self._free: list[int] = []
        self._used = 0

    def open(self, generation: int) -> int:
        """The slot that now says that this generation may be written; NO_SLOT when there is none."""
        if self._free:
            slot = self._free.pop()
        elif self._used < SLOTS:
            slot = self._used
            self._used += 1
        else:
            return NO_SLOT
        self._table[slot] = generation
        return slot

    def shut(self, slot: int) -> None:
        """From now on no write begins there."""
        self._table[slot] = 0
        self._free.append(slot)

    def holds(self, location: PayloadLocation) -> bool:
        """Whether this location is reserved still, and may be written."""
        return _holds(self._table, location)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class MappedFences:
    """A client's side."""

    def __init__(self, fd: int) -> None:
        """Raises OSError or ValueError when that is no table."""
        self._table = memoryview(mmap.mmap(fd, TABLE_BYTES, prot=mmap.PROT_READ)).cast("Q")

    def holds(self, location: PayloadLocation) -> bool:
        """As `WriteFences.holds`."""
        return _holds(self._table, location)


def _holds(table: memoryview, location: PayloadLocation) -> bool:
    return 0 <= location.fence < SLOTS and table[location.fence] == location.generation
