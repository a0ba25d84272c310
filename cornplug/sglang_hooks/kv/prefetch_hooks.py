"""SGLang's prefetch for a request: asked of the store before it is queued, and timed."""

from __future__ import annotations

from typing import Any, Final

import torch

from cornplug.sglang_hooks.compat import Hook, arguments
from cornplug.sglang_hooks.kv.costs import LoadPace
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv.page_hash_index import CacheNamespace

_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"


def _prefetch(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's prefetch for a request, on the scheduler's thread: the store is asked first.

    SGLang queues the question, and a request that waits for an answer misses the batch that is being
    made: beside running decodes one step, whatever the answer is. Our store answers in 0.1 ms, so
    where it lacks the first page that the engine lacks nothing is queued.
    """
    call = arguments(original, args, kwargs)
    cache = call["self"]
    storage = cache.cache_controller.storage_backend if cache.enable_storage else None
    if not isinstance(storage, CornplugStorage) or cache.tree_core.is_eagle or call["storage_hit_end"]:
        return original(*args, **kwargs)
    if len(call["new_input_tokens"]) < cache.prefetch_threshold:
        return original(*args, **kwargs)  # SGLang asks for nothing so short.
    ahead = storage.ahead(
        call["new_input_tokens"],
        call["matched_prefix_tokens"] or (),
        call["last_hash"],
        CacheNamespace(call["extra_key"], call["cache_salt"]),
    )
    fetches = ahead > 0
    if cache.tp_world_size > 1:
        # What is queued on one rank and not on another is waited for, in SGLang's own collectives.
        vote = torch.tensor([fetches], dtype=torch.int32)
        cache._all_reduce(vote, torch.distributed.ReduceOp.MIN)
        fetches = bool(vote.item())
    if fetches:
        storage.queued(call["request"], ahead)
        return original(*args, **kwargs)
    # SGLang's own answer to a request that has nothing to fetch, with what it notes beside it.
    return original(**(call | {"new_input_tokens": call["new_input_tokens"][:0]}))


def _pace(scheduler_or_cache: Any) -> LoadPace | None:
    controller = getattr(scheduler_or_cache, "cache_controller", None)
    storage = getattr(controller, "storage_backend", None)
    return storage.pace if isinstance(storage, CornplugStorage) else None


def _stepped(_result: Any, scheduler: Any, batch: Any, result: Any) -> None:
    """After a batch's result is there."""
    pace = _pace(scheduler.tree_cache)
    if pace is not None and batch.launch_ts is not None:
        tokens = sum(batch.extend_lens or ()) if batch.forward_mode.is_extend() else len(batch.reqs)
        pace.stepped(tokens, batch.launch_ts)


def _progress(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's question whether a request's prefetch is done."""
    done = original(*args, **kwargs)
    call = arguments(original, args, kwargs)
    pace = _pace(call["self"])
    if done and pace is not None and pace.waits(call["request"]):
        pace.answered(call["request"])
    return done


HOOKS: tuple[Hook, ...] = (
    Hook(
        f"{_CACHE}.prefetch_from_storage",
        "around",
        _prefetch,
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
    Hook("sglang.srt.managers.scheduler.Scheduler.process_batch_result", "after", _stepped),
    Hook(
        f"{_CACHE}.check_prefetch_progress",
        "around",
        _progress,
        ("self", "request"),
    ),
)
