"""Resumes sharing after vLLM reloads an engine's weights from a checkpoint.

    engine core   the epoch is odd: no process shares
    each rank     loads, compares its memory with the files, votes
    engine core   all votes are yes and name one folder, and no block holds KV of the weights before: names
                  the folder, and the epoch is even

vLLM keeps its prefix cache during a reload. If the cache is not empty at the end (a pause or sleep before the
reload empties it), the epoch stays odd until `reset_prefix_cache`. If a rank votes no, sharing ends until
restart, because the running weights may be in no folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import declares_quantization
from cornplug.errors import CheckpointError
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.model.loaded_weights import has_cornplug, rank_vote
from cornplug.vllm_connector.model.model_config import drafts_with_kv, require_folder

RELOAD: Final = "reload_weights"
"""Name of the workers' method."""
TRANSFER: Final = "_cornplug_transfer"
"""Engine core attribute: the trainer's update that has no name yet (`weight_transfers`)."""
_LOADED: Final = "_cornplug_loaded"
"""Engine core attribute: `Loaded`, while blocks may contain KV of other weights."""
_VOTE_S: Final = 600.0
_ARGUMENTS: Final = ("weights_iterator", "weights_path", "is_checkpoint_format")


class Loaded(NamedTuple):
    """Weights that all ranks hold, from a folder or with a trainer's name."""

    epoch: int
    name: str
    began_ns: int = 0
    """See `EngineState.end_update`."""
    is_version: bool = False


def reload(
    original: Callable[..., Any],
    core: Any,
    method: str,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Wrap `EngineCore.collective_rpc` when it calls `reload_weights` on each rank."""
    if not has_cornplug(core.vllm_config):
        return original(core, method, timeout, args, kwargs)
    began_ns = time.time_ns()
    epoch = begin(core, RELOAD)
    path, why = "", "vLLM failed"
    excluded = _excluded(core, args, kwargs or {})
    try:
        result = original(core, method, timeout, args, kwargs)
        path, why = ("", excluded) if excluded else _loaded(core, began_ns)
    finally:
        if why:
            weights_guard.end_sharing(f"weights replaced by {RELOAD}: {why}", compat.logger)
    if not why:
        hold(core, Loaded(epoch, path, began_ns))
    return result


def begin(core: Any, by: str) -> int:
    """Begin the epoch in which the call `by` removes an engine core's weights."""
    setattr(core, _LOADED, None)
    setattr(core, TRANSFER, None)
    return weights_guard.begin_update(by, compat.logger)


def hold(core: Any, loaded: Loaded) -> None:
    """Let the engine share with these weights, immediately or after the next reset of its prefix cache."""
    setattr(core, _LOADED, loaded)
    _settle(core)


def _excluded(core: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Reason why cornplug cannot identify the weights that the call loads, or ""."""
    if not _from_files(args, kwargs):
        return "the tensors do not come from a checkpoint"
    return excluded_engine(core)


def excluded_engine(core: Any) -> str:
    """Reason why cornplug cannot identify new weights of this engine, or ""."""
    config, state = core.vllm_config, engine_state.current()
    model, parallel = config.model_config, config.parallel_config
    found = {
        "cornplug could not identify the previous weights": state.unknown(),
        # Replicas and hosts vote separately.
        "data parallelism, several engines in a process, or several hosts": not state.one_core()
        or parallel.data_parallel_size > 1
        or parallel.nnodes > 1
        or parallel.distributed_executor_backend not in ("mp", "uni"),
        "expert load balancing moves experts": parallel.enable_eplb,
        "quantised weights": model.quantization or declares_quantization(model.hf_config),
        "the engine has a draft model, which has other weights": drafts_with_kv(config) is not None,
    }
    return next((why for why, holds in found.items() if holds), "")


def _from_files(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether these arguments of `GPUModelRunner.reload_weights` make it read a checkpoint."""
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    tensors, plain = given.get("weights_iterator"), given.get("is_checkpoint_format", True)
    return tensors is None and plain is True and given.keys() <= set(_ARGUMENTS)


def _loaded(core: Any, began_ns: int) -> tuple[str, str]:
    """Return (folder whose weights every rank holds, reason if there is none)."""
    try:
        votes = core.model_executor.collective_rpc(rank_vote, _VOTE_S, (began_ns,))
    except (RuntimeError, TimeoutError) as e:
        # A rank that died ends the engine anyway, and the reload is complete.
        return "", f"the ranks did not reply: {e}"
    folders = {path for path, _ in votes}
    why = next((why for _, why in votes if why), "")
    if why or len(folders) != 1:
        return "", why or "the ranks read different folders"
    [path] = folders
    try:
        require_folder(path, began_ns)
    except CheckpointError as e:
        return "", str(e)
    return path, ""


def _settle(core: Any) -> None:
    """Let the engine share with its new weights, unless a block contains KV of other weights."""
    loaded: Loaded | None = getattr(core, _LOADED, None)
    if loaded is None:
        return
    if not _no_block_is_used(core):
        compat.logger.info("cornplug: this engine will share again after a reset of its prefix cache")
        return
    setattr(core, _LOADED, None)
    if loaded.is_version:
        engine_state.current().end_named_update(loaded.epoch, loaded.name)
    else:
        engine_state.current().end_update(loaded.epoch, loaded.name, loaded.began_ns)
    compat.logger.info("cornplug: this engine shares again, with the weights %s", loaded.name)


def _no_block_is_used(core: Any) -> bool:
    """Return whether no request holds a block and no block is cached."""
    pool = core.scheduler.kv_cache_manager.block_pool
    # vLLM's own test before a reset. The null block is always in use.
    held = pool.num_gpu_blocks - pool.get_num_free_blocks() != 1
    return not held and len(pool.cached_block_hash_to_block) == 0


def _reset_prefix_cache(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(core, *args, **kwargs)
    _settle(core)
    return result


def _scheduler_init(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    if has_cornplug(scheduler.vllm_config):
        engine_state.current().core_began()


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore.reset_prefix_cache", _reset_prefix_cache),
    ("vllm.v1.core.sched.scheduler", "Scheduler.__init__", _scheduler_init),
)
