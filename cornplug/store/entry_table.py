"""Table of a store's entries: its layout, and lookups by clients, which send no message.

The daemon writes the table (`EntryTableWriter`), and every client maps it read-only. Several keys are
looked up with numpy, without a loop in Python. The lookup of a key reads one cache line.

    u64 words of the header    serving (1, or 0 after the daemon has shut down) | buckets | records |
                               entries without a tag | whether there is a disk or a far store |
                               whether a far store responds now. The header fills a page, with tickets
                               from word FIRST_TICKET_WORD on
    buckets                    64 bytes each: 7 tags and the number of the bucket's entries without a tag
    records                    256 bytes each, numbered from 1: a location and the entry's header

A tag consists of 40 bits of a key and the number of its record. 0 means no tag. Other bits of the key select
the bucket. Keys are digests, so they are not hashed again. An entry has no tag if its bucket has 7 other tags
or if all records are in use. An entry with a large header has an empty record. In both cases, clients need a
message to the daemon to read the entry. An entry that is only on disk or in a far store has a tag with the
record number ON_DISK_RECORD. Such a tag is overwritten if the bucket is full when an entry in memory is
added.

    record    u64 XXH3-64 of the rest | u64 generation, 0 in an empty record | u64 offset | u64 size
              u32 length of the header | the header

A ticket is the number that a client chose for its lookup in far stores. When the lookup is complete, the
daemon writes the ticket to the word that the ticket's value selects. If a later ticket overwrites this word,
the client waits until its time limit, as with a daemon that does not support tickets.

The writer changes several words per entry, and readers have no lock. A reader therefore accepts a record only
if its checksum is right. It accepts bytes of the arena only if the header in the record belongs to the key,
the header's checksums match, and the generation is unchanged after the copy.

`UseNotes` are notes in shared memory, in which clients record reads for which they send no message. Each
client writes its notes to its own page, which the daemon reads when it needs the counts.

    page    u64 hits | u64 misses | u64 notes so far | u32 keys found | u32 keys absent | ring of u32 numbers
            of table records

Hits and misses count reads. Keys found and absent count lookups, which read no payload. One shared memory
contains the pages of all clients. A client that writes arbitrary data, or writes to another client's page,
can only change counts and the order of eviction.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from cornplug.errors import StoreUnavailable
from cornplug.store.arena import create_sealed_memory
from cornplug.store.base import KEY_BYTES
from cornplug.store.messages import check_keys

WORD_BYTES: Final = 8
LANES: Final = 8
"""Number of words in a bucket: its tags, and the number of its entries without a tag."""
TAGS_PER_BUCKET: Final = LANES - 1
RECORD_BITS: Final = 24
RECORD_MASK: Final = (1 << RECORD_BITS) - 1
ON_DISK_RECORD: Final = RECORD_MASK
"""Record number of entries that are not in memory. No record has this number, because there are at most
_MAX_RECORDS. Older clients treat it as a damaged record."""
TAG_MASK: Final = (1 << 64) - 1 - RECORD_MASK
SERVING, BUCKETS, RECORDS, UNTAGGED, HAS_DISK, FAR_UP = range(6)
"""Indices of the header's words."""
FIRST_TICKET_WORD: Final = 64
TICKETS: Final = 256
"""Number of words for tickets. If 10 other tickets are written between two checks of a client, the
probability that one of them overwrites the client's ticket is 1 in 26."""
HEADER_BYTES: Final = mmap.PAGESIZE
BUCKET_BYTES: Final = LANES * WORD_BYTES
RECORD_BYTES: Final = 256
RECORD: Final = struct.Struct("=QQQQI")
"""Start of a record: checksum of the rest, generation, offset, size, length of the entry's header."""
META_OFFSET: Final = RECORD.size
MAX_META_BYTES: Final = RECORD_BYTES - META_OFFSET
KEY_WORDS: Final = struct.Struct("=QQ")
_ENTRY_BYTES: Final = 64 << 10
"""Bytes of the arena per record. With this value, the table's size is 0.6 % of the arena's size."""
_MIN_RECORDS: Final = 1024
_MAX_RECORDS: Final = 1 << 20
_FAR_TAGS: Final = 1 << 15
"""Number of tags for entries that were found in far stores and not recalled."""
ABSENT: Final = 0
PRESENT: Final = 1
UNLISTED: Final = 2
"""The key's bucket has entries without a tag, so the client has to send a message to find out whether the key
is present."""
_PRESENCE_BY_RECORD: Final = {-1: UNLISTED, 0: ABSENT, 1: PRESENT}
_FEW_KEYS: Final = 6
"""Maximum number of keys that are looked up in a Python loop. For so few keys, calls of numpy take longer."""
_RECORD_MASK: Final = np.uint64(RECORD_MASK)
_ONE: Final = np.uint64(1)
_PRESENT, _UNLISTED = np.uint8(PRESENT), np.uint8(UNLISTED)
_KEY_WORDS: Final = KEY_BYTES // WORD_BYTES
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
class TableShape:
    """Number of buckets in a table, which is a power of two, and number of records."""

    buckets: int
    records: int

    @classmethod
    def for_capacity(cls, capacity_bytes: int, disk_bytes: int = 0, *, has_far: bool = False) -> TableShape:
        """Return the shape for an arena of this capacity.

        The table has at least two buckets per record. With a disk of `disk_bytes` or far stores, it also has
        at least one bucket for two tags of all kinds. Tags of entries on disk or in far stores may be
        omitted. Readers need a message for an entry in memory whose bucket is full. With half an entry per
        bucket, one bucket in 16 million has more than 7 entries. With two entries per bucket it would be one
        in 900, and a quarter of the lookups of 256 keys would need a message.
        """
        records = min(max(capacity_bytes // _ENTRY_BYTES, _MIN_RECORDS), _MAX_RECORDS)
        tags = records + min(disk_bytes // _ENTRY_BYTES, _MAX_RECORDS) + _FAR_TAGS * has_far
        buckets = max(2 * records, (tags + 1) // 2)
        return cls(1 << (buckets - 1).bit_length(), records)

    @property
    def size_bytes(self) -> int:
        """Size of the whole table in bytes."""
        return self.record_offset(self.records + 1)

    def bucket_word(self, key: bytes) -> int:
        """Return the index of the first word of a key's bucket, from the start of the table."""
        bucket: int = KEY_WORDS.unpack_from(key)[0] & (self.buckets - 1)
        return HEADER_BYTES // WORD_BYTES + bucket * LANES

    def record_offset(self, record: int) -> int:
        """Return the byte offset of a record."""
        return HEADER_BYTES + self.buckets * BUCKET_BYTES + (record - 1) * RECORD_BYTES


def tag_of(key: bytes) -> int:
    """Return a key's tag with 0 in the bits of the record number."""
    tag: int = KEY_WORDS.unpack_from(key)[1]
    return tag & TAG_MASK


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """Content of an entry's record in the table."""

    number: int
    generation: int
    offset: int
    size: int
    meta: bytes


class MappedEntryTable:
    """A client's map of the table. Calls raise StoreUnavailable if the daemon has shut down."""

    def __init__(self, fd: int) -> None:
        """Map the table. Raises OSError or ValueError if `fd` is not a table."""
        size_bytes = os.fstat(fd).st_size
        self._bytes = memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ))
        self._words = self._bytes.cast("Q")
        self.shape = TableShape(self._words[BUCKETS], self._words[RECORDS])
        buckets = self.shape.buckets
        if buckets < 1 or buckets & (buckets - 1) or self.shape.size_bytes != size_bytes:
            raise ValueError(f"not a table of entries: {self.shape}, {size_bytes} bytes")
        words = np.frombuffer(self._bytes, np.uint64, buckets * LANES, HEADER_BYTES)
        self._buckets = words.reshape(-1, LANES)
        self._bucket_mask = np.uint64(buckets - 1)

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """Return ABSENT, PRESENT or UNLISTED per key. Raises ValueError if a key does not have 32 bytes."""
        self._check_serving()
        if len(keys) <= _FEW_KEYS:
            check_keys(keys)
            return bytes([_PRESENCE_BY_RECORD[min(self._find_record(key), 1)] for key in keys])
        joined = b"".join(keys)
        if len(joined) != len(keys) * KEY_BYTES:
            check_keys(keys)
        words = np.frombuffer(joined, np.uint64).reshape(-1, _KEY_WORDS)
        lines = self._buckets.take((words[:, 0] & self._bucket_mask).view(np.int64), axis=0)
        # A tag matches if it differs from the key only in the bits of the record number. The eight booleans
        # of a row are one word. A call of numpy takes 5 us or more if its code is not in the CPU's cache.
        if self.has_disk:
            # Also exclude ON_DISK_RECORD, whose bits are all ones: 0 - 1 wraps to the largest number.
            found = (((lines ^ (words[:, 1:2] | _RECORD_MASK)) - _ONE) < _RECORD_MASK).view(np.uint64) != 0
        else:
            found = ((lines ^ words[:, 1:2]) <= _RECORD_MASK).view(np.uint64) != 0
        if self._words[UNTAGGED] and lines[:, TAGS_PER_BUCKET].any():
            found = np.where(found, _PRESENT, _UNLISTED * (lines[:, TAGS_PER_BUCKET:] != 0))
        mask: bytes = found.tobytes()
        return mask

    @property
    def has_disk(self) -> bool:
        """Whether entries can be on disk only."""
        return bool(self._words[HAS_DISK])

    @property
    def is_far_up(self) -> bool:
        """Whether a far store currently responds."""
        return bool(self._words[FAR_UP])

    def has_ticket(self, ticket: int) -> bool:
        """Return whether the far-store lookup with this ticket, which is not 0, is complete."""
        return self._words[FIRST_TICKET_WORD + ticket % TICKETS] == ticket

    def on_disk_mask(self, keys: Sequence[bytes]) -> bytes:
        """Return one byte per key: 1 if the table shows the key as on disk only, otherwise 0. Raises
        ValueError if a key does not have 32 bytes."""
        check_keys(keys)
        if not self.has_disk:
            return bytes(len(keys))
        words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, _KEY_WORDS)
        lines = self._buckets.take((words[:, 0] & self._bucket_mask).view(np.int64), axis=0)
        mask: bytes = (lines == (words[:, 1:2] | _RECORD_MASK)).any(axis=1).tobytes()
        return mask

    def find_record(self, key: bytes) -> int:
        """Return the number of the key's record, 0 if the key is absent, or -1 if the entry may have no
        tag."""
        self._check_serving()
        return self._find_record(key)

    def read_record(self, number: int) -> EntryRecord | None:
        """Return a record's content, or None if it is empty, damaged or being changed."""
        if not 1 <= number <= self.shape.records:
            return None
        start = self.shape.record_offset(number)
        data = bytes(self._bytes[start : start + RECORD_BYTES])
        checksum, generation, offset, size, length = RECORD.unpack_from(data)
        end = META_OFFSET + length
        if not generation or end > RECORD_BYTES or checksum != xxhash.xxh3_64_intdigest(data[WORD_BYTES:end]):
            return None
        return EntryRecord(number, generation, offset, size, data[META_OFFSET:end])

    def is_unchanged(self, record: EntryRecord) -> bool:
        """Return whether the entry was neither evicted nor replaced since its record was read."""
        return self._words[self.shape.record_offset(record.number) // WORD_BYTES + 1] == record.generation

    def _find_record(self, key: bytes) -> int:
        at = self.shape.bucket_word(key)
        tag = tag_of(key)
        for word in self._words[at : at + TAGS_PER_BUCKET].tolist():
            if word and word & TAG_MASK == tag and word & RECORD_MASK != ON_DISK_RECORD:
                return word & RECORD_MASK
        return -1 if self._words[at + TAGS_PER_BUCKET] and self._words[UNTAGGED] else 0

    def _check_serving(self) -> None:
        if self._words[SERVING] != 1:
            raise StoreUnavailable("the store has ended", reason="store_down")


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
    """Memory in which clients note their reads, as seen by the daemon. Each client has its own page.

    Raises OSError if there is no memory for the pages.
    """

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
        """Return the number of an empty page for a new client, or NO_NOTES_PAGE if all pages are in use."""
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
    """Page in which one client notes its reads for the daemon. Thread-safe."""

    def __init__(self, fd: int, page: int) -> None:
        """Map the page. Raises OSError or ValueError if it does not exist."""
        memory = memoryview(mmap.mmap(fd, NOTES_PAGE_BYTES, offset=page * NOTES_PAGE_BYTES))
        self._words = memory[: _RING_OFFSET * 4].cast("Q")
        self._halves = memory[: _RING_OFFSET * 4].cast("I")
        self._ring = memory.cast("I")[_RING_OFFSET:]
        self._lock = threading.Lock()

    def record_hit(self, record: int) -> None:
        """Count a read, and note the record number of the entry that was read."""
        with self._lock:
            words = self._words
            self._ring[words[_NOTED] % RING_NOTES] = record
            words[_NOTED] = (words[_NOTED] + 1) & _WORD_MASK
            words[_HITS] = (words[_HITS] + 1) & _WORD_MASK

    def record_miss(self) -> None:
        """Count an attempt to read an absent entry."""
        with self._lock:
            self._words[_MISSES] = (self._words[_MISSES] + 1) & _WORD_MASK

    def record_lookup(self, found: int, absent: int) -> None:
        """Count the keys that a lookup in the table found, and the keys that were absent."""
        with self._lock:
            halves = self._halves
            halves[_FOUND] = (halves[_FOUND] + found) & _HALF_MASK
            halves[_ABSENT] = (halves[_ABSENT] + absent) & _HALF_MASK
