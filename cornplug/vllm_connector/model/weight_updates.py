"""Handles vLLM's calls that replace an engine's weights in place.

Each such call ends sharing (`weights_guard`), with two exceptions. After a reload from a checkpoint (also
after a sleep and a reload), the engine shares again (`reloads`). If trainer versions are trusted, the engine
also shares again after a weight transfer with a version:

    API process, engine core   the epoch (update counter) becomes odd: no process shares
    each rank                  start_weight_update, any number of update_weights, finish_weight_update
    engine core                gets the version from `/finish_weight_update` or `/update_weight_version` after
                               the transfer, queries the ranks, and records the name
                               (`reloads.resume_when_unused`)

A transfer results in one new version of the weights, regardless of the number of its calls. The version is
known only at its end. A failed call ends sharing until the engine restarts. A trainer's own methods
(`--worker-extension-cls`) also end sharing, because they could change the model in any way.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from cornplug.engine_common import lora_digests, weights_guard
from cornplug.engine_common.shared_flags import load_settings
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.flags import our_settings
from cornplug.vllm_connector.model import reloads
from cornplug.vllm_connector.model.reloads import (
    TRANSFER_ATTRIBUTE,
    LoadedWeights,
    begin_weight_update,
    engine_refusal,
    has_cornplug,
    resume_when_unused,
)

_START: Final = "start_weight_update"
_FINISH: Final = "finish_weight_update"
_CALLS: Final = frozenset({_START, "update_weights", _FINISH})
_SPARSE_BACKEND: Final = "sparse_nccl"
"""vLLM's weight transfer backend that changes single values of a tensor. Its result depends on previous
transfers, so it cannot be identified."""
_VOTE_TIMEOUT_S: Final = 60.0
# Worker methods that users may call and that do not change the weights. Any other name may be a trainer's own
# method (`--worker-extension-cls`). A callable could also change the model in any way.
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


@dataclass
class _Transfer:
    """Weight transfer from a trainer that has no version yet."""

    epoch: int
    previous_version: str
    """vLLM's weight version before the transfer."""
    is_over: bool = False


def is_transfer_call(method: Any, config: Any) -> bool:
    """Return whether this worker method is part of a weight transfer that a trainer's version may
    identify."""
    return isinstance(method, str) and method in _CALLS and _trusts_versions(config)


def _trusts_versions(config: Any) -> bool:
    if not has_cornplug(config):
        return False
    extra = our_settings(config.kv_transfer_config)
    if extra is None:
        extra = config.ec_transfer_config.ec_connector_extra_config
    return _load_trust_setting(json.dumps(dict(extra), sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _load_trust_setting(extra: str) -> bool:
    # Settings are read once. A later change of a settings file must not raise an exception in the engine
    # core.
    return load_settings(json.loads(extra)).engine.trust_weight_version


def handle_transfer(original: Callable[..., Any], core: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Handle a call of `EngineCore.collective_rpc` that runs a method of `_CALLS` on each rank. End sharing
    if the call fails."""
    if method == _START:
        epoch = begin_weight_update(core, method)
        setattr(core, TRANSFER_ATTRIBUTE, _Transfer(epoch, core.get_weight_version()))
    else:
        weights_guard.begin_update(method, compat.logger)
    done = False
    try:
        result = original(core, method, *args, **kwargs)
        done = True
    finally:
        if not done:
            setattr(core, TRANSFER_ATTRIBUTE, None)
            weights_guard.end_sharing(f"weights replaced by {method}, which failed", compat.logger)
    update = getattr(core, TRANSFER_ATTRIBUTE, None)
    if update is not None and method == _FINISH:
        update.is_over = True
    return result


def _set_weight_version(original: Callable[..., Any], core: Any, weight_version: str) -> Any:
    result = original(core, weight_version)
    update: _Transfer | None = getattr(core, TRANSFER_ATTRIBUTE, None)
    if update is not None and update.is_over:
        _finish_transfer(core, update, weight_version)
    return result


def _finish_transfer(core: Any, update: _Transfer, version: str) -> None:
    if why := weights_guard.version_problem(version, update.previous_version):
        compat.logger.warning(
            "cornplug: nothing is shared until a transfer has a usable weight_version: %s", why
        )
        return
    setattr(core, TRANSFER_ATTRIBUTE, None)
    if why := _transfer_refusal(core) or _unfinished_reason(core):
        weights_guard.end_sharing(f"weights replaced by a trainer: {why}", compat.logger)
    else:
        resume_when_unused(core, LoadedWeights(update.epoch, version, is_version=True))


def _transfer_refusal(core: Any) -> str:
    chosen = getattr(core.vllm_config, "weight_transfer_config", None)
    if getattr(chosen, "backend", None) == _SPARSE_BACKEND:
        return f"backend {_SPARSE_BACKEND} changes parts of tensors"
    return engine_refusal(core)


def _unfinished_reason(core: Any) -> str:
    """Return the reason why a rank has not received all weights of the transfer, or "" if all ranks have
    them."""
    try:
        votes = core.model_executor.collective_rpc(is_rank_done, _VOTE_TIMEOUT_S)
    except (RuntimeError, TimeoutError) as e:
        # If a rank has died, the engine ends anyway.
        return f"the ranks did not reply: {e}"
    return "" if votes and all(votes) else "some ranks did not finish the transfer"


def is_rank_done(worker: Any) -> bool:
    """Return whether this rank's last weight transfer has finished and was for the target model, not for the
    draft model."""
    worker = getattr(worker, "worker", worker)
    return not (worker._weight_update_active or worker._weight_update_is_draft)


def _handle_call(method: Any) -> None:
    if method not in _HARMLESS:
        by = method if isinstance(method, str) else "a callable passed to collective_rpc"
        weights_guard.record_replacement(by, compat.logger)


def _collective_rpc(original: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    # Before the engine core has a scheduler, only the engine itself makes these calls.
    if getattr(core, "scheduler", None) is not None:
        if method == reloads.RELOAD_METHOD:
            return reloads.handle_reload(original, core, method, *args, **kwargs)
        if is_transfer_call(method, core.vllm_config):
            return handle_transfer(original, core, method, *args, **kwargs)
        _handle_call(method)
    return original(core, method, *args, **kwargs)


def _sleep(original: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level >= 2:
        reloads.begin_weight_update(core, "sleep level 2")
    return original(core, level, *args, **kwargs)


def _api_collective_rpc(
    original: Callable[..., Any], llm: Any, method: Any, *args: Any, **kwargs: Any
) -> Any:
    """Handle a `collective_rpc` call in the API process. This process must stop sharing too, because it
    computes the identifiers of images and accepts embedding handles."""
    if is_transfer_call(method, llm.vllm_config):
        weights_guard.begin_update(method, compat.logger)
    elif method != reloads.RELOAD_METHOD:
        _handle_call(method)
    return original(llm, method, *args, **kwargs)


def _add_lora(original: Callable[..., Any], core: Any, lora_request: Any) -> Any:
    """Record the state of a LoRA adapter's files before workers read them."""
    if lora_request.load_inplace:
        lora_digests.record_reread(lora_request.lora_int_id)
    lora_digests.record_files_in_time(lora_request.lora_path, lora_request.lora_int_id)
    return original(core, lora_request)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore.set_weight_version", _set_weight_version),
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", _collective_rpc),
    ("vllm.v1.engine.core", "EngineCore.sleep", _sleep),
    ("vllm.v1.engine.core", "EngineCore.add_lora", _add_lora),
    ("vllm.v1.engine.async_llm", "AsyncLLM.collective_rpc", _api_collective_rpc),
)
