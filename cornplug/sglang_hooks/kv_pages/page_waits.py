"""Waits of SGLang's storage threads for pages on disk or in far stores."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Final

from cornplug.engine_common.load_policy import FadedRate
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.store.base import FarReads, Store, Tier
from cornplug.store.recall import FAR_WAIT_S, recalled, sought, tiers_of

_RECALL_FRESH_S: Final = 60.0
"""Age at which measurements of a disk expire, so a disk that was too slow is tried again."""
_RECALL_PAUSE_S: Final = 5.0
"""Pause of disk reads after a read that exceeded its deadline, because each delays a request."""


class PageWaits:
    """Waits of one `PageReader`.

    Args:
        entry_bytes: bytes that this rank reads from a store page.
        pace: None if the engine is not measured.
    """

    def __init__(
        self, runtime: EngineRuntime, pace: LoadPace | None, *, page_tokens: int, entry_bytes: int
    ) -> None:
        self._run, self._pace = runtime, pace
        self._page_tokens, self._entry_bytes = page_tokens, entry_bytes
        self._disk_pace = FadedRate()
        """Bytes that the store has read from its disk for this rank."""
        self._again_s = 0.0

    def disk_s(self, entries: int) -> float:
        """Seconds that the store takes to read `entries` entries from disk, or 0 if it has not read any
        recently."""
        return self._disk_pace.seconds(entries * self._entry_bytes, fresh_s=_RECALL_FRESH_S) or 0.0

    def begin(self, store: Store, keys: Sequence[bytes], *, tokens: int) -> bool:
        """Query far stores for these absent keys, the first of `tokens` absent tokens. Returns whether
        a storage thread should wait for the replies. Called on the scheduler's thread, and does not wait."""
        if not isinstance(store, FarReads) or not store.far_answers or time.monotonic() < self._again_s:
            return False
        first_s = self.disk_s(max(1, tokens // self._page_tokens))
        if self._pace is not None and not self._pace.pays(tokens, first_s=first_s):
            return False
        return bool(store.seek(keys))

    def sought(self, parts: Sequence[Sequence[bytes]]) -> dict[bytes, int]:
        """Return a `Tier` for each key, after waiting for far stores. Raises StoreUnavailable.

        Args:
            parts: keys of each part of the pages. Any one of a part's entries is sufficient.
        """
        store, deadline_s, began_s = self._run.store, self._run.deadline_s, time.monotonic()
        keys = unique(parts)
        found = dict(zip(keys, tiers_of(store, keys, deadline_s=deadline_s), strict=True))
        if not isinstance(store, FarReads) or not store.far_answers or began_s < self._again_s:
            return found
        if absent := lacking(parts, found):
            tokens = len(absent) * self._page_tokens
            within_s = FAR_WAIT_S if self._pace is None else self._pace.far_wait_s(tokens)
            tiers = sought(store, absent, within_s=within_s, deadline_s=deadline_s)
            found |= dict(zip(absent, tiers, strict=True))
            self._waited(began_s)
        return found

    def recalled(self, parts: Sequence[Sequence[bytes]]) -> dict[bytes, int]:
        """Like `sought`, but also waits for entries on disk. A wait without a result starts a pause."""
        store, deadline_s = self._run.store, self._run.deadline_s
        if time.monotonic() < self._again_s:
            keys = unique(parts)
            return dict(zip(keys, store.contains(keys, deadline_s=deadline_s), strict=True))
        found, began_s = self.sought(parts), time.monotonic()
        if on_disk := [key for key, tier in found.items() if tier == Tier.DISK]:
            patience_s = self._run.background_timeout_s
            tiers = recalled(store, on_disk, within_s=patience_s, deadline_s=deadline_s)
            found |= dict(zip(on_disk, tiers, strict=True))
            took_s, left = time.monotonic() - began_s, tiers.count(Tier.DISK)
            self._disk_pace.note(max(1, len(on_disk) - left) * self._entry_bytes, took_s)
            self._waited(began_s)
            if left:
                self._again_s = time.monotonic() + _RECALL_PAUSE_S
        return found

    def _waited(self, began_s: float) -> None:
        if self._pace is not None:
            self._pace.waited(time.monotonic() - began_s)


def unique(parts: Sequence[Sequence[bytes]]) -> list[bytes]:
    """Return each key once, in order."""
    return list(dict.fromkeys(key for part in parts for key in part))


def lacking(parts: Sequence[Sequence[bytes]], found: Mapping[bytes, int]) -> list[bytes]:
    """Return the keys of parts for which no entry was found."""
    return unique([part for part in parts if not any(found[key] for key in part)])
