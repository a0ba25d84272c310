"""When a worker compares its loaded weights with the files (`engine_common.weight_comparison`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import weight_comparison
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import EC_CONNECTOR
from cornplug.vllm_connector.several_connectors import has_ours


def _load_model(original: Callable[..., Any], worker: Any, **kwargs: Any) -> Any:
    result = original(worker, **kwargs)
    config = worker.vllm_config
    if _ours(config) and not kwargs.get("load_dummy_weights"):
        _check(worker.model_runner.get_model(), config)
    return result


def _ours(config: Any) -> bool:
    ec = config.ec_transfer_config
    return has_ours(config.kv_transfer_config) or getattr(ec, "ec_connector", None) == EC_CONNECTOR


def _check(model: Any, config: Any) -> None:
    from cornplug.vllm_connector.model.setting_verdicts import of_everything

    if of_everything(config).refusals:
        return  # nothing is shared anyway
    described, folder = config.model_config, config.load_config.download_dir
    weight_comparison.check(
        model,
        lambda: Checkpoint.open(described.model, described.revision, cache_dir=folder),
        compat.logger,
    )


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker.load_model", _load_model),
)
