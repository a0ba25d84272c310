"""Statistics of a store: its memory, namespaces, disk and far stores."""

from __future__ import annotations

import msgspec

OTHER_APPS = "(others)"


class NamespaceStat(msgspec.Struct, frozen=True):
    """Statistics of a namespace. Sizes are in bytes, and counts are since the store started."""

    used_bytes: int
    share_bytes: int
    ceiling_bytes: int
    entries: int
    hits: int
    reservations: dict[str, int]
    """Keys by result: "given", or the value of a `ReserveRefusal`."""
    removals: dict[str, int]
    """Entries by cause: "evicted", "expired" (the namespace's time to live), "deleted", "purged"."""


class DiskNamespaceStat(msgspec.Struct, frozen=True):
    """Statistics of a namespace on disk. Sizes are in bytes, and counts are since the store started."""

    used_bytes: int
    entries: int
    hits: int
    """Number of entries that were recalled into memory."""
    removals: dict[str, int]
    """Entries by cause: "evicted" with their segment, "expired", "deleted", "purged", "damaged"."""


class DiskStat(msgspec.Struct, frozen=True):
    """Statistics of a store's disk. Sizes are in bytes, and counts are since the store started."""

    capacity_bytes: int
    used_bytes: int
    """Size of its files."""
    entries: int
    """Number of entries on disk, including entries that are also in memory."""
    queued: int
    """Number of entries that wait to be written."""
    scanning: bool
    """Whether the scan for entries of an earlier daemon is still running."""
    writes: dict[str, int]
    """Entries by outcome: "written", "gone" (evicted or deleted before), "dropped" (too many waiting),
    "too_large", "disk_full", "disk_readonly", "disk_error", "ceiling"."""
    reads: dict[str, int]
    """Recalled entries by outcome: "read", "refused" (too many at once), "damaged", "late" (deleted during
    the read), "disk_error", or the value of a `ReserveRefusal`."""
    namespaces: dict[str, DiskNamespaceStat]


class FarStat(msgspec.Struct, frozen=True):
    """Statistics of a far store. Counts are since this host's store started."""

    answers: bool
    """Whether the far store responds. After a failure, it is not used for a while."""
    queued: int
    """Number of entries that wait to be written."""
    asks: dict[str, int]
    """Keys by result: "found", "absent", "error", "dropped" (too many waiting)."""
    reads: dict[str, int]
    """Recalled entries by outcome: "read", "gone" (no longer stored, or `ttl_s` is over), "damaged", "error",
    "refused" (too many waiting), "late" (deleted during the read), or the value of a `ReserveRefusal`."""
    writes: dict[str, int]
    """Entries by outcome: "written", "present" (another host wrote it), "gone" (evicted before), "dropped"
    (too many waiting), "too_large", "error"."""
    read_bytes: int
    written_bytes: int
    """Bytes of written records."""


class StoreStat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Snapshot of a store's statistics. All sizes are in bytes."""

    capacity_bytes: int
    used_bytes: int
    entries: int
    reservations: int
    leases: int
    bytes_by_app: dict[str, int]
    """Bytes of the 256 largest apps. All others are summed under OTHER_APPS."""
    evictions: int
    hits: int
    """Keys for which `lease` or an unleased read found an entry, since the store started."""
    misses: int
    refusals: int
    """Reservations rejected with FULL or TOO_LARGE."""
    found: int = 0
    """Keys found by lookups in the shared table. A waiting request is looked up again in each step."""
    absent: int = 0
    """Keys not found by such lookups."""
    namespaces: dict[str, NamespaceStat] = {}
    """Statistics by namespace. Empty if the store has no namespaces."""
    disk: DiskStat | None = None
    """None if the store has no disk."""
    far: dict[str, FarStat] = {}
    """Statistics by URL without user and password. Empty if the store has no far stores."""
