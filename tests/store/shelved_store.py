"""A store some of whose entries lie on a disk or far, that reads them when a test says so."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from cornplug.store.base import Leases, Store, Tier

_NO_KEY = bytes(32)


class ShelvedStore:
    """Passes everything on to `inner`, but for keys in `shelved`: they are on disk only.

    Attributes:
        looks: Questions of `tiers` after which a recalled key has come; None: it never comes.
        at_once: Keys that one `recall` takes.
        recalls: Keys of each `recall`.
    """

    has_disk = True

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.shelved: set[bytes] = set()
        self.looks: int | None = 3
        self.at_once = 1000
        self.recalls: list[list[bytes]] = []
        self.coming: dict[bytes, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def shelve_all(self, store: Any) -> None:
        """Put every entry of a KeyedStore on disk."""
        self.shelved |= {entry.key for entry in store.entries()}

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        there = self.inner.contains(keys, deadline_s=deadline_s)
        return bytes([one if key not in self.shelved else 0 for key, one in zip(keys, there, strict=True)])

    def tiers(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        for key in list(self.coming):
            self.coming[key] -= 1
            if self.coming[key] <= 0:
                del self.coming[key]
                self.shelved.discard(key)
        mask = self.contains(keys, deadline_s=deadline_s)
        return bytes([Tier.DISK if key in self.shelved else one for key, one in zip(keys, mask, strict=True)])

    def recall(self, keys: Sequence[bytes]) -> None:
        self.recalls.append(list(keys))
        if self.looks is not None:
            for key in [key for key in keys if key in self.shelved][: self.at_once]:
                self.coming.setdefault(key, self.looks)

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        asked = [_NO_KEY if key in self.shelved else key for key in keys]
        return dataclasses.replace(self.inner.lease(asked, ttl_s=ttl_s, deadline_s=deadline_s), keys=keys)


class FarShelvedStore(ShelvedStore):
    """Its shelved entries are far: absent until a far store was asked.

    Attributes:
        far: Keys that are absent, and on disk once they were asked for.
        answers_after: Looks after which the far store answers; None: never.
        names_at_once: Keys that one of its answers is about.
        sought: Keys of each question.
    """

    def __init__(self, inner: Store) -> None:
        super().__init__(inner)
        self.far: set[bytes] = set()
        self.is_far_up = True
        self.answers_after: int | None = 1
        self.names_at_once = 1000
        self.sought: list[list[bytes]] = []
        self._asked: list[bytes] = []
        self._answer_in: int | None = None

    def shelve_all(self, store: Any) -> None:
        """Put every entry of a MemoryStore far away."""
        super().shelve_all(store)
        self.far |= self.shelved

    def start_far_lookup(self, keys: Sequence[bytes]) -> int:
        if not self.is_far_up:
            return 0
        self.sought.append(list(keys))
        self._asked, self._answer_in = list(keys), self.answers_after
        return len(self.sought)

    def is_far_lookup_done(self, ticket: int) -> bool:
        self._look()
        return self.answers_after is not None and self._answer_in is None

    def _look(self) -> None:
        if self._answer_in is None:
            return
        self._answer_in -= 1
        if self._answer_in <= 0:
            self.far -= set(self._asked[: self.names_at_once])
            del self._asked[: self.names_at_once]
            self._answer_in = self.answers_after if self._asked else None

    def tiers(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        self._look()
        found = super().tiers(keys, deadline_s=deadline_s)
        return bytes(
            [Tier.ABSENT if key in self.far else tier for key, tier in zip(keys, found, strict=True)]
        )
