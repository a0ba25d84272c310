"""Result of `Store.lease`. Leases are stored in columns, because a prompt can have thousands of pages."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from cornplug.store.base import Lease, PayloadLocation

PLACE: Final = struct.Struct("=QQQ")
"""Location of a payload: offset, size, generation. All zeros if there is no payload."""
NO_PLACE: Final = bytes(PLACE.size)


def place(location: PayloadLocation) -> bytes:
    """Encode a location within its arena."""
    return PLACE.pack(location.offset, location.size, location.generation)


@dataclass(frozen=True, slots=True)
class Leases(Sequence[Lease | None]):
    """A lease for each key that is present, None for the others. A slice is `Leases`."""

    arena_id: bytes
    keys: Sequence[bytes]
    metas: Sequence[bytes | None]
    """Header of each entry, or None if the key is absent."""
    places: bytes
    """One `PLACE` per key."""
    tokens: Sequence[int]
    """One token per key, or 0 if there is no lease."""

    @classmethod
    def joined(cls, arena_id: bytes, parts: Sequence[Leases]) -> Leases:
        """Join the leases of several replies for one arena."""
        keys = list(chain.from_iterable(part.keys for part in parts))
        metas = list(chain.from_iterable(part.metas for part in parts))
        tokens = list(chain.from_iterable(part.tokens for part in parts))
        return cls(arena_id, keys, metas, b"".join([part.places for part in parts]), tokens)

    @property
    def held(self) -> list[int]:
        """Tokens to release, without duplicates."""
        return [token for token in dict.fromkeys(self.tokens) if token]

    @property
    def sizes(self) -> NDArray[np.uint64]:
        """Sizes of the payloads in bytes."""
        return np.frombuffer(self.places, np.uint64)[1::3]

    @property
    def generations(self) -> NDArray[np.uint64]:
        """Generations of the payloads, or 0 if there is no payload."""
        return np.frombuffer(self.places, np.uint64)[2::3]

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> Lease | None: ...
    @overload
    def __getitem__(self, index: slice) -> Leases: ...
    def __getitem__(self, index: int | slice) -> Lease | Leases | None:
        if isinstance(index, slice):
            start, stop, _ = index.indices(len(self))
            places = self.places[start * PLACE.size : stop * PLACE.size]
            keys, metas, tokens = self.keys[index], self.metas[index], self.tokens[index]
            return Leases(self.arena_id, keys, metas, places, tokens)
        at = range(len(self))[index]
        return next(iter(self[at : at + 1]))

    def __iter__(self) -> Iterator[Lease | None]:
        rows = zip(self.tokens, self.keys, self.metas, PLACE.iter_unpack(self.places), strict=True)
        for token, key, meta, (offset, size, generation) in rows:
            if meta is None:
                yield None
            else:
                yield Lease(token, key, meta, PayloadLocation(self.arena_id, offset, size, generation))


NO_LEASES: Final = Leases(b"", (), (), b"", ())
