"""Snapshots of a store: its memory, its namespaces, its disk, its far stores."""

from __future__ import annotations

import msgspec

OTHER_APPS = "(others)"


class NamespaceStat(msgspec.Struct, frozen=True):
    """One namespace of a store; sizes in bytes, counts since the store began."""

    used_bytes: int
    share_bytes: int
    ceiling_bytes: int
    entries: int
    hits: int
    reservations: dict[str, int]
    """Answer -> keys: "given", or the value of a `ReserveRefusal`."""
    removals: dict[str, int]
    """Cause -> entries: "evicted", "expired" (the namespace's time to live), "deleted", "purged"."""


class DiskNamespaceStat(msgspec.Struct, frozen=True):
    """One namespace of a store's disk; sizes in bytes, counts since the store began."""

    used_bytes: int
    entries: int
    hits: int
    """Entries that were recalled into memory."""
    removals: dict[str, int]
    """Cause -> entries: "evicted" with their segment, "expired", "deleted", "purged", "damaged"."""


class DiskStat(msgspec.Struct, frozen=True):
    """The disk of a store; sizes in bytes, counts since the store began."""

    capacity_bytes: int
    used_bytes: int
    """Of its files."""
    entries: int
    """Also of those that are in memory too."""
    queued: int
    """Entries that wait for their writing."""
    scanning: bool
    """Entries of an earlier daemon are being looked for."""
    writes: dict[str, int]
    """Outcome -> entries: "written", "gone" (evicted or deleted before), "dropped" (too many waited),
    "too_large", "disk_full", "disk_readonly", "disk_error", "ceiling"."""
    reads: dict[str, int]
    """Outcome -> recalled entries: "read", "refused" (too many at once), "damaged", "late" (deleted
    meanwhile), "disk_error", or the value of a `ReserveRefusal`."""
    namespaces: dict[str, DiskNamespaceStat]


class FarStat(msgspec.Struct, frozen=True):
    """One far store; counts since this host's store began."""

    answers: bool
    """False after a failure: nothing is asked of it for a while."""
    queued: int
    """Entries that wait for their writing."""
    asks: dict[str, int]
    """Answer -> keys: "found", "absent", "error", "dropped" (too many waited)."""
    reads: dict[str, int]
    """Outcome -> recalled entries: "read", "gone" (no longer there, or `ttl_s` is over), "damaged", "error",
    "refused" (too many waited), "late" (deleted meanwhile), or the value of a `ReserveRefusal`."""
    writes: dict[str, int]
    """Outcome -> entries: "written", "present" (another host wrote it), "gone" (evicted before), "dropped"
    (too many waited), "too_large", "error"."""
    read_bytes: int
    written_bytes: int
    """Of records."""


class StoreStat(msgspec.Struct, frozen=True, omit_defaults=True):
    """A snapshot; all sizes in bytes."""

    capacity_bytes: int
    used_bytes: int
    entries: int
    reservations: int
    leases: int
    bytes_by_app: dict[str, int]
    """Of the 256 apps with most; all others together under OTHER_APPS."""
    evictions: int
    hits: int
    """Keys for which `lease` or a copying read found an entry, since the store began."""
    misses: int
    refusals: int
    """Reservations refused with FULL or TOO_LARGE."""
    found: int = 0
    """Keys that lookups in the shared table found. A waiting request is looked up again at each step."""
    absent: int = 0
    """Keys that such lookups did not find."""
    namespaces: dict[str, NamespaceStat] = {}
    """Empty where a store has none."""
    disk: DiskStat | None = None
    """None where a store has no disk."""
    far: dict[str, FarStat] = {}
    """By the URL without user and password; empty where a store has none."""
