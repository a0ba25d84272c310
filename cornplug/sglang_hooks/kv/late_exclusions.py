"""Exclusions that only the loaded model shows: HiCache, or its storage, is turned off again.

    model and device pools are there ──> their kind and dtype exclude sharing? HiCache is not set up
    storage is attached ──> its layout did not verify, or a rank's did not? storage is detached

Both run in SGLang's scheduler processes, at start. The first depends only on properties that are equal on
every rank; the second is a vote of all ranks, over SGLang's own group, in a function that all of them call
anyway. HiCache that the operator asked for by name stays on in both.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

from cornplug.codec import ITEM_BYTES
from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.errors import CodecError
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.kv.rank_place import agreed

_schedulers: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def unshareable(pool: Any) -> str:
    """Why a device pool of SGLang's cannot be shared as pages; "" where it can."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from cornplug.sglang_hooks.kv.window_pool import window_pools

    if (pools := window_pools(pool)) is not None:
        return unshareable(pools[0]) or unshareable(pools[1])
    # Their subclasses keep something else: block scales, asymmetric heads, sparse slots, other orders.
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
        return f"a KV pool of kind {type(pool).__name__} has no pages"
    try:
        name = dtype_name(pool.dtype)
    except CodecError:
        name = str(pool.dtype)
    return "" if name in ITEM_BYTES else f"KV of dtype {name}: only {', '.join(ITEM_BYTES)} are shared"


def _pools_made(_result: None, scheduler: Any) -> None:
    """After the device pools were made, before the host pools are."""
    if not activation.is_on() or not scheduler.enable_hicache_storage:
        return
    _schedulers.add(scheduler)
    if why := unshareable(scheduler.tp_worker.model_runner.token_to_kv_pool):
        logger.warning("cornplug: KV of this engine is not shared: %s", why)
        _without_storage(scheduler)
        if not _given(scheduler):
            from sglang.srt.runtime_context import get_context

            scheduler.enable_hierarchical_cache = False
            get_context().override("cornplug", enable_hierarchical_cache=False)


def _host_pools_made(_result: None, cache: Any, *_args: Any, **_kwargs: Any) -> None:
    """After the host pools and the storage behind them. All ranks pass here, in step."""
    from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage

    controller = cache.cache_controller
    storage = controller.storage_backend if controller is not None else None
    if not isinstance(storage, CornplugStorage):
        return
    if agreed(cache, storage.is_open):
        return
    if storage.is_open:
        logger.warning("cornplug: KV of this engine is not shared: another rank cannot share")
    cache.detach_storage_backend()
    for scheduler in _schedulers:
        _without_storage(scheduler)
        if not _given(scheduler):
            logger.warning(
                "cornplug: SGLang's HiCache stays, as its pools are made. Start with "
                "CORNPLUG_ENGINE_SHARE_KV=false to be without"
            )


def _without_storage(scheduler: Any) -> None:
    """As SGLang itself does when storage is detached while it runs."""
    from sglang.srt.runtime_context import get_context

    scheduler.enable_hicache_storage = False
    get_context().override(
        "cornplug", hicache_storage_backend=None, hicache_storage_backend_extra_config=None
    )


def _given(scheduler: Any) -> bool:
    """Whether the operator asked for HiCache by name: declared settings leave the raw field unchanged."""
    return bool(scheduler.server_args.enable_hierarchical_cache)


HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.managers.scheduler.Scheduler.init_model_worker", "after", _pools_made),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache", "after", _host_pools_made
    ),
)
