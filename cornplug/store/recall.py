"""Recalls of entries from disk or far stores into memory. They do nothing for a store without these."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from cornplug.store.base import FarReads, Store, Tier, TieredReads

_FIRST_PAUSE_S: Final = 0.5e-3
_LAST_PAUSE_S: Final = 5e-3
"""Maximum pause between lookups in the table, which send no message."""


MOST_SOUGHT: Final = 512
"""Maximum number of absent entries that one request looks up in far stores. Computing the keys takes 1 ms."""
FAR_WAIT_S: Final = 5e-3
"""Maximum time that a reader waits for a far store's lookup. A later result is used by the next request."""


def has_disk(store: Store) -> bool:
    """Return whether entries can be on disk only."""
    return isinstance(store, TieredReads) and store.has_disk


def tiers_of(store: Store, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
    """Return a `Tier` per key. For a store without a disk, use `Store.contains`. Raises StoreUnavailable."""
    if isinstance(store, TieredReads):
        return store.tiers(keys, deadline_s=deadline_s)
    return store.contains(keys, deadline_s=deadline_s)


def begin_recall(store: Store, keys: Sequence[bytes], tiers: bytes) -> bool:
    """Start to read entries that are on disk only into memory, and return whether there are any.

    Raises StoreUnavailable."""
    on_disk = [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.DISK]
    if on_disk and isinstance(store, TieredReads):
        store.recall(on_disk)
    return bool(on_disk)


def sought(store: Store, keys: Sequence[bytes], *, within_s: float, deadline_s: float) -> bytes:
    """A `Tier` a key, once far stores have answered for the absent ones, or `within_s` seconds later. For
    background threads. Raises StoreUnavailable.

    Args:
        deadline_s: Of each question to the store.
    """
    tiers = tiers_of(store, keys, deadline_s=deadline_s)
    if Tier.ABSENT not in tiers or not isinstance(store, FarReads):
        return tiers
    absent = [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.ABSENT]
    ticket = store.seek(absent[:MOST_SOUGHT])
    if not ticket:
        # The lookup of another caller may have completed since the first check.
        return tiers_of(store, keys, deadline_s=deadline_s)
    end_s, over = time.monotonic() + within_s, False
    while not over and Tier.ABSENT in tiers and time.monotonic() < end_s:
        time.sleep(_FIRST_PAUSE_S)
        # Check this before `tiers`, because found entries are shown before the ticket.
        over = store.answered(ticket)
        tiers = tiers_of(store, keys, deadline_s=deadline_s)
    return tiers


def recalled(store: Store, keys: Sequence[bytes], *, within_s: float, deadline_s: float) -> bytes:
    """A `Tier` a key, once none is on disk only, or `within_s` seconds later. For background threads.

    Far stores are asked for absent keys first, and waited for as long as FAR_WAIT_S. Raises StoreUnavailable.

    Args:
        deadline_s: Of each question to the store.
    """
    tiers = sought(store, keys, within_s=min(FAR_WAIT_S, within_s), deadline_s=deadline_s)
    if not begin_recall(store, keys, tiers):
        return tiers
    end_s, pause_s = time.monotonic() + within_s, _FIRST_PAUSE_S
    while Tier.DISK in tiers and (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        tiers = tiers_of(store, keys, deadline_s=deadline_s)
    return tiers
