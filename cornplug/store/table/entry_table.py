"""A client's side of the table of entries (`entry_table_layout.py`): lookups without a message.

Keys are looked up with numpy when there are several: one line of the cache a key, no Python loop.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash

from cornplug.errors import StoreUnavailable
from cornplug.store.base import KEY_BYTES
from cornplug.store.table.entry_table_layout import (
    BUCKETS,
    FAR_ANSWERS,
    HAS_DISK,
    HEADER_BYTES,
    LANES,
    META_AT,
    ON_DISK_RECORD,
    RECORD,
    RECORD_BYTES,
    RECORD_MASK,
    RECORDS,
    SERVING,
    TAG_MASK,
    TAGS,
    TICKETS,
    TICKETS_AT,
    UNTAGGED,
    WORD_BYTES,
    TableShape,
    tag_of,
)
from cornplug.store.validation import check_keys

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
