"""Calls of vLLM that replace an engine's weights in place.

Each of them ends sharing (`weights_guard`), with two exceptions. After a reload from a checkpoint, also with
a sleep before it, the engine shares again (`reloads`). If trainer versions are trusted, the same holds after
a transfer with a version (`weight_transfers`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cornplug.engine_common import lora_digests, weights_guard
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.model import reloads, weight_transfers

# Worker methods that users call and that do not change the weights. Any other name may be a trainer's own
# method (`--worker-extension-cls`), and a callable could do anything to the model.
_HARMLESS = frozenset(
    {
        "add_lora",
        "annotate_profile",
        "check_health",
        "checkpoint_prepare",
        "compute_weight_checksums",
        "execute_dummy_batch",
        "get_cache_block_size_bytes",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_model_inspection",
        "get_supported_tasks",
        "init_weight_transfer_engine",
        "list_loras",
        "pin_lora",
        "profile",
        "release_late_interaction_query_cache",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "shutdown_weight_transfer_engine",
        "synchronize_device",
        "update_max_model_len",
        "wake_up",
    }
)


def _called(method: Any) -> None:
    if method not in _HARMLESS:
        by = method if isinstance(method, str) else "a callable passed to collective_rpc"
        weights_guard.note_replaced(by, compat.logger)


def _collective_rpc(original: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    # While the engine starts (without a scheduler), the calls are its own.
    if getattr(core, "scheduler", None) is not None:
        if method == reloads.RELOAD:
            return reloads.reload(original, core, method, *args, **kwargs)
        if weight_transfers.names(method, core.vllm_config):
            return weight_transfers.transfer(original, core, method, *args, **kwargs)
        _called(method)
    return original(core, method, *args, **kwargs)


def _sleep(original: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level >= 2:
        reloads.begin(core, "sleep level 2")
    return original(core, level, *args, **kwargs)


def _rpc_of_api(original: Callable[..., Any], llm: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """Handle a call in the API process, which names images and accepts handles."""
    if weight_transfers.names(method, llm.vllm_config):
        weights_guard.begin_update(method, compat.logger)
    elif method != reloads.RELOAD:
        _called(method)
    return original(llm, method, *args, **kwargs)


def _add_lora(original: Callable[..., Any], core: Any, lora_request: Any) -> Any:
    """Record an adapter's files before workers read them."""
    if lora_request.load_inplace:
        lora_digests.note_reread(lora_request.lora_int_id)
    lora_digests.note_in_time(lora_request.lora_path, lora_request.lora_int_id)
    return original(core, lora_request)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", _collective_rpc),
    ("vllm.v1.engine.core", "EngineCore.sleep", _sleep),
    ("vllm.v1.engine.core", "EngineCore.add_lora", _add_lora),
    ("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", _rpc_of_api),
)
