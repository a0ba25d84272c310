"""Weights that change under a running engine: from then on it shares nothing.

What a checkpoint on disk says about an engine holds until somebody replaces the weights in
place (sleep level 2, reload, RL update). We cannot fingerprint what came over the wire, so
sharing ends for this engine, in all its processes, until it is restarted: reason "weights_updated".
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cornplug.engine_common import engine_state, lora_digests
from cornplug.errors import CheckpointError
from cornplug.vllm_connector import compat

# Workers' methods that users call and that leave the weights alone. Any other name may be a
# trainer's own (`--worker-extension-cls`), and a callable could do anything to the model.
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


def replaced() -> bool:
    """Whether this engine's weights may no longer be the checkpoint's, whichever process learned it."""
    return engine_state.current().replaced()


def note_replaced(how: str) -> None:
    """Stop sharing in every process of this engine."""
    state = engine_state.current()
    if not state.replaced():
        compat.logger.warning(
            "cornplug: weights replaced by %s; this engine shares nothing until restart", how
        )
    state.note_replaced()


def _collective_rpc(original: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    # While the engine starts (it has no scheduler yet) the calls are its own.
    started = getattr(core, "scheduler", None) is not None
    if started and method not in _HARMLESS:
        note_replaced(method if isinstance(method, str) else "a collective_rpc callable")
    return original(core, method, *args, **kwargs)


def _sleep(original: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level >= 2:
        note_replaced("sleep level 2")
    return original(core, level, *args, **kwargs)


def _rpc_of_api(original: Callable[..., Any], llm: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    """In the API process, which names images and takes vouchers."""
    if method not in _HARMLESS:
        note_replaced(method if isinstance(method, str) else "a collective_rpc callable")
    return original(llm, method, *args, **kwargs)


def _add_lora(original: Callable[..., Any], core: Any, lora_request: Any) -> Any:
    """Before its workers read an adapter's files."""
    with suppress(CheckpointError):  # Said again, and counted, when a request asks for it.
        lora_digests.note(lora_request.lora_path)
    return original(core, lora_request)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", _collective_rpc),
    ("vllm.v1.engine.core", "EngineCore.sleep", _sleep),
    ("vllm.v1.engine.core", "EngineCore.add_lora", _add_lora),
    ("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", _rpc_of_api),
    ("vllm.v1.engine.async_llm", "AsyncLLM.sleep", _sleep),
)
