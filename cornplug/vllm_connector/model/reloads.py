"""Compares an engine's loaded weights with the files, and lets the engine share again after vLLM reloads
weights from a checkpoint.

    engine core   the epoch (update counter) becomes odd: no process shares
    each rank     loads, compares its memory with the files, and votes
    engine core   all votes are yes and name one folder, and no block holds KV of the previous weights:
                  records the folder, and the epoch becomes even

vLLM keeps its prefix cache during a reload. If the cache is not empty at the end of the reload, the epoch
stays odd until `reset_prefix_cache`. A pause or sleep before the reload empties the cache. If a rank votes
no, there may be no folder with exactly the running weights, so sharing ends until the engine restarts.

Workers compare their weights with the files (`engine_common.weights_guard`) at start and after a reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import declares_quantisation
from cornplug.errors import CheckpointError
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR
from cornplug.vllm_connector.flags import has_ours
from cornplug.vllm_connector.model.model_config import draft_config_with_kv, require_same_tensors

_LEFT_OUT_ATTRIBUTE: Final = "_cornplug_left_out"
"""Name of the worker attribute with the names of the parameters that the worker's last reload did not load.
The attribute is None if these names are unknown."""
RELOAD_METHOD: Final = "reload_weights"
"""Name of the worker method that reloads weights."""
TRANSFER_ATTRIBUTE: Final = "_cornplug_transfer"
"""Name of the engine core attribute with the trainer's weight update that has no version yet
(`weight_updates`). The attribute is None if there is no such update."""
_LOADED_ATTRIBUTE: Final = "_cornplug_loaded"
"""Name of the engine core attribute with the `LoadedWeights` while blocks may still contain KV of other
weights. The attribute is None otherwise."""
_VOTE_TIMEOUT_S: Final = 600.0
_ARGUMENTS: Final = ("weights_iterator", "weights_path", "is_checkpoint_format")


def _load_model(original: Callable[..., Any], worker: Any, **kwargs: Any) -> Any:
    result = original(worker, **kwargs)
    config = worker.vllm_config
    if has_cornplug(config) and not kwargs.get("load_dummy_weights"):
        _check_loaded_model(worker.model_runner.get_model(), config)
    return result


def has_cornplug(config: Any) -> bool:
    """Return whether this VllmConfig contains any of cornplug's connectors."""
    ec = config.ec_transfer_config
    return has_ours(config.kv_transfer_config) or getattr(ec, "ec_connector", None) == EC_CONNECTOR


def _reload_weights(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap `Worker.reload_weights`, to record which parameters the model does not report as loaded."""
    if not has_cornplug(worker.vllm_config):
        return original(worker, *args, **kwargs)
    model = worker.model_runner.get_model()
    load, told = model.load_weights, []

    def load_weights(weights: Iterable[Any]) -> Any:
        told.append(load(weights))
        return told[-1]

    setattr(worker, _LEFT_OUT_ATTRIBUTE, None)
    model.load_weights = load_weights
    try:
        result = original(worker, *args, **kwargs)
    finally:
        del model.load_weights
    if len(told) == 1 and told[0] is not None:
        # With LoRA, layers are wrapped, but the model reports the names of the inner layers.
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        setattr(worker, _LEFT_OUT_ATTRIBUTE, sorted(names - told[0]))
    return result


def rank_vote(worker: Any, began_ns: int) -> tuple[str, str]:
    """Return (folder from which this rank's weights were reloaded, reason). The reason is "" if the rank
    holds exactly the folder's weights. `began_ns` is the start of the reload on the clock of file
    timestamps."""
    worker = getattr(worker, "worker", worker)
    described, folder = worker.vllm_config.model_config, worker.vllm_config.load_config.download_dir
    left_out = getattr(worker, _LEFT_OUT_ATTRIBUTE, None)
    if left_out is None:
        return "", "the model does not report which parameters it loaded"
    if left_out:
        return "", f"{left_out[0]} was not loaded"
    if described.model_weights:
        return "", "the weights are in an object store"
    try:
        checkpoint = Checkpoint.open(described.model, described.revision, cache_dir=folder)
        path = checkpoint.path.resolve()
        name, compared = weights_guard.find_difference(worker.model_runner.get_model(), checkpoint)
        changed = checkpoint.find_changed_file(began_ns)
    except CheckpointError as e:
        return "", str(e)
    if name is not None:
        return "", f"{name} in memory differs from {path}"
    if changed is not None:
        return "", f"{changed} changed during the update"
    return str(path), "" if compared else "no tensor could be compared"


def _check_loaded_model(model: Any, config: Any) -> None:
    from cornplug.vllm_connector.model.setting_verdicts import judge_common

    if judge_common(config).refusals:
        return  # Other settings already prevent sharing.
    described, folder = config.model_config, config.load_config.download_dir
    weights_guard.check_loaded_weights(
        model,
        lambda: Checkpoint.open(described.model, described.revision, cache_dir=folder),
        compat.logger,
    )


class LoadedWeights(NamedTuple):
    """Weights that all ranks have loaded in an epoch. `name` is the folder, or the name that a trainer gave
    them."""

    epoch: int
    name: str
    began_ns: int = 0
    """Time before the folder was read (see `EngineState.end_update`)."""
    is_version: bool = False


def handle_reload(
    original: Callable[..., Any],
    core: Any,
    method: str,
    timeout: float | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Handle a call of `EngineCore.collective_rpc` that runs `reload_weights` on each rank. If the new
    weights cannot be identified, end sharing."""
    if not has_cornplug(core.vllm_config):
        return original(core, method, timeout, args, kwargs)
    began_ns = engine_state.file_clock_ns()
    epoch = begin_weight_update(core, RELOAD_METHOD)
    path, why = "", "vLLM failed"
    excluded = _reload_refusal(core, args, kwargs or {})
    try:
        result = original(core, method, timeout, args, kwargs)
        path, why = ("", excluded) if excluded else _collect_votes(core, began_ns)
    finally:
        if why:
            weights_guard.end_sharing(f"weights replaced by {RELOAD_METHOD}: {why}", compat.logger)
    if not why:
        resume_when_unused(core, LoadedWeights(epoch, path, began_ns))
    return result


def begin_weight_update(core: Any, call_name: str) -> int:
    """Begin an epoch in which the call named `call_name` replaces an engine core's weights, and return the
    epoch."""
    setattr(core, _LOADED_ATTRIBUTE, None)
    setattr(core, TRANSFER_ATTRIBUTE, None)
    return weights_guard.begin_update(call_name, compat.logger)


def resume_when_unused(core: Any, weights: LoadedWeights) -> None:
    """Let the engine share KV and embeddings that it computes with these weights: immediately, or after the
    next reset of its prefix cache."""
    setattr(core, _LOADED_ATTRIBUTE, weights)
    _resume_if_unused(core)


def _reload_refusal(core: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the reason why cornplug cannot identify the weights that this call of `reload_weights` loads, or
    "" if it can."""
    if not _reads_checkpoint(args, kwargs):
        return "the tensors do not come from a checkpoint"
    return engine_refusal(core)


def engine_refusal(core: Any) -> str:
    """Return the reason why cornplug cannot identify new weights of this engine, or "" if it can."""
    config, state = core.vllm_config, engine_state.current()
    model, parallel = config.model_config, config.parallel_config
    found = {
        "cornplug could not identify the previous weights": state.has_unknown_weights(),
        # The votes of several replicas or several hosts are not combined.
        "data parallelism, several engines in a process, or several hosts": not state.has_one_core()
        or parallel.data_parallel_size > 1
        or parallel.nnodes > 1
        or parallel.distributed_executor_backend not in ("mp", "uni"),
        "expert load balancing moves experts": parallel.enable_eplb,
        "quantised weights": model.quantization or declares_quantisation(model.hf_config),
        "the engine has a draft model, which has other weights": draft_config_with_kv(config) is not None,
    }
    return next((why for why, holds in found.items() if holds), "")


def _reads_checkpoint(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether `GPUModelRunner.reload_weights` with these arguments reads a checkpoint."""
    given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    tensors, plain = given.get("weights_iterator"), given.get("is_checkpoint_format", True)
    return tensors is None and plain is True and given.keys() <= set(_ARGUMENTS)


def _collect_votes(core: Any, began_ns: int) -> tuple[str, str]:
    """Return (folder whose weights every rank has loaded, ""), or ("", reason why there is no such
    folder)."""
    try:
        votes = core.model_executor.collective_rpc(rank_vote, _VOTE_TIMEOUT_S, (began_ns,))
    except (RuntimeError, TimeoutError) as e:
        # If a rank has died, the engine ends anyway and the reload is over.
        return "", f"the ranks did not reply: {e}"
    folders = {path for path, _ in votes}
    why = next((why for _, why in votes if why), "")
    if why or len(folders) != 1:
        return "", why or "the ranks read different folders"
    [path] = folders
    try:
        require_same_tensors(path, began_ns)
    except CheckpointError as e:
        return "", str(e)
    return path, ""


def _resume_if_unused(core: Any) -> None:
    """Let the engine share with its new weights, unless a block may still contain KV of the previous
    weights."""
    loaded: LoadedWeights | None = getattr(core, _LOADED_ATTRIBUTE, None)
    if loaded is None:
        return
    if not _is_cache_empty(core):
        compat.logger.info("cornplug: this engine resumes sharing when its prefix cache is reset")
        return
    setattr(core, _LOADED_ATTRIBUTE, None)
    if loaded.is_version:
        engine_state.current().end_named_update(loaded.epoch, loaded.name)
    else:
        engine_state.current().end_update(loaded.epoch, loaded.name, loaded.began_ns)
    compat.logger.info(
        "cornplug: this engine shares embeddings and KV again, with the weights of %s", loaded.name
    )


def _is_cache_empty(core: Any) -> bool:
    """Return whether the engine's KV cache is empty: no request holds a block and no block is cached."""
    pool = core.scheduler.kv_cache_manager.block_pool
    # vLLM makes the same test before a reset. The null block is always in use.
    held = pool.num_gpu_blocks - pool.get_num_free_blocks() != 1
    return not held and len(pool.cached_block_hash_to_block) == 0


def _reset_prefix_cache(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    result = original(core, *args, **kwargs)
    _resume_if_unused(core)
    return result


def _scheduler_init(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    original(scheduler, *args, **kwargs)
    if not has_cornplug(scheduler.vllm_config):
        return
    engine_state.current().record_core_start()
    # Another project's connector does not have this method.
    limit_rows = getattr(getattr(scheduler.ec_connector, "scheduler", None), "limit_rows", None)
    if limit_rows is not None:
        limit_rows(scheduler.encoder_cache_manager.cache_size)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker.load_model", _load_model),
    ("vllm.v1.worker.gpu_worker", "Worker.reload_weights", _reload_weights),
    ("vllm.v1.engine.core", "EngineCore.reset_prefix_cache", _reset_prefix_cache),
    ("vllm.v1.core.sched.scheduler", "Scheduler.__init__", _scheduler_init),
)
