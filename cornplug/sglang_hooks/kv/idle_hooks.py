"""Hooks that notify `idle_backups.py` of finished requests and idle turns."""

from __future__ import annotations

import time
from typing import Any, Final

from cornplug.sglang_hooks.compat import Hook, arguments
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv.idle_backups import IdleBackups

_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_WANT_IDLE: Final = frozenset(
    {
        "AttachHiCacheStorageReqInput",
        "DetachHiCacheStorageReqInput",
        "FlushCacheReqInput",
        "ReleaseMemoryOccupationReqInput",
    }
)
"""Requests that SGLang can handle only if nothing is in progress. Otherwise it rejects them or exits."""
_END_ROUNDS, _ROUND_S = 1000, 0.002
"""Maximum number of checks whether a copy has ended before a flush, and seconds between two checks."""


def _of(cache: Any) -> IdleBackups | None:
    controller = getattr(cache, "cache_controller", None)
    storage = getattr(controller, "storage_backend", None)
    return storage.idle if isinstance(storage, CornplugStorage) else None


def _finished(_result: None, *args: Any, **kwargs: Any) -> None:
    """Remember the key of a finished request whose pages were just added to the tree."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    call = arguments(UnifiedRadixCache.checkpoint_into_tree, args, kwargs)
    cache, request = call["self"], call["req"]
    idle = _of(cache)
    if idle is None or not request.finished():
        return
    if cache.buffer_pipeline is not None:
        return  # This cache's copies bypass the host pool.
    key = RadixKey(
        request.full_untruncated_fill_ids[: call["up_to"]],
        request.extra_key,
        is_bigram=cache.tree_core.is_eagle,
        cache_salt=request.cache_salt,
    ).page_aligned(cache.page_size)
    if len(key):
        idle.remember(key)


def _idles(scheduler: Any) -> None:
    """Run an idle turn before SGLang's housekeeping, after which the scheduler may sleep."""
    idle = _of(scheduler.tree_cache)
    if idle is not None:
        idle.turn(scheduler)


def _ended(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Wait for the copy in progress before SGLang flushes its caches. Otherwise the flush would fail."""
    cache = scheduler.tree_cache
    if _of(cache) is None:
        return
    # All ranks make the same number of checks, because they determine together which copies have ended.
    for _ in range(_END_ROUNDS):
        copies = cache.ongoing_write_through or cache.ongoing_backup
        if not copies or scheduler.waiting_queue or not scheduler.running_batch.is_empty():
            return
        cache.check_hicache_events()
        time.sleep(_ROUND_S)


def _asked(scheduler: Any, recv_reqs: list[Any]) -> None:
    """Wait for the copy in progress before SGLang handles requests that need an idle server."""
    if any(type(request).__name__ in _WANT_IDLE for request in recv_reqs):
        _ended(scheduler)


HOOKS: Final[tuple[Hook, ...]] = (
    Hook(f"{_CACHE}.checkpoint_into_tree", "after", _finished, ("self", "req", "up_to")),
    Hook(f"{_SCHEDULER}.on_idle", "before", _idles),
    Hook(f"{_SCHEDULER}.flush_cache", "before", _ended),
    Hook(f"{_SCHEDULER}.process_input_requests", "before", _asked),
)
