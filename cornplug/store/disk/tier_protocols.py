"""Interfaces of the store that its disk tier uses. `cornplug/store/daemon/` implements them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cornplug.settings import NamespaceConfig
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal, ReserveTerms

DISK_OWNER: Final = 0
"""Owner number of the disk tier's reservations. Clients have other numbers."""
FAR_OWNER: Final = -1
"""Owner number of the far tier's reservations."""


class TieredEntry(Protocol):
    """Entry in memory."""

    @property
    def key(self) -> bytes: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def app(self) -> str: ...
    @property
    def location(self) -> PayloadLocation: ...
    @property
    def cost_s(self) -> float: ...
    @property
    def written_s(self) -> float:
        """Time at which the entry was written, on the monotonic clock."""

    @property
    def visible(self) -> bool:
        """Whether the entry is stored. This becomes False before the entry's memory can be reused."""


class TieredIndex(Protocol):
    """Index of the entries in memory."""

    def find(self, key: bytes) -> TieredEntry | None:
        """Return an entry, or None."""

    def reserve(
        self,
        owner: int,
        entries: Sequence[tuple[bytes, int]],
        terms: ReserveTerms,
        *,
        now_s: float,
        is_promotion: bool = False,
    ) -> list[Reservation | ReserveRefusal]:
        """Reserve memory for each (key, size), or return the reason why there is no memory.

        Args:
            is_promotion: Whether the entries are on disk or in a far store.
        """

    def commit(self, owner: int, token: int, meta: bytes, *, age_s: float = 0.0) -> bool:
        """Publish an entry that was written `age_s` seconds ago."""

    def release(self, owner: int, tokens: Sequence[int], *, now_s: float) -> None:
        """Release reservations."""


class NamespaceRules(Protocol):
    """Rules of the namespaces."""

    def namespace_of(self, app: str) -> str:
        """Return the namespace of an app."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all namespaces."""

    @property
    def has_guarantees(self) -> bool:
        """Whether a namespace is pinned or has a share."""

    def rules_of(self, app: str) -> NamespaceConfig:
        """Return the rules of an app's namespace."""

    def ttl_s(self, app: str) -> float | None:
        """Return the time to live of an app's entries, or None."""


class DiskMarks(Protocol):
    """Marks that show clients which entries are on disk only."""

    def show_on_disk(self, key: bytes) -> None:
        """Mark an entry as on disk only."""

    def hide_on_disk(self, key: bytes) -> None:
        """Remove the mark of an entry."""


class EntryMemory(Protocol):
    """Memory of entries and reservations."""

    def view(self, location: PayloadLocation) -> memoryview:
        """Return a writable view of a location."""

    def may_write(self, location: PayloadLocation) -> bool:
        """Return whether this location is still reserved."""


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Parts of the daemon that the disk tier and the far tier use."""

    index: TieredIndex
    memory: EntryMemory
    rules: NamespaceRules
    marks: DiskMarks
