"""Where the table of a store's entries has what: the daemon writes it, every client maps it read-only.

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
import struct
from dataclasses import dataclass
from typing import Final

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
