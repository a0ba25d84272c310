"""Turns off HiCache or its storage if the loaded model's KV cannot be shared.

    model and device pools exist ──> HiCache is not set up if their kind or dtype excludes sharing
    storage is attached ──> all ranks detach their storage if a rank could not verify its layout
    a draft model's host pool exists ──> the same check for the draft model's pool
    storage is attached while SGLang runs (PUT /hicache/storage-backend) ──> all checks run again, and the
                                   server rejects the request with the reason if it cannot share

All checks run in SGLang's scheduler processes. The first check depends only on properties that are equal on
every rank. In the other checks, all ranks vote over SGLang's own process group, in functions that all ranks
call anyway. Therefore no rank waits in one of cornplug's collectives for a rank whose storage is not open.
HiCache stays on if the operator enabled it explicitly.
"""

from __future__ import annotations

import json
import weakref
from typing import Any, Final

import torch

from cornplug.codec import ITEM_BYTES
from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.errors import CodecError
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, bind_arguments, logger
from cornplug.sglang_hooks.kv import hicache_config
from cornplug.sglang_hooks.kv.hicache_storage import CornplugStorage
from cornplug.sglang_hooks.kv_pages.layout import all_ranks_agree, quantised_format

_RESTART: Final = "Restart it with --enable-cornplug instead."
_schedulers: Final[weakref.WeakSet[Any]] = weakref.WeakSet()


def pool_exclusion(pool: Any, model: torch.nn.Module | None = None) -> str:
    """Return the reason why the KV in one of SGLang's device pools cannot be shared, or "" if it can.

    `model` is the model that writes to the pool. It is necessary if the KV has fp8 values.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    from cornplug.sglang_hooks.kv.window_pool import window_pools

    if (pools := window_pools(pool)) is not None:
        return pool_exclusion(pools[0]) or pool_exclusion(pools[1])
    # Subclasses have other contents, such as block scales, asymmetric heads, sparse slots or another order.
    if type(pool) not in (MHATokenToKVPool, MLATokenToKVPool):
        return f"KV pool {type(pool).__name__} has no pages"
    if quantised_format(pool.dtype) and type(pool) is MHATokenToKVPool:
        if pool.is_quantized_kv_cache:  # This is SGLang's CPU backend with AMX.
            return f"fp8 KV with scales of {type(pool.quant_method).__name__}"
        return _fp8_scale_exclusion(model)
    try:
        name = dtype_name(pool.dtype)
    except CodecError:
        name = str(pool.dtype)
    return "" if name in ITEM_BYTES else f"KV of dtype {name}: cornplug shares only {', '.join(ITEM_BYTES)}"


def _fp8_scale_exclusion(model: torch.nn.Module | None) -> str:
    """Return the reason why a model's fp8 KV is or may be scaled, or "" if every scale is 1."""
    from sglang.srt.layers.radix_attention import RadixAttention

    layers = [layer for layer in model.modules() if isinstance(layer, RadixAttention)] if model else []
    if not layers:
        return "fp8 KV, and the scales of the model's attention layers are unknown"
    for layer in layers:
        for name in ("k_scale", "v_scale", "k_scale_float", "v_scale_float"):
            scale = getattr(layer, name)
            # None means that the values are cast without a scale.
            if scale is not None and torch.any(torch.as_tensor(scale) != 1):
                return f"layer {layer.layer_id} has an fp8 KV cache with {name} other than 1"
    return ""


def _on_pools_created(_result: None, scheduler: Any) -> None:
    """Turn off HiCache if KV in the device pools cannot be shared.

    Called before SGLang allocates the host pools.
    """
    if not activation.is_on() or not scheduler.enable_hicache_storage:
        return
    _schedulers.add(scheduler)
    if why := _scheduler_exclusion(scheduler):
        logger.warning("cornplug: KV of this engine is not shared: %s", why)
        _disable_storage(scheduler)
        if not _is_hicache_explicit(scheduler):
            from sglang.srt.runtime_context import get_context

            scheduler.enable_hierarchical_cache = False
            get_context().override("cornplug", enable_hierarchical_cache=False)


def _scheduler_exclusion(scheduler: Any) -> str:
    runner = scheduler.tp_worker.model_runner
    return pool_exclusion(runner.token_to_kv_pool, getattr(runner, "model", None)) or _announce_draft(
        scheduler
    )


def _announce_draft(scheduler: Any) -> str:
    """Pass the draft model to this process's storage, if there is one.

    Returns the reason why the draft model's KV cannot be shared. Returns "" if it can be shared, or if there
    is no draft model.
    """
    from cornplug.sglang_hooks.kv_pages import draft_pages

    drafts = scheduler.draft_worker
    runners = drafts._draft_model_runners() if drafts is not None else ()
    draft_pages.set_draft_model(runners[0].model_config if runners else None)
    if len(runners) > 1:
        return f"{len(runners)} draft models"
    if runners and (mode := drafts.hicache_draft_plan.mode) != "sidecar":
        return f"KV of the draft model is not in a separate pool: SGLang keeps it as {mode.value}"
    why = pool_exclusion(runners[0].token_to_kv_pool) if runners else ""
    return f"draft model: {why}" if why else ""


def _on_host_pools_created(_result: None, cache: Any, *_args: Any, **_kwargs: Any) -> None:
    """Vote on the model's storage after its creation. All ranks call this at the same point."""
    _detach_unless_agreed(cache, with_draft=False)


def _on_draft_pools_created(_result: None, *_args: Any, tree_cache: Any, **_kwargs: Any) -> None:
    """Vote on the storage after the creation of the draft model's host pool.

    All ranks call this at the same point.
    """
    _detach_unless_agreed(tree_cache, with_draft=True)


def _detach_unless_agreed(cache: Any, *, with_draft: bool) -> None:
    """Detach the storage of all ranks if any rank cannot share."""
    controller = getattr(cache, "cache_controller", None)
    storage = controller.storage_backend if controller is not None else None
    if not isinstance(storage, CornplugStorage):
        return
    shares = storage.is_open and not (with_draft and storage.lacks_draft)
    if storage.is_open and not shares:
        logger.warning("cornplug: KV of this engine is not shared: its draft model's KV has no pages")
    if all_ranks_agree(cache, shares):
        return
    if shares:
        logger.warning("cornplug: KV of this engine is not shared: another rank cannot share it")
    cache.detach_storage_backend()
    for scheduler in _schedulers:
        _disable_storage(scheduler)
        if not _is_hicache_explicit(scheduler):
            logger.warning(
                "cornplug: SGLang's HiCache stays on, because its pools are already allocated. Start with "
                "CORNPLUG_ENGINE_SHARE_KV=false to run without it"
            )


def _wrap_attach(original: Any, *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """Wrap the function that attaches a storage at run time. Reject cornplug's storage if KV cannot be
    shared.

    All ranks of a pipeline stage call this at the same point, but different stages do not.
    """
    call = bind_arguments(original, args, kwargs)
    cache, extra = call["self"], hicache_config.cornplug_extra(call["storage_backend_extra_config_json"])
    named = activation.is_on() and call["storage_backend"] == "dynamic"
    if not named or extra is None or cache.enable_storage:
        return original(*args, **kwargs)
    # All ranks take the same branches until the call of `original`.
    scheduler = next((one for one in _schedulers if one.tree_cache is cache), None)
    if scheduler is None:
        return False, f"cornplug: this server was started without KV sharing. {_RESTART}"
    if cache.pp_size > 1:
        return False, f"cornplug: pipeline stages cannot vote while the server handles requests. {_RESTART}"
    if why := _scheduler_exclusion(scheduler):
        return False, f"cornplug: KV of this engine is not shared: {why}"
    settled = hicache_config.storage_settings(cache.page_size, activation.config(), extra)
    ok, said = original(**(call | {"storage_backend_extra_config_json": json.dumps(settled)}))
    storage = getattr(cache.cache_controller, "storage_backend", None)
    if not ok or not isinstance(storage, CornplugStorage):
        why = said
    elif not storage.is_open:
        why = storage.why_off or "the storage is not open"
    else:
        why = "the draft model's KV has no pages" if storage.lacks_draft else ""
    if all_ranks_agree(cache, not why):
        return ok, said
    # Also detach after a failure in SGLang, because its controller may still hold a storage that the cache
    # ignores.
    cache.detach_storage_backend()
    return False, f"cornplug: KV of this engine is not shared: {why or 'another rank cannot share'}"


def _wrap_clear(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Reject POST /hicache/storage-backend/clear for cornplug's storage.

    SGLang itself would reply with status 200, although the storage does not clear the store.
    """
    scheduler = bind_arguments(original, args, kwargs)["self"]
    controller = getattr(scheduler.tree_cache, "cache_controller", None)
    if not isinstance(getattr(controller, "storage_backend", None), CornplugStorage):
        return original(*args, **kwargs)
    from sglang.srt.managers.io_struct import ClearHiCacheReqOutput

    logger.warning(
        "cornplug: cannot clear the store, because other engines use it too; `cornplug store purge --app "
        "NAME` removes an app's entries"
    )
    return ClearHiCacheReqOutput(success=False)


def _disable_storage(scheduler: Any) -> None:
    """Change SGLang's settings in the same way as SGLang does when a storage is detached at run time."""
    from sglang.srt.runtime_context import get_context

    scheduler.enable_hicache_storage = False
    get_context().override(
        "cornplug", hicache_storage_backend=None, hicache_storage_backend_extra_config=None
    )


def _is_hicache_explicit(scheduler: Any) -> bool:
    """Return whether the operator enabled HiCache explicitly.

    Settings that cornplug declares do not change the field that this function reads.
    """
    return bool(scheduler.server_args.enable_hierarchical_cache)


HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.managers.scheduler.Scheduler.init_model_worker", "after", _on_pools_created),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.init_hicache",
        "after",
        _on_host_pools_created,
    ),
    Hook(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.attach_storage_backend",
        "around",
        _wrap_attach,
        ("self", "storage_backend", "storage_backend_extra_config_json"),
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.clear_hicache_storage_wrapped",
        "around",
        _wrap_clear,
        ("self",),
    ),
    Hook(
        "sglang.srt.mem_cache.kv_cache_builder.maybe_register_hicache_draft",
        "after",
        _on_draft_pools_created,
        ("tree_cache",),
    ),
)
