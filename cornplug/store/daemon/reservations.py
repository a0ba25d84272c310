"""Entries being written: who may write where, until when, and when their room is safe to give away.

    absent ──reserve──> writing ──last part committed──> an entry
                           │
                           └─given up, expired, a writer's end──> ended ──nobody writes there──> free

Nobody can take a mapping back from a writer. So an ended draft keeps its room until each of its
writers has committed, if too late, or has given up or gone and `quarantine_s` passed, or until
`reclaim_s` passed. Its key is free for others at once, and nobody begins to write there
(`write_fences.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from cornplug import codec
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal, WriterPart
from cornplug.store.daemon.expiry_buckets import ExpiryBuckets

RESERVATION_S: Final = 30.0
"""How long a reservation keeps others from writing its key (Mooncake's time as well)."""
RECLAIM_S: Final = 600.0
"""How long an ended one keeps its room from others while its writer, alive, says nothing."""


@dataclass(slots=True, eq=False)
class OpenEntry:
    """Room for one entry and what is in already. One without a group has one part, 0."""

    key: bytes
    app: str
    room: int
    location: PayloadLocation
    group: bytes
    count: int
    expires: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    """Part -> the token of its writer."""
    metas: dict[int, bytes] = field(default_factory=dict)
    """Part -> its meta, once committed."""
    busy: set[int] = field(default_factory=set)
    """Tokens of writers that may be writing."""
    ended: bool = False
    free_after_s: float = 0.0
    """End of the quarantine; 0 without one."""

    @property
    def whole(self) -> bool:
        """Whether every part is in."""
        return len(self.metas) == self.count

    def meta(self) -> bytes:
        """The entry's. Raises CodecError when the parts do not make a whole."""
        if not self.group:
            return self.metas[0]
        return codec.join_parts(self.metas.values(), key=self.key)


@dataclass(frozen=True, slots=True)
class _Writer:
    owner: int
    part: int
    draft: OpenEntry


class OpenEntries:
    """All drafts of one store.

    Args:
        on_end: told of each draft that will be no entry, once, before its room is free.
        free: takes back the room of such a draft.
        disown: told of each (owner, token) that means nothing any more.
    """

    def __init__(
        self,
        *,
        quarantine_s: float,
        reservation_s: float,
        reclaim_s: float,
        on_end: Callable[[OpenEntry], None],
        free: Callable[[OpenEntry], None],
        disown: Callable[[int, int], None],
    ) -> None:
        self._quarantine_s = quarantine_s
        self._reservation_s = reservation_s
        self._reclaim_s = reclaim_s
        self._on_end = on_end
        self._free = free
        self._disown = disown
        self._now_s = 0.0
        self._by_key: dict[bytes, OpenEntry] = {}
        self._writers: dict[int, _Writer] = {}
        self._expiries: ExpiryBuckets[OpenEntry] = ExpiryBuckets()
        self._quarantine: list[tuple[float, int, OpenEntry]] = []

    def __len__(self) -> int:
        """Drafts that may still become entries."""
        return len(self._by_key)

    def find(self, key: bytes, size: int, part: WriterPart | None) -> OpenEntry | ReserveRefusal | None:
        """The draft to join as `part`, PENDING where that cannot be, None where there is none."""
        draft = self._by_key.get(key)
        if draft is None:
            return None
        if part is None or (draft.group, draft.count) != (part.group, part.count):
            return ReserveRefusal.PENDING
        if draft.location.size != size or part.index in draft.tokens:
            return ReserveRefusal.PENDING
        return draft

    def begin(
        self,
        key: bytes,
        location: PayloadLocation,
        room: int,
        *,
        app: str,
        part: WriterPart | None,
        now_s: float,
    ) -> OpenEntry:
        """A draft that nobody writes yet."""
        group, count = (b"", 1) if part is None else (part.group, part.count)
        draft = self._by_key[key] = OpenEntry(key, app, room, location, group, count)
        draft.expires = self._expiries.add(draft, now_s + self._reservation_s)
        return draft

    def join(self, draft: OpenEntry, owner: int, token: int, part: WriterPart | None) -> Reservation:
        """Let `owner` write its part."""
        index = 0 if part is None else part.index
        draft.tokens[index] = token
        draft.busy.add(token)
        self._writers[token] = _Writer(owner, index, draft)
        return Reservation(token, draft.key, draft.location)

    def owns(self, owner: int, token: int) -> bool:
        writer = self._writers.get(token)
        return writer is not None and writer.owner == owner

    def put(self, token: int, meta: bytes) -> OpenEntry | None:
        """A writer is done with its part; None when its draft has ended or it was done before."""
        writer = self._writers[token]
        draft = writer.draft
        if draft.ended:
            self._forget(token)
            return None
        if writer.part in draft.metas:
            return None
        draft.metas[writer.part] = meta
        draft.busy.discard(token)
        return draft

    def publish(self, draft: OpenEntry) -> None:
        """Forget a draft that has become an entry."""
        del self._by_key[draft.key]
        self._expiries.discard(draft, draft.expires)
        for token in draft.tokens.values():
            self._pop(token)

    def lose(self, token: int, *, now_s: float) -> None:
        """A writer's connection has ended, or gives up what another process of the writer's may
        be writing for a moment yet."""
        writer = self._writers[token]
        draft = writer.draft
        if writer.part not in draft.metas:
            draft.free_after_s = now_s + self._quarantine_s
        self.end(draft)
        self._forget(token)

    def end(self, draft: OpenEntry) -> None:
        """This will be no entry: its key is free for others, its room once nobody writes there."""
        if draft.ended:
            return
        draft.ended = True
        del self._by_key[draft.key]
        self._expiries.discard(draft, draft.expires)
        for part in draft.metas:
            self._pop(draft.tokens[part])
        self._on_end(draft)
        if draft.busy:
            draft.expires = self._expiries.add(draft, self._now_s + self._reclaim_s)
        else:
            self._settle(draft)

    def sweep(self, now_s: float, limit: int) -> None:
        """End what has expired and free what nobody writes any more, at most `limit` of each."""
        self._now_s = now_s
        for draft in self._expiries.due(now_s, limit):
            if not draft.ended:
                self.end(draft)
                continue
            for token in list(draft.busy):
                self._pop(token)
            draft.busy.clear()
            self._settle(draft)
        for _ in range(limit):
            if not self._quarantine or self._quarantine[0][0] > now_s:
                return
            self._free(heapq.heappop(self._quarantine)[2])

    def _forget(self, token: int) -> None:
        if token not in self._writers:
            return
        draft = self._pop(token)
        if token not in draft.busy:
            return
        draft.busy.discard(token)
        if draft.ended and not draft.busy:
            self._expiries.discard(draft, draft.expires)
            self._settle(draft)

    def _pop(self, token: int) -> OpenEntry:
        writer = self._writers.pop(token)
        self._disown(writer.owner, token)
        return writer.draft

    def _settle(self, draft: OpenEntry) -> None:
        if draft.free_after_s > self._now_s:
            heapq.heappush(self._quarantine, (draft.free_after_s, draft.location.offset, draft))
        else:
            self._free(draft)
