"""Logging of the weights that a worker without a tower did not load, and of how much KV fits into the saved
memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from cornplug.errors import ConfigError
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media.no_tower_settings import is_asked_for


def report(worker: Any, specs: Mapping[str, Any]) -> None:
    """Log how many bytes of tower weights this rank did not load, and how many tokens of KV fit into that
    memory.

    `specs` are the KV cache specs by layer name.

    Raises ConfigError if vLLM has loaded the tower although the settings exclude it.
    """
    if not is_asked_for(worker.vllm_config):
        return
    parts = left_out(worker.model_runner.get_model())
    size = sum(parts.values())
    if not size:
        raise ConfigError(
            "--cornplug-tower service",
            f"vLLM loaded the tower of {worker.vllm_config.model_config.model}, because the model class "
            "does not mark its tower modules",
            "Remove the option.",
        )
    token_bytes = kv_token_bytes(specs)
    compat.logger.info(
        "cornplug: rank %d did not load %s (%d bytes). This is as much memory as KV of %d tokens, at %d "
        "bytes per token",
        worker.rank,
        ", ".join(parts),
        size,
        size // token_bytes if token_bytes else 0,
        token_bytes,
    )


def left_out(model: Any) -> dict[str, int]:
    """Return the number of bytes of weights that this rank did not load, by module name."""
    from vllm.model_executor.models.utils import StageMissingLayer

    found = {}
    for name, module in model.named_modules():
        # vLLM keeps the omitted module outside torch's list of submodules, with parameters on no device.
        absent = module.__dict__.get("module") if isinstance(module, StageMissingLayer) else None
        if absent is not None:
            found[name] = sum(weight.nbytes for weight in absent.parameters())
    return found


def kv_token_bytes(specs: Mapping[str, Any]) -> int:
    """Return the number of bytes per token in this rank's KV cache, over all layers that have KV for every
    token."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    return sum(
        spec.page_size_bytes // spec.block_size for spec in specs.values() if isinstance(spec, AttentionSpec)
    )


def _get_kv_cache_spec(original: Callable[..., Any], worker: Any) -> Any:
    specs = original(worker)
    report(worker, specs)
    return specs


WRAPS: Final[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
    ("vllm.v1.worker.gpu_worker", "Worker.get_kv_cache_spec", _get_kv_cache_spec),
)
"""Wrapper for a function that vLLM calls once, after the weights are loaded and before it sizes the KV
cache."""
