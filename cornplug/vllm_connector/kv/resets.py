"""Handling of connector resets that a user requests (`/reset_prefix_cache?reset_external=true`). After such a
reset, the engine ignores pages that were stored before it. Other engines still use these pages.

vLLM also resets connectors in each pause and sleep, because the weights may change. Pages stay valid in this
case, because their keys depend on the weights, and sharing ends when weights are replaced. After it wakes up,
an engine can load its prefixes from the store.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.store.base import KEY_BYTES, PROMOTED, Leases, PayloadLocation, Reservation, ReserveTerms

_here: Final = threading.local()


def part_of_pause() -> bool:
    """Return whether this thread is currently resetting caches because the engine is paused or put to
    sleep."""
    return getattr(_here, "pausing", False)


def _reset_caches(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    _here.pausing = True
    try:
        return original(core, *args, **kwargs)
    finally:
        _here.pausing = False


class StoredBefore:
    """Distinguishes pages that were stored before the last reset, which this engine ignores, from pages that
    were stored later."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._run = runtime
        self._due = False
        self._last: PayloadLocation | None = None
        """Location that the store reserved right after the last reset. Pages with an older generation were
        stored before the reset. None if there was no reset."""

    def begin(self) -> None:
        """Begin a reset. The store is queried only at the next lookup, so that the caller does not wait."""
        self._due = True

    def known(self) -> bool:
        """Return whether pages from before the reset can be distinguished from later pages. After a reset,
        this needs a reply from the store."""
        if self._due:
            try:
                self._last = self._reserve_now()
            except CornplugError:
                return False
            self._due = self._last is None
        return not self._due

    @property
    def reset(self) -> bool:
        """Whether a reset of the connector was requested. Pages read back from disk may predate the reset."""
        return self._due or self._last is not None

    def leading_since(self, leases: Leases) -> int:
        """Return the number of leading leases whose pages are known to be stored after the last reset. Pages
        that were read back from disk do not count."""
        if self._last is None:
            return len(leases)
        generations = leases.generations
        since = self._last.generation if leases.arena_id == self._last.arena_id else 0
        old = np.flatnonzero((generations < since) | (generations >= PROMOTED))
        return int(old[0]) if len(old) else len(leases)

    def _reserve_now(self) -> PayloadLocation | None:
        store, deadline_s = self._run.store, self._run.deadline_s
        wanted = [(secrets.token_bytes(KEY_BYTES), 1)]
        (given,) = store.reserve(wanted, ReserveTerms(self._run.app), deadline_s=deadline_s)
        if not isinstance(given, Reservation):
            return None
        store.release([given.token], deadline_s=deadline_s)
        return given.location


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore._reset_caches", _reset_caches),
)
