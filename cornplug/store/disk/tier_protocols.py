"""The store as its disk tier sees it: `cornplug/store/daemon/` implements these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from cornplug.settings import NamespaceConfig
from cornplug.store.base import PayloadLocation, Reservation, ReserveRefusal

TIER_OWNER: Final = 0
"""The disk's number among the owners of reservations; clients have others."""
FAR_OWNER: Final = -1
"""That of the far tier."""


class TieredEntry(Protocol):
    """An entry in memory."""

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
        """Of the monotonic clock."""

    @property
    def visible(self) -> bool:
        """False from a moment before its room can be another's."""


class TieredIndex(Protocol):
    """The entries in memory."""

    def find(self, key: bytes) -> TieredEntry | None:
        """An entry."""

    def reserve(
        self,
        owner: int,
        entries: Sequence[tuple[bytes, int]],
        *,
        app: str,
        now_s: float,
        cost_s: float = 0.0,
        promotes: bool = False,
    ) -> list[Reservation | ReserveRefusal]:
        """Room for each (key, size), or why not.

        Args:
            promotes: For an entry that the disk has.
        """

    def commit(self, owner: int, token: int, meta: bytes, *, age_s: float = 0.0) -> bool:
        """Publish an entry that was written so long ago."""

    def release(self, owner: int, tokens: Sequence[int], *, now_s: float) -> None:
        """Give reservations up."""


class NamespaceRules(Protocol):
    """What namespaces say."""

    def name_of(self, app: str) -> str:
        """The namespace of an app."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all namespaces."""

    @property
    def has_guarantees(self) -> bool:
        """Whether a namespace is pinned or has a share."""

    def rules_of(self, app: str) -> NamespaceConfig:
        """The rules of an app's namespace."""

    def ttl_s(self, app: str) -> float | None:
        """The time to live of an app's entries."""


class DiskMarks(Protocol):
    """Where clients see which entries are on disk only."""

    def show_on_disk(self, key: bytes) -> None:
        """Show one."""

    def hide_on_disk(self, key: bytes) -> None:
        """Show it no longer."""


class RoomMemory(Protocol):
    """The bytes of entries and of rooms for them."""

    def view(self, location: PayloadLocation) -> memoryview:
        """The bytes of a location, writable."""

    def may_write(self, location: PayloadLocation) -> bool:
        """Whether this location is reserved still."""
