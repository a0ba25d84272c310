"""Compares a worker's loaded weights with the files (`engine_common.weight_comparison`), at start and after a
reload."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import weight_comparison
from cornplug.errors import CheckpointError
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR
from cornplug.vllm_connector.several_connectors import has_ours

_LEFT_OUT: Final = "_cornplug_left_out"
"""Worker attribute: the parameters that its last reload did not load, or None if unknown."""


def _load_model(original: Callable[..., Any], worker: Any, **kwargs: Any) -> Any:
    result = original(worker, **kwargs)
    config = worker.vllm_config
    if has_cornplug(config) and not kwargs.get("load_dummy_weights"):
        _check(worker.model_runner.get_model(), config)
    return result


def has_cornplug(config: Any) -> bool:
    """Return whether this VllmConfig has a connector of cornplug."""
    ec = config.ec_transfer_config
    return has_ours(config.kv_transfer_config) or getattr(ec, "ec_connector", None) == EC_CONNECTOR


def _reload_weights(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a rank's reload, to record which parameters the model reports as loaded."""
    if not has_cornplug(worker.vllm_config):
        return original(worker, *args, **kwargs)
    model = worker.model_runner.get_model()
    load, told = model.load_weights, []

    def load_weights(weights: Iterable[Any]) -> Any:
        told.append(load(weights))
        return told[-1]

    setattr(worker, _LEFT_OUT, None)
    model.load_weights = load_weights
    try:
        result = original(worker, *args, **kwargs)
    finally:
        del model.load_weights
    if len(told) == 1 and told[0] is not None:
        # LoRA wraps the layers, and the model reports the names of the inner layers.
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        setattr(worker, _LEFT_OUT, sorted(names - told[0]))
    return result


def rank_vote(worker: Any, began_ns: int) -> tuple[str, str]:
    """Return (folder from which a rank's weights were reloaded, reason why it does not hold them or "").
    `began_ns` is the start of the reload on the clock of file timestamps."""
    worker = getattr(worker, "worker", worker)
    described, folder = worker.vllm_config.model_config, worker.vllm_config.load_config.download_dir
    left_out = getattr(worker, _LEFT_OUT, None)
    if left_out is None:
        return "", "the model does not report which parameters it loaded"
    if left_out:
        return "", f"{left_out[0]} was not loaded"
    if described.model_weights:
        return "", "the weights are in an object store"
    try:
        checkpoint = Checkpoint.open(described.model, described.revision, cache_dir=folder)
        path = checkpoint.path.resolve()
        name, compared = weight_comparison.differing(worker.model_runner.get_model(), checkpoint)
        changed = checkpoint.changed_since(began_ns)
    except CheckpointError as e:
        return "", str(e)
    if name is not None:
        return "", f"{name} in memory differs from {path}"
    if changed is not None:
        return "", f"{changed} changed during the update"
    return str(path), "" if compared else "no tensor could be compared"


def _check(model: Any, config: Any) -> None:
    from cornplug.vllm_connector.model.setting_verdicts import of_everything

    if of_everything(config).refusals:
        return  # Nothing is shared anyway.
    described, folder = config.model_config, config.load_config.download_dir
    weight_comparison.check(
        model,
        lambda: Checkpoint.open(described.model, described.revision, cache_dir=folder),
        compat.logger,
    )


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker.load_model", _load_model),
    ("vllm.v1.worker.gpu_worker", "Worker.reload_weights", _reload_weights),
)
