"""Hooks on SGLang's prefetch for a request, and hooks that report finished requests and idle turns to
`idle_backups.py`.

The prefetch hooks look up the request's pages before the prefetch is queued, and measure how long the
prefetch takes.
"""

from __future__ import annotations

import time
from typing import Any, Final

import torch

from cornplug.sglang_hooks.compat import Hook, bind_arguments
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv.idle_backups import IdleBackups
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace

_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_IDLE_ONLY_REQUESTS: Final = frozenset(
    {
        "AttachHiCacheStorageReqInput",
        "DetachHiCacheStorageReqInput",
        "FlushCacheReqInput",
        "ReleaseMemoryOccupationReqInput",
    }
)
"""Requests that SGLang can handle only while it is idle. Otherwise it rejects the request or exits."""
_MAX_CHECKS, _CHECK_INTERVAL_S = 1000, 0.002
"""Maximum number of checks, and seconds between two checks, whether a copy has ended before a flush."""


def _wrap_prefetch(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Look up a request's pages on the scheduler's thread. Let SGLang prefetch only if the prefetch is
    worthwhile.

    SGLang queues its own lookup, and a request that waits for the result misses the current batch. While
    other requests decode, this delays the request by one step, for a hit and for a miss. A lookup in the
    store takes only 0.1 ms. Therefore a prefetch is queued only if the store has the first page that the
    engine lacks.
    """
    call = bind_arguments(original, args, kwargs)
    cache = call["self"]
    storage = cache.cache_controller.storage_backend if cache.enable_storage else None
    if not isinstance(storage, CornplugStorage) or call["storage_hit_end"]:
        return original(*args, **kwargs)
    if len(call["new_input_tokens"]) < cache.prefetch_threshold:
        return original(*args, **kwargs)  # SGLang does not prefetch fewer tokens.
    ahead = storage.count_worth_fetching(
        call["new_input_tokens"],
        call["matched_prefix_tokens"] or (),
        call["last_hash"],
        CacheNamespace(call["extra_key"], call["cache_salt"]),
        in_pairs=cache.tree_core.is_eagle,
    )
    fetches = ahead > 0
    if cache.tp_world_size > 1 or cache.pp_size > 1:
        # SGLang's own collectives would wait for a prefetch that is queued on only some ranks. With several
        # pipeline stages, the first stage decides, in the order in which each stage handles the requests.
        vote = torch.tensor([fetches], dtype=torch.int32)
        cache._all_reduce(vote, torch.distributed.ReduceOp.MIN)
        fetches = bool(vote.item())
    if fetches:
        storage.record_queued(call["request"], ahead)
        return original(*args, **kwargs)
    # Call SGLang as if there were no page to fetch, so that SGLang records the same state.
    return original(**(call | {"new_input_tokens": call["new_input_tokens"][:0]}))


def _on_batch_result(_result: Any, scheduler: Any, batch: Any, result: Any) -> None:
    """Measure the duration of a batch whose result was just processed, and record that the server was
    busy."""
    storage = _storage_of(scheduler.tree_cache)
    if storage is None:
        return
    if storage.idle_backups is not None:
        storage.idle_backups.record_batch()
    pace = storage.pace
    if pace is not None and batch.launch_ts is not None:
        tokens = sum(batch.extend_lens or ()) if batch.forward_mode.is_extend() else len(batch.reqs)
        pace.record_step(tokens, batch.launch_ts)


def _wrap_prefetch_progress(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap SGLang's check whether a request's prefetch has ended, to measure how long the request waited."""
    done = original(*args, **kwargs)
    call = bind_arguments(original, args, kwargs)
    storage = _storage_of(call["self"])
    if done and storage and storage.pace is not None and storage.pace.is_waiting(call["request"]):
        storage.pace.record_prefetch_end(call["request"])
    return done


def _remember_finished(_result: None, *args: Any, **kwargs: Any) -> None:
    """Remember the key of a finished request whose pages were just added to the tree."""
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    call = bind_arguments(UnifiedRadixCache.checkpoint_into_tree, args, kwargs)
    cache, request = call["self"], call["req"]
    idle = _idle_backups_of(cache)
    if idle is None or not request.finished():
        return
    if cache.buffer_pipeline is not None:
        return  # Copies of this cache bypass the host pool.
    key = RadixKey(
        request.full_untruncated_fill_ids[: call["up_to"]],
        request.extra_key,
        is_bigram=cache.tree_core.is_eagle,
        cache_salt=request.cache_salt,
    ).page_aligned(cache.page_size)
    if len(key):
        idle.remember(key)


def _on_idle_turn(scheduler: Any) -> None:
    """Run an idle turn before SGLang's housekeeping. The scheduler may sleep after the housekeeping."""
    idle = _idle_backups_of(scheduler.tree_cache)
    if idle is not None:
        idle.run_turn(scheduler)


def _on_input_requests(scheduler: Any, recv_reqs: list[Any]) -> None:
    """Wait for the copy in progress before SGLang handles requests that need an idle server."""
    if any(type(request).__name__ in _IDLE_ONLY_REQUESTS for request in recv_reqs):
        _wait_for_copies(scheduler)


def _wait_for_copies(scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """Wait for the copy in progress before SGLang flushes its caches, because the flush fails during a
    copy."""
    cache = scheduler.tree_cache
    if _idle_backups_of(cache) is None:
        return
    # All ranks make the same number of checks, because they jointly determine which copies have ended.
    for _ in range(_MAX_CHECKS):
        copies = cache.ongoing_write_through or cache.ongoing_backup
        if not copies or scheduler.waiting_queue or not scheduler.running_batch.is_empty():
            return
        cache.check_hicache_events()
        time.sleep(_CHECK_INTERVAL_S)


def _storage_of(cache: Any) -> CornplugStorage | None:
    controller = getattr(cache, "cache_controller", None)
    storage = getattr(controller, "storage_backend", None)
    return storage if isinstance(storage, CornplugStorage) else None


def _idle_backups_of(cache: Any) -> IdleBackups | None:
    storage = _storage_of(cache)
    return storage.idle_backups if storage is not None else None


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_CACHE}.prefetch_from_storage",
        "around",
        _wrap_prefetch,
        (
            "self",
            "new_input_tokens",
            "last_hash",
            "matched_prefix_tokens",
            "extra_key",
            "cache_salt",
            "storage_hit_end",
        ),
    ),
    Hook("sglang.srt.managers.scheduler.Scheduler.process_batch_result", "after", _on_batch_result),
    Hook(
        f"{_CACHE}.check_prefetch_progress",
        "around",
        _wrap_prefetch_progress,
        ("self", "request"),
    ),
)

IDLE_HOOKS: Final[tuple[Hook, ...]] = (
    Hook(f"{_CACHE}.checkpoint_into_tree", "after", _remember_finished, ("self", "req", "up_to")),
    Hook(f"{_SCHEDULER}.on_idle", "before", _on_idle_turn),
    Hook(f"{_SCHEDULER}.flush_cache", "before", _wait_for_copies),
    Hook(f"{_SCHEDULER}.process_input_requests", "before", _on_input_requests),
)
