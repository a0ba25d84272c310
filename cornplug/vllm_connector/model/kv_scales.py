"""Scales of a quantised KV cache in a checkpoint, which vLLM's layers must have too.

They are tensors of the language model, so every page key depends on them. vLLM reads them under many names
and ignores unknown names. A worker therefore shares only layers that have exactly these scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors import SafetensorError, safe_open

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.errors import CheckpointError, LayoutError
from cornplug.vllm_connector.model.cache_specs import layer_number
from cornplug.vllm_connector.model.model_config import drafts_with_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Scales = Mapping[int, tuple[float, float]]
"""Layer number -> scales of its keys and values. A layer that is not listed has scales of 1."""

_KNOWN: Final = re.compile(
    r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:attn\.|qkv_proj\.|([kv])_proj\.)?([kv])_scale$"
)
"""Names in published checkpoints of compressed-tensors and ModelOpt."""
_OTHER: Final = re.compile(r"(?:kv|k|v)_(?:cache\.)?(?:scale|zero_point)|[kv]_cache\.scale")
"""Any other name under which vLLM might read a scale of keys or values."""


def checkpoint_scales(config: VllmConfig) -> Scales:
    """Scales in this engine's checkpoint, in the dtype in which vLLM keeps them.

    Raises LayoutError for scales with other names or shapes, or of only keys or only values.
    """
    model = config.model_config
    try:
        checkpoint = Checkpoint.open(model.model, model.revision, cache_dir=config.load_config.download_dir)
        located = checkpoint.locate("language_model")
    except CheckpointError as e:
        raise LayoutError(f"cannot read the scales of the KV cache: {e}", reason=e.reason) from e
    named = {name: _KNOWN.search(name) for name in located if _OTHER.search(name)}
    if strange := [name for name, match in named.items() if not match or match[2] not in (None, match[3])]:
        raise LayoutError(f"unknown KV scale in the checkpoint: {min(strange)}", reason="kv_dtype")
    if named and drafts_with_kv(config) is not None:
        raise LayoutError("quantised KV cache scales with a draft model", reason="speculative")
    found: dict[int, dict[str, float]] = {}
    for name, match in named.items():
        assert match is not None
        value = _scalar(*located[name]).to(model.dtype).item()
        if found.setdefault(int(match[1]), {}).setdefault(match[3], value) != value or not value > 0:
            raise LayoutError(f"the checkpoint has no single value for scale {name}", reason="kv_dtype")
    if halves := [number for number, pair in found.items() if len(pair) < 2]:
        raise LayoutError(
            f"layer {min(halves)} of the checkpoint has a scale for only keys or only values",
            reason="kv_dtype",
        )
    return {number: (pair["k"], pair["v"]) for number, pair in found.items()}


def of_layers(scales: Scales, names: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Layer name -> the scales that it must have. Raises LayoutError for names without a number."""
    if not scales:  # Layers of a draft model may have no number.
        return dict.fromkeys(names, (1.0, 1.0))
    return {name: scales.get(layer_number(name), (1.0, 1.0)) for name in names}


def _scalar(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as e:
        raise LayoutError(f"cannot read {name} of the checkpoint: {e}", reason="unreadable") from e
    if found.numel() != 1 or not found.is_floating_point():
        raise LayoutError(f"{name} of the checkpoint is not a single number", reason="kv_dtype")
    return found.reshape(())
