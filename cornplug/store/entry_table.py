"""Table of a store's entries: its layout, and a client's lookups in it without a message.

The daemon writes the table (`entry_table_writer.py`), and every client maps it read-only. Several keys are
looked up with numpy, without a loop in Python: one cache line per key.

    u64 words of the header    serving (1, or 0 once the daemon has ended) | buckets | records |
                               entries without a tag | whether there is a disk or a far store |
                               whether a far store answers now; fills a page, with tickets from its
                               word TICKETS_AT on
    buckets                    64 bytes each: 7 tags and the number of the bucket's entries that have none
    records                    256 bytes each, numbered from 1: a location and the entry's header

A tag is 40 bits of a key and the number of its record; 0 is no tag. Other bits of the key choose the bucket,
so a lookup reads one line of a processor's cache. Keys are digests: they need no hashing. An entry has no tag
if its bucket has 7 others or all records are taken, and an entry with a large header has an empty record. The
daemon knows those all the same. An entry that lies on disk or far only has a tag with ON_DISK_RECORD for its
record, and gives way to an entry in memory that finds its bucket full.

    record    u64 XXH3-64 of the rest | u64 generation, 0 in an empty one | u64 offset | u64 size
              u32 length of the header | the header

A ticket is the number that a client gave its question to far stores. It is shown once no answer to it is due
any more, in the word that its value chooses. A later ticket may take its place: its client then waits out its
time, as with a daemon that shows none.

The writer changes several words for one entry, and readers have no lock. A reader therefore believes a record
only if its checksum is right, and bytes of the arena only if the header in the record is their key's, the
header's checksums are right, and the generation is the same after the copy.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from cornplug.errors import StoreUnavailable
from cornplug.store.base import KEY_BYTES
from cornplug.store.validation import check_keys

WORD_BYTES: Final = 8
LANES: Final = 8
"""Words of a bucket: its tags, and the count of its entries without one."""
TAGS: Final = LANES - 1
RECORD_BITS: Final = 24
RECORD_MASK: Final = (1 << RECORD_BITS) - 1
ON_DISK_RECORD: Final = RECORD_MASK
"""No record has this number, see _MOST_RECORDS: older clients take it for a record that is damaged."""
TAG_MASK: Final = (1 << 64) - 1 - RECORD_MASK
SERVING, BUCKETS, RECORDS, UNTAGGED, HAS_DISK, FAR_ANSWERS = range(6)
"""Words of the header."""
TICKETS_AT: Final = 64
TICKETS: Final = 256
"""Words for tickets. Of 10 that are shown between two looks of a client, one takes its ticket's place in one
case of 26."""
HEADER_BYTES: Final = mmap.PAGESIZE
BUCKET_BYTES: Final = LANES * WORD_BYTES
RECORD_BYTES: Final = 256
RECORD: Final = struct.Struct("=QQQQI")
"""A record before the header: checksum of the rest, generation, offset, size, length of the header."""
META_AT: Final = RECORD.size
MAX_META_BYTES: Final = RECORD_BYTES - META_AT
KEY_WORDS: Final = struct.Struct("=QQ")
_ENTRY_BYTES: Final = 64 << 10
"""One record for so much of the arena: the table then has 0.6 % of its size."""
_LEAST_RECORDS: Final = 1024
_MOST_RECORDS: Final = 1 << 20
_FAR_TAGS: Final = 1 << 15
"""Of entries that were found in far stores, and not recalled."""
ABSENT: Final = 0
PRESENT: Final = 1
UNLISTED: Final = 2
"""The key's bucket has entries without a tag: only the daemon knows whether this key's is one."""
_ANSWERS: Final = {-1: UNLISTED, 0: ABSENT, 1: PRESENT}
_FEW_KEYS: Final = 6
"""So many are looked up one by one: numpy's calls cost more."""
_RECORD_MASK: Final = np.uint64(RECORD_MASK)
_ONE: Final = np.uint64(1)
_PRESENT, _UNLISTED = np.uint8(PRESENT), np.uint8(UNLISTED)
_KEY_WORDS: Final = KEY_BYTES // WORD_BYTES


@dataclass(frozen=True, slots=True)
class TableShape:
    """The numbers of buckets (a power of two) and records."""

    buckets: int
    records: int

    @classmethod
    def of(cls, capacity_bytes: int, disk_bytes: int = 0, *, has_far: bool = False) -> TableShape:
        """The shape for an arena of this capacity: at least two buckets a record, and one for two tags of a
        disk of `disk_bytes` and of entries in far stores, which may be left out.

        An entry in memory whose bucket is full costs readers a message. With half an entry a bucket one
        bucket in 16 million has more than 7. With two it would be one in 900, and a lookup of 256 keys would
        meet it one time in four."""
        records = min(max(capacity_bytes // _ENTRY_BYTES, _LEAST_RECORDS), _MOST_RECORDS)
        tags = records + min(disk_bytes // _ENTRY_BYTES, _MOST_RECORDS) + _FAR_TAGS * has_far
        buckets = max(2 * records, (tags + 1) // 2)
        return cls(1 << (buckets - 1).bit_length(), records)

    @property
    def size_bytes(self) -> int:
        """Of the whole table."""
        return self.record_at(self.records + 1)

    def bucket_word(self, key: bytes) -> int:
        """The first word of a key's bucket, counted from the table's begin."""
        bucket: int = KEY_WORDS.unpack_from(key)[0] & (self.buckets - 1)
        return HEADER_BYTES // WORD_BYTES + bucket * LANES

    def record_at(self, record: int) -> int:
        """The byte at which a record begins."""
        return HEADER_BYTES + self.buckets * BUCKET_BYTES + (record - 1) * RECORD_BYTES


def tag_of(key: bytes) -> int:
    """A key's tag, without the number of a record."""
    tag: int = KEY_WORDS.unpack_from(key)[1]
    return tag & TAG_MASK


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """What the table says of one entry."""

    number: int
    generation: int
    offset: int
    size: int
    meta: bytes


class MappedEntryTable:
    """The table as a client sees it. Its calls raise StoreUnavailable once the daemon has ended well."""

    def __init__(self, fd: int) -> None:
        """Raises OSError or ValueError when that is no table."""
        size_bytes = os.fstat(fd).st_size
        self._bytes = memoryview(mmap.mmap(fd, size_bytes, prot=mmap.PROT_READ))
        self._words = self._bytes.cast("Q")
        self.shape = TableShape(self._words[BUCKETS], self._words[RECORDS])
        buckets = self.shape.buckets
        if buckets < 1 or buckets & (buckets - 1) or self.shape.size_bytes != size_bytes:
            raise ValueError(f"no table of entries: {self.shape}, {size_bytes} bytes")
        words = np.frombuffer(self._bytes, np.uint64, buckets * LANES, HEADER_BYTES)
        self._buckets = words.reshape(-1, LANES)
        self._bucket_mask = np.uint64(buckets - 1)

    def contains(self, keys: Sequence[bytes]) -> bytes:
        """ABSENT, PRESENT or UNLISTED for each key. Raises ValueError for keys that are not of 32 bytes."""
        self._check_serving()
        if len(keys) <= _FEW_KEYS:
            check_keys(keys)
            return bytes([_ANSWERS[min(self._look(key), 1)] for key in keys])
        joined = b"".join(keys)
        if len(joined) != len(keys) * KEY_BYTES:
            check_keys(keys)
        words = np.frombuffer(joined, np.uint64).reshape(-1, _KEY_WORDS)
        lines = self._buckets.take((words[:, 0] & self._bucket_mask).view(np.int64), axis=0)
        # A tag is the key's where no bit above the record's number differs; the eight truth values of a row
        # are one word. Each call of numpy costs 5 us or more when its code is not in the processor's cache.
        if self.has_disk:
            # Nor is the record's number ON_DISK_RECORD, all ones: then 0 - 1 is the largest number.
            found = (((lines ^ (words[:, 1:2] | _RECORD_MASK)) - _ONE) < _RECORD_MASK).view(np.uint64) != 0
        else:
            found = ((lines ^ words[:, 1:2]) <= _RECORD_MASK).view(np.uint64) != 0
        if self._words[UNTAGGED] and lines[:, TAGS].any():
            found = np.where(found, _PRESENT, _UNLISTED * (lines[:, TAGS:] != 0))
        mask: bytes = found.tobytes()
        return mask

    @property
    def has_disk(self) -> bool:
        """Whether entries can be on disk only."""
        return bool(self._words[HAS_DISK])

    @property
    def far_answers(self) -> bool:
        """Whether it is of use to have far stores asked."""
        return bool(self._words[FAR_ANSWERS])

    def shows_ticket(self, ticket: int) -> bool:
        """Whether the question of this ticket, which is not 0, to far stores is over."""
        return self._words[TICKETS_AT + ticket % TICKETS] == ticket

    def on_disk(self, keys: Sequence[bytes]) -> bytes:
        """1 for each key that is shown as on disk only. Raises ValueError for keys not of 32 bytes."""
        check_keys(keys)
        if not self.has_disk:
            return bytes(len(keys))
        words = np.frombuffer(b"".join(keys), np.uint64).reshape(-1, _KEY_WORDS)
        lines = self._buckets.take((words[:, 0] & self._bucket_mask).view(np.int64), axis=0)
        mask: bytes = (lines == (words[:, 1:2] | _RECORD_MASK)).any(axis=1).tobytes()
        return mask

    def find(self, key: bytes) -> int:
        """The number of the key's record; 0 when it is absent, -1 when it may be unlisted."""
        self._check_serving()
        return self._look(key)

    def read(self, number: int) -> EntryRecord | None:
        """A record's content; None for one that is empty, damaged or being changed."""
        if not 1 <= number <= self.shape.records:
            return None
        start = self.shape.record_at(number)
        data = bytes(self._bytes[start : start + RECORD_BYTES])
        checksum, generation, offset, size, length = RECORD.unpack_from(data)
        end = META_AT + length
        if not generation or end > RECORD_BYTES or checksum != xxhash.xxh3_64_intdigest(data[WORD_BYTES:end]):
            return None
        return EntryRecord(number, generation, offset, size, data[META_AT:end])

    def still(self, record: EntryRecord) -> bool:
        """Whether the entry of `record` was there all the time since it was read."""
        return self._words[self.shape.record_at(record.number) // WORD_BYTES + 1] == record.generation

    def _look(self, key: bytes) -> int:
        at = self.shape.bucket_word(key)
        tag = tag_of(key)
        for word in self._words[at : at + TAGS].tolist():
            if word and word & TAG_MASK == tag and word & RECORD_MASK != ON_DISK_RECORD:
                return word & RECORD_MASK
        return -1 if self._words[at + TAGS] and self._words[UNTAGGED] else 0

    def _check_serving(self) -> None:
        if self._words[SERVING] != 1:
            raise StoreUnavailable("the store is gone: it has ended", reason="store_down")
