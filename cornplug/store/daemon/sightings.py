"""Keys that writers asked room for, although they were not stored: by it the store knows a second request.

The doorkeeper of TinyLFU (Einziger et al., 2017), as a table of fixed size: buckets of four sightings, exact
but for their 48-bit fingerprints. The newest sighting of a bucket replaces the one that was not named for the
longest time, so a flood of keys makes the store forget, and costs no memory.
"""

from __future__ import annotations

import secrets
from array import array
from typing import Final

from cornplug.store.base import WriterPart

_BUCKETS: Final = 1 << 16
_WAYS: Final = 4
"""Sightings of one bucket; 262,144 in all, in 2 MiB."""
_TAG_BITS: Final = 16
_MAX_TAG: Final = (1 << _TAG_BITS) - 1
_MAX_FINGERPRINT: Final = (1 << 64 - _TAG_BITS) - 1


class Sightings:
    """Sightings of keys by requests. One request names a key once, or once for each part of a group."""

    def __init__(self) -> None:
        self._table = array("Q", bytes(8 * _BUCKETS * _WAYS))
        # Clients choose keys: without a salt they could choose the buckets as well.
        self._salt = secrets.token_bytes(16)

    def again(self, key: bytes, part: WriterPart | None) -> bool:
        """Whether an earlier request named this key; this one is a sighting too.

        The parts of one group name the same keys for the same request, in any order: such a part is a second
        sighting if this very part, or a writer outside the group, was there before.
        """
        tag = 0 if part is None else 1 + hash((self._salt, part.group)) % _MAX_TAG
        first = self._sight(hash((self._salt, key)), tag)
        if part is None or (first is not None and first != tag):
            return first is not None
        mine = self._sight(hash((self._salt, key, part.index)), tag)
        return first is not None and mine is not None

    def _sight(self, hashed: int, tag: int) -> int | None:
        """The tag of the first sighting, which stays; None where this one is the first."""
        start = (hashed & (_BUCKETS - 1)) * _WAYS
        fingerprint = hashed >> _TAG_BITS & _MAX_FINGERPRINT
        bucket = self._table[start : start + _WAYS].tolist()
        for i, word in enumerate(bucket):
            if word >> _TAG_BITS == fingerprint:
                del bucket[i]
                self._table[start : start + _WAYS] = array("Q", [word, *bucket])
                return word & _MAX_TAG
        self._table[start : start + _WAYS] = array("Q", [fingerprint << _TAG_BITS | tag, *bucket[:-1]])
        return None
