"""Reads without a message: each client notes them in a page, which the daemon reads when it must know.

    page    u64 hits | u64 misses | u64 notes so far | u32 keys found | u32 keys absent | ring of u32 numbers
            of table records

Hits and misses are of reads; keys found and absent are of lookups, which read nothing.
One memory has the pages of all clients. A client that writes nonsense, or in another's page, changes counts
and the order of eviction, and nothing else.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.store.arena import sealed_memory

PAGES: Final = 4096
"""Clients that may note their reads at once; the others ask the daemon."""
NO_PAGE: Final = -1
PAGE_BYTES: Final = mmap.ALLOCATIONGRANULARITY
_RING_AT: Final = 8
"""Words of 32 bits before the ring."""
RING: Final = PAGE_BYTES // 4 - _RING_AT
"""Notes of a page: of more between two looks of the daemon, the oldest are lost."""
_HITS, _MISSES, _NOTED = range(3)
_FOUND, _ABSENT = 6, 7
"""Words of 32 bits."""
_WORD_MASK: Final = (1 << 64) - 1
_HALF_MASK: Final = (1 << 32) - 1
MOST_COUNTED: Final = 1 << 24
"""Reads or keys between two looks, half a second apart, of the quickest client. A page that says more is
damaged, and counts for so many."""


@dataclass(frozen=True, slots=True)
class NotedReads:
    """Reads of one client since the daemon's last look."""

    hits: int
    misses: int
    records: Sequence[int]
    """Numbers of records, the last read last. Not checked: any numbers."""
    found: int = 0
    absent: int = 0


class UseNotes:
    """The daemon's side. Raises OSError where there is no memory for it."""

    def __init__(self) -> None:
        self.fd, mapped = sealed_memory("cornplug-notes", PAGES * PAGE_BYTES, others_write=True)
        self._memory = memoryview(mapped)
        self._seen: dict[int, tuple[int, ...]] = {}
        """Page -> its counts at the last look."""
        self._free: list[int] = []
        self._unused = itertools.count()

    def open(self) -> int:
        """An empty page for a new client; NO_PAGE when there is none."""
        page = self._free.pop() if self._free else next(self._unused)
        if page >= PAGES:
            return NO_PAGE
        self._memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = bytes(PAGE_BYTES)
        self._seen[page] = (0,) * 5
        return page

    def take(self, page: int) -> NotedReads | None:
        """The reads of a client since the last call; None if there were none."""
        if page == NO_PAGE:
            return None
        memory = self._memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]
        counts = (*memory[:24].cast("Q"), *memory[24:32].cast("I"))
        seen = self._seen[page]
        if counts == seen:
            return None
        self._seen[page] = counts
        ring, noted = memory.cast("I")[_RING_AT:], counts[_NOTED]
        fresh = min((noted - seen[_NOTED]) & _WORD_MASK, RING)
        masks = (_WORD_MASK,) * 3 + (_HALF_MASK,) * 2
        more = [
            min((now - before) & mask, MOST_COUNTED)
            for now, before, mask in zip(counts, seen, masks, strict=True)
        ]
        records = [ring[(noted - i) % RING] for i in range(fresh, 0, -1)]
        return NotedReads(more[_HITS], more[_MISSES], records, found=more[3], absent=more[4])

    def shut(self, page: int) -> None:
        """The client has gone; another one may get its page."""
        if page != NO_PAGE:
            del self._seen[page]
            self._free.append(page)

    def close(self) -> None:
        os.close(self.fd)


class ClientNotes:
    """A client's side: its own page. Its calls may come from any thread."""

    def __init__(self, fd: int, page: int) -> None:
        """Raises OSError or ValueError when there is no such page."""
        memory = memoryview(mmap.mmap(fd, PAGE_BYTES, offset=page * PAGE_BYTES))
        self._words = memory[: _RING_AT * 4].cast("Q")
        self._halves = memory[: _RING_AT * 4].cast("I")
        self._ring = memory.cast("I")[_RING_AT:]
        self._lock = threading.Lock()

    def hit(self, record: int) -> None:
        """The entry of this record was read."""
        with self._lock:
            words = self._words
            self._ring[words[_NOTED] % RING] = record
            words[_NOTED] = (words[_NOTED] + 1) & _WORD_MASK
            words[_HITS] = (words[_HITS] + 1) & _WORD_MASK

    def miss(self) -> None:
        """An entry was wanted that is not there."""
        with self._lock:
            self._words[_MISSES] = (self._words[_MISSES] + 1) & _WORD_MASK

    def looked_up(self, found: int, absent: int) -> None:
        """So many keys were looked up in the table."""
        with self._lock:
            halves = self._halves
            halves[_FOUND] = (halves[_FOUND] + found) & _HALF_MASK
            halves[_ABSENT] = (halves[_ABSENT] + absent) & _HALF_MASK
