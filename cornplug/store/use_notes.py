"""Notes in shared memory, in which clients record reads for which they send no message.

Each client writes its notes to its own page, which the daemon reads when it needs the counts.

    page    u64 hits | u64 misses | u64 notes so far | u32 keys found | u32 keys absent | ring of u32 numbers
            of table records

Hits and misses count reads. Keys found and absent count lookups, which read no payload.

One shared memory contains the pages of all clients. A client that writes arbitrary data, or writes to another
client's page, can only change counts and the order of eviction.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from cornplug.store.arena import create_sealed_memory

NOTES_PAGES: Final = 4096
"""Maximum number of clients that note their reads. Further clients send messages to the daemon."""
NO_NOTES_PAGE: Final = -1
NOTES_PAGE_BYTES: Final = mmap.ALLOCATIONGRANULARITY
_RING_OFFSET: Final = 8
"""Number of 32-bit words before the ring."""
RING_NOTES: Final = NOTES_PAGE_BYTES // 4 - _RING_OFFSET
"""Number of notes in a page. If a client writes more notes between two reads by the daemon, the oldest notes
are lost."""
_HITS, _MISSES, _NOTED = range(3)
_FOUND, _ABSENT = 6, 7
"""Indices of the 32-bit words with the numbers of keys found and absent."""
_WORD_MASK: Final = (1 << 64) - 1
_HALF_MASK: Final = (1 << 32) - 1
MAX_COUNT_INCREASE: Final = 1 << 24
"""Maximum increase of a count since the daemon last read the page. The daemon reads each page at least every
half second, and even the fastest client increases a count by less in this time. A larger increase means that
the page is damaged, and is counted as this number."""


@dataclass(frozen=True, slots=True)
class NotedReads:
    """Reads and lookups of one client since the daemon last read the client's page."""

    hits: int
    misses: int
    records: Sequence[int]
    """Record numbers, the latest read last. They are not checked and can be any numbers."""
    found: int = 0
    absent: int = 0


class UseNotes:
    """The daemon's side of the notes. Raises OSError if there is no memory for the pages."""

    def __init__(self) -> None:
        self.fd, mapped = create_sealed_memory(
            "cornplug-notes", NOTES_PAGES * NOTES_PAGE_BYTES, others_write=True
        )
        self._memory = memoryview(mapped)
        self._seen: dict[int, tuple[int, ...]] = {}
        """Counts of each page when it was last read."""
        self._free: list[int] = []
        self._unused = itertools.count()

    def open_page(self) -> int:
        """Return the number of an empty page for a new client, or NO_PAGE if all pages are in use."""
        page = self._free.pop() if self._free else next(self._unused)
        if page >= NOTES_PAGES:
            return NO_NOTES_PAGE
        self._memory[page * NOTES_PAGE_BYTES : (page + 1) * NOTES_PAGE_BYTES] = bytes(NOTES_PAGE_BYTES)
        self._seen[page] = (0,) * 5
        return page

    def collect_reads(self, page: int) -> NotedReads | None:
        """Return a client's reads and lookups since the last call, or None if its page has not changed."""
        if page == NO_NOTES_PAGE:
            return None
        memory = self._memory[page * NOTES_PAGE_BYTES : (page + 1) * NOTES_PAGE_BYTES]
        counts = (*memory[:24].cast("Q"), *memory[24:32].cast("I"))
        seen = self._seen[page]
        if counts == seen:
            return None
        self._seen[page] = counts
        ring, noted = memory.cast("I")[_RING_OFFSET:], counts[_NOTED]
        fresh = min((noted - seen[_NOTED]) & _WORD_MASK, RING_NOTES)
        masks = (_WORD_MASK,) * 3 + (_HALF_MASK,) * 2
        more = [
            min((now - before) & mask, MAX_COUNT_INCREASE)
            for now, before, mask in zip(counts, seen, masks, strict=True)
        ]
        records = [ring[(noted - i) % RING_NOTES] for i in range(fresh, 0, -1)]
        return NotedReads(more[_HITS], more[_MISSES], records, found=more[3], absent=more[4])

    def free_page(self, page: int) -> None:
        """Free the page of a client that has disconnected."""
        if page != NO_NOTES_PAGE:
            del self._seen[page]
            self._free.append(page)

    def close(self) -> None:
        os.close(self.fd)


class ClientNotes:
    """A client's side of the notes: the client's page. Thread-safe."""

    def __init__(self, fd: int, page: int) -> None:
        """Map the page. Raises OSError or ValueError if it does not exist."""
        memory = memoryview(mmap.mmap(fd, NOTES_PAGE_BYTES, offset=page * NOTES_PAGE_BYTES))
        self._words = memory[: _RING_OFFSET * 4].cast("Q")
        self._halves = memory[: _RING_OFFSET * 4].cast("I")
        self._ring = memory.cast("I")[_RING_OFFSET:]
        self._lock = threading.Lock()

    def note_hit(self, record: int) -> None:
        """Count a read, and note the table record of the entry that was read."""
        with self._lock:
            words = self._words
            self._ring[words[_NOTED] % RING_NOTES] = record
            words[_NOTED] = (words[_NOTED] + 1) & _WORD_MASK
            words[_HITS] = (words[_HITS] + 1) & _WORD_MASK

    def note_miss(self) -> None:
        """Count an attempt to read an absent entry."""
        with self._lock:
            self._words[_MISSES] = (self._words[_MISSES] + 1) & _WORD_MASK

    def note_lookup(self, found: int, absent: int) -> None:
        """Count the keys that a lookup in the table found, and the keys that were absent."""
        with self._lock:
            halves = self._halves
            halves[_FOUND] = (halves[_FOUND] + found) & _HALF_MASK
            halves[_ABSENT] = (halves[_ABSENT] + absent) & _HALF_MASK
