"""Connector resets that a user requests (`/reset_prefix_cache?reset_external=true`): the engine ignores pages
stored before. Other engines still use these pages.

vLLM also resets connectors in each pause and sleep, because the weights may change. Pages stay valid then,
because their keys depend on the weights, and replaced weights end sharing. An engine that wakes up finds its
prefixes in the store.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.store.base import KEY_BYTES, PROMOTED, Leases, PayloadLocation, Reservation

_here: Final = threading.local()


def part_of_pause() -> bool:
    """Return whether this thread resets caches because the engine is paused or put to sleep."""
    return getattr(_here, "pausing", False)


def _reset_caches(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    _here.pausing = True
    try:
        return original(core, *args, **kwargs)
    finally:
        _here.pausing = False


class StoredBefore:
    """Pages that the store held at the last reset. This engine ignores them."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._run = runtime
        self._due = False
        self._last: PayloadLocation | None = None
        """Location of a reservation that was made after them."""

    def begin(self) -> None:
        """Begin a reset. The store is queried at the next lookup, so the caller does not wait."""
        self._due = True

    def known(self) -> bool:
        """Return whether old pages can be distinguished from later ones. After a reset, this needs a reply of
        the store."""
        if self._due:
            try:
                self._last = self._reserve_now()
            except CornplugError:
                return False
            self._due = self._last is None
        return not self._due

    @property
    def reset(self) -> bool:
        """Whether there was a reset. Pages that return from disk may be older than it."""
        return self._due or self._last is not None

    def leading_since(self, leases: Leases) -> int:
        """Return the number of leading leases whose pages were stored since the reset and were not on disk
        since."""
        if self._last is None:
            return len(leases)
        generations = leases.generations
        since = self._last.generation if leases.arena_id == self._last.arena_id else 0
        old = np.flatnonzero((generations < since) | (generations >= PROMOTED))
        return int(old[0]) if len(old) else len(leases)

    def _reserve_now(self) -> PayloadLocation | None:
        store, deadline_s = self._run.store, self._run.deadline_s
        wanted = [(secrets.token_bytes(KEY_BYTES), 1)]
        (given,) = store.reserve(wanted, app=self._run.app, deadline_s=deadline_s)
        if not isinstance(given, Reservation):
            return None
        store.release([given.token], deadline_s=deadline_s)
        return given.location


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore._reset_caches", _reset_caches),
)
