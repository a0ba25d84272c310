"""Resets, pauses and the end of an engine. This module decides which stored pages the engine ignores
afterwards, and what happens to copies that are still in flight.

A user may request a connector reset (`/reset_prefix_cache?reset_external=true`). After such a reset, the
engine ignores pages that were stored earlier. Other engines still use these pages. vLLM also resets
connectors in each pause and sleep, because the weights may change. In this case, stored pages stay valid,
because their keys depend on the weights, and sharing ends when weights are replaced. Thus an engine can load
prefixes from the store after it wakes up.

An engine core in a separate process continues to run steps until all copies have ended. An engine core in its
caller's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) runs no step after the program's last request. Therefore
copies may be in flight when this engine sleeps or when the program ends.

vLLM keeps an aborted request until its blocks are loaded, and asserts that no request with the same id
arrives in the meantime. With VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, vLLM uses the client's request ids. A
client that reuses an id would then stop the engine. With this module, the load keeps the blocks, and vLLM
removes the request immediately.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.store.base import KEY_BYTES, PROMOTED, Leases, PayloadLocation, Reservation, ReserveTerms
from cornplug.vllm_connector import compat

_LAST_SAVES_S: Final = 5.0
"""Maximum seconds to wait for unfinished saves when the program ends."""

_thread_state: Final = threading.local()


def is_pausing() -> bool:
    """Return whether this thread is resetting caches because the engine is being paused or put to sleep."""
    return getattr(_thread_state, "pausing", False)


class ResetFilter:
    """Distinguishes pages that were stored before the last reset from later pages. This engine ignores the
    earlier pages."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._runtime = runtime
        self._is_pending = False
        self._marker: PayloadLocation | None = None
        """Location that the store reserved right after the last reset. Pages with an older generation were
        stored before the reset. None if there was no reset."""

    def begin_reset(self) -> None:
        """Begin a reset. Returns immediately, because the next lookup sends the request to the store."""
        self._is_pending = True

    def can_distinguish(self) -> bool:
        """Return whether pages from before the reset can be distinguished from later pages. After a reset,
        this requires a reply from the store."""
        if self._is_pending:
            try:
                self._marker = self._reserve_marker()
            except CornplugError:
                return False
            self._is_pending = self._marker is None
        return not self._is_pending

    @property
    def was_reset(self) -> bool:
        """Whether a connector reset was requested. Pages that are read back from disk may be older than
        it."""
        return self._is_pending or self._marker is not None

    def count_since_reset(self, leases: Leases) -> int:
        """Return the number of leading leases whose pages are known to have been stored since the last reset.
        Without a reset, this is the number of leases. Pages that were read back from disk do not count."""
        if self._marker is None:
            return len(leases)
        generations = leases.generations
        since = self._marker.generation if leases.arena_id == self._marker.arena_id else 0
        old = np.flatnonzero((generations < since) | (generations >= PROMOTED))
        return int(old[0]) if len(old) else len(leases)

    def _reserve_marker(self) -> PayloadLocation | None:
        store, deadline_s = self._runtime.store, self._runtime.deadline_s
        wanted = [(secrets.token_bytes(KEY_BYTES), 1)]
        (given,) = store.reserve(wanted, ReserveTerms(self._runtime.app), deadline_s=deadline_s)
        if not isinstance(given, Reservation):
            return None
        store.release([given.token], deadline_s=deadline_s)
        return given.location


def _reset_caches(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    _thread_state.pausing = True
    try:
        return original(core, *args, **kwargs)
    finally:
        _thread_state.pausing = False


def _sleep(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        for connector in _our_connectors(get_kv_transfer_group()):
            connector._end_copies()
    return original(worker, *args, **kwargs)


def _shutdown(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.v1.engine.core import EngineCoreProc

    if not isinstance(core, EngineCoreProc):
        try:
            _finish_saves(core)
        except Exception:  # noqa: BLE001 - any error of the engine
            compat.logger.warning(
                "cornplug: saving the last KV pages failed when the engine ended, so they must be recomputed",
                exc_info=True,
            )
    return original(core, *args, **kwargs)


def _finish_saves(core: Any) -> None:
    """Run engine steps until the saves of the last requests have ended. On a CPU, these copies wait until the
    engine is idle."""
    connectors = (
        [] if core.scheduler.has_unfinished_requests() else list(_our_connectors(core.scheduler.connector))
    )
    until = time.monotonic() + _LAST_SAVES_S
    while any(one.has_pending_push_work() for one in connectors) and time.monotonic() < until:
        core.step_fn()


def _add_request(
    original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    held = scheduler.requests.get(request.request_id)
    # With several connectors, the end of a load is reported without the load's identity. Do not detach the
    # load in this case.
    detach = getattr(scheduler.connector, "_detach_load", None)
    if held is not None and held.is_finished() and detach is not None and detach(held):
        scheduler._free_blocks(held)
    return original(scheduler, request, *args, **kwargs)


def _our_connectors(connector: Any) -> Iterator[Any]:
    """Yield cornplug's KV connector, which is `connector` itself or one of its children."""
    for one in getattr(connector, "sub_connectors", [connector]):
        if hasattr(one, "_end_copies"):
            yield one


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore._reset_caches", _reset_caches),
    ("vllm.v1.worker.gpu_worker", "Worker.sleep", _sleep),
    ("vllm.v1.engine.core", "EngineCore.shutdown", _shutdown),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", _add_request),
)
