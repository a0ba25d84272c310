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
    """Number of reserved keys by result: "given", or the value of a `ReserveRefusal`."""
    removals: dict[str, int]
    """Number of removed entries by cause: "evicted", "expired" (the namespace's time to live), "deleted",
    "purged"."""


class DiskNamespaceStat(msgspec.Struct, frozen=True):
    """Statistics of a namespace on disk. Sizes are in bytes, and counts are since the store started."""

    used_bytes: int
    entries: int
    hits: int
    """Number of entries that were recalled into memory."""
    removals: dict[str, int]
    """Number of removed entries by cause: "evicted" (with their segment), "expired", "deleted", "purged",
    "damaged"."""


class DiskStat(msgspec.Struct, frozen=True):
    """Statistics of a store's disk. Sizes are in bytes, and counts are since the store started."""

    capacity_bytes: int
    used_bytes: int
    """Size of the files on the disk."""
    entries: int
    """Number of entries on disk, including entries that are also in memory."""
    queued: int
    """Number of entries that wait to be written."""
    scanning: bool
    """Whether the scan for entries of an earlier daemon is still running."""
    writes: dict[str, int]
    """Number of entries by outcome of their write: "written", "gone" (evicted or deleted before the write),
    "dropped" (too many entries waited), "too_large", "disk_full", "disk_readonly", "disk_error",
    "ceiling"."""
    reads: dict[str, int]
    """Number of recalled entries by outcome: "read", "refused" (too many recalls at once), "damaged", "late"
    (deleted during the read), "disk_error", or the value of a `ReserveRefusal`."""
    namespaces: dict[str, DiskNamespaceStat]


class FarStat(msgspec.Struct, frozen=True):
    """Statistics of a far store. Counts are since this host's store started."""

    answers: bool
    """Whether the far store responds. After a failure, it is not used for a while."""
    queued: int
    """Number of entries that wait to be written."""
    asks: dict[str, int]
    """Number of keys that were looked up, by result: "found", "absent", "error", "dropped" (too many keys
    waited)."""
    reads: dict[str, int]
    """Number of recalled entries by outcome: "read", "gone" (no longer stored, or `ttl_s` is over),
    "damaged", "error", "refused" (too many recalls waited), "late" (deleted during the read), or the value of
    a `ReserveRefusal`."""
    writes: dict[str, int]
    """Number of entries by outcome of their write: "written", "present" (another host wrote the record),
    "gone" (evicted before the write), "dropped" (too many entries waited), "too_large", "error"."""
    read_bytes: int
    written_bytes: int
    """Size of the written records in bytes."""


class StoreStat(msgspec.Struct, frozen=True, omit_defaults=True):
    """Snapshot of a store's statistics. All sizes are in bytes."""

    capacity_bytes: int
    used_bytes: int
    entries: int
    reservations: int
    leases: int
    bytes_by_app: dict[str, int]
    """Bytes of each of the 256 largest apps. The bytes of all other apps are summed under OTHER_APPS."""
    evictions: int
    hits: int
    """Number of keys for which `lease` or an unleased read found an entry, since the store started."""
    misses: int
    refusals: int
    """Number of reservations rejected with FULL or TOO_LARGE."""
    found: int = 0
    """Number of keys found by lookups in the shared table. An engine looks up a waiting request again in each
    step."""
    absent: int = 0
    """Number of keys not found by lookups in the shared table."""
    namespaces: dict[str, NamespaceStat] = {}
    """Statistics by namespace. Empty if the store has no namespaces."""
    disk: DiskStat | None = None
    """Statistics of the store's disk. None if the store has no disk."""
    far: dict[str, FarStat] = {}
    """Statistics of each far store, by its URL without user and password. Empty if there are no far
    stores."""
