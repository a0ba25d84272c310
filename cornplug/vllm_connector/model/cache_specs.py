"""Checks of whether pages can represent the blocks that vLLM's KV cache specs describe, and reading of KV
scales from checkpoints.

The same tables are used for models with one cache group (`cornplug/vllm_connector/kv/cache_geometry.py`) and
for each of several groups (`cornplug/vllm_connector/kv_groups/page_kinds.py`).

The scales of a quantised KV cache are tensors of the language model, so every page key depends on them. vLLM
reads scales under many names and ignores unknown names. A worker therefore shares only layers that use
exactly the scales that cornplug read from the checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors import SafetensorError, safe_open

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.errors import CheckpointError, LayoutError
from cornplug.vllm_connector.model.model_config import drafts_with_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig


OF_LATENTS: Final[Mapping[str, str]] = {
    "head_size": "in the page",
    "dtype": "in the page, which refuses unknown dtypes",
    "cache_dtype_str": "compared with dtype",
    "num_kv_heads": "compared with 1",
    "max_tp_shards": "compared with 1: the first rank writes the whole latent, and every rank reads it",
    "kv_quant_mode": "compared with none",
    "block_size": "a page holds tokens, not blocks",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
    "is_draft": "the page's layers follow from the config",
}
"""Fields of vLLM's MLAAttentionSpec that may have any value, each with the reason. All other fields must have
their default values."""

OF_ATTENTION: Final[Mapping[str, str]] = {
    "num_kv_heads": "compared with the model's when a rank's slice is computed",
    "head_size": "in the page",
    "head_size_v": "compared with head_size",
    "dtype": "in the page, which refuses unknown dtypes",
    "kv_quant_mode": "in the page, or refused",
    "block_size": "a page holds tokens, not blocks",
    "sliding_window": "in the page, if vLLM frees the blocks before it",
    "attention_chunk_size": "vLLM keeps the blocks of all tokens",
    "max_tp_shards": "follows from the heads",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "page_size_padded": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
    "is_draft": "the page's layers follow from the config",
}
"""Fields of vLLM's FullAttentionSpec and SlidingWindowSpec that may have any value, each with the reason. All
other fields must have their default values."""

_FP8: Final[Mapping[str, str]] = {
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    # With "auto", only workers read the checkpoint's scheme, which they treat as "fp8". They verify the
    # format with test writes.
    "auto": "fp8_e4m3",
}
"""Values of `PageGeometry.quantised`, by vLLM's name of the cache format."""
Scales = Mapping[int, tuple[float, float]]
"""Scales of keys and values, (k, v), by layer number. A layer that is not listed has scales of 1."""
_KNOWN: Final = re.compile(
    r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:attn\.|qkv_proj\.|([kv])_proj\.)?([kv])_scale$"
)
"""Pattern of scale names in published compressed-tensors and ModelOpt checkpoints."""
_OTHER: Final = re.compile(r"(?:kv|k|v)_(?:cache\.)?(?:scale|zero_point)|[kv]_cache\.scale")
"""Pattern of any other name under which vLLM might read a scale of keys or values."""


def require_whole_contexts(config: VllmConfig) -> None:
    """Raise LayoutError if a rank holds the KV of only some of a request's tokens (context parallelism)."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutError("context parallelism splits tokens across ranks", reason="context_parallel")


def require_plain(spec: Any) -> None:
    """Raise LayoutError unless the blocks of layers with this spec contain K and V, or one latent, for each
    token.

    Blocks are not supported if they are compressed, packed, quantised with more than a scale, or have keys
    and values of different sizes.
    """
    from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec

    if getattr(spec, "non_causal", False):
        raise LayoutError("in non-causal attention, KV depends on later tokens", reason="attention_kind")
    if isinstance(spec, MLAAttentionSpec):
        if spec.kv_quant_mode != KVQuantMode.NONE:
            raise LayoutError(
                f"cornplug does not support quantised latents ({spec.kv_quant_mode.name})", reason="kv_dtype"
            )
        if spec.cache_dtype_str not in (None, "auto", dtype_name(spec.dtype)):
            raise LayoutError(
                f"cornplug does not support MLA with a KV cache of {spec.cache_dtype_str}", reason="kv_dtype"
            )
        if spec.num_kv_heads != 1 or spec.max_tp_shards not in (None, 1):
            raise LayoutError(
                "MLA latents that are split across heads or ranks are not supported", reason="attention_kind"
            )
        if field := unlisted_field(spec, OF_LATENTS):
            raise LayoutError(f"cornplug does not support MLA with {field}", reason="attention_kind")
        return
    if spec.head_size_v != spec.head_size:
        raise LayoutError("keys and values have different head sizes", reason="attention_kind")
    if spec.tokens_per_state != 1 or spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise LayoutError("the attention backend packs its blocks", reason="layout")
    if field := unlisted_field(spec, OF_ATTENTION):
        raise LayoutError(f"cornplug does not support attention with {field}", reason="attention_kind")


def unlisted_field(spec: Any, listed: Mapping[str, str]) -> str:
    """Return the name and value of the first field of `spec` that is neither in `listed` nor at its default,
    or "" if there is none."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name not in listed and value != field.default:
            return f"{field.name} {value!r}"
    return ""


def page_dtype(config: VllmConfig, spec: Any) -> tuple[str, str]:
    """Return (dtype, quantised format) of the values in a layer's KV cache, as in `PageGeometry`. The format
    is "" for a plain cache.

    Raises LayoutError for all quantised caches except fp8 with one scale per tensor, which the worker
    compares with the checkpoint's scale (`checkpoint_scales`).
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = spec.kv_quant_mode
    if mode == KVQuantMode.NONE:
        return dtype_name(spec.dtype), ""
    name = config.cache_config.cache_dtype
    # AMD's first fp8 format represents other values under the same name.
    plain = current_platform.fp8_dtype() == torch.float8_e4m3fn
    if mode != KVQuantMode.FP8_PER_TENSOR or spec.dtype != torch.uint8 or name not in _FP8 or not plain:
        raise LayoutError(
            f"cornplug does not support a quantised KV cache ({mode.name}, {name})", reason="kv_dtype"
        )
    return "uint8", _FP8[name]


def layer_number(name: str) -> int:
    """Return the layer number in a layer's name. Raises LayoutError if the name contains no number or
    several."""
    from vllm.model_executor.models.utils import extract_layer_index

    try:
        return int(extract_layer_index(name))
    except (AssertionError, ValueError) as e:
        raise LayoutError(f"cannot find the layer number in {name}", reason="layout") from e


def checkpoint_scales(config: VllmConfig) -> Scales:
    """Return the KV scales in this engine's checkpoint, in the dtype in which vLLM keeps them.

    Raises LayoutError for scales with unknown names or shapes, and for a layer with a scale of only keys or
    only values.
    """
    model = config.model_config
    try:
        checkpoint = Checkpoint.open(model.model, model.revision, cache_dir=config.load_config.download_dir)
        located = checkpoint.locate("language_model")
    except CheckpointError as e:
        raise LayoutError(f"cannot read the scales of the KV cache: {e}", reason=e.reason) from e
    named = {name: _KNOWN.search(name) for name in located if _OTHER.search(name)}
    if strange := [name for name, match in named.items() if not match or match[2] not in (None, match[3])]:
        raise LayoutError(
            f"the checkpoint has a KV scale with an unknown name: {min(strange)}", reason="kv_dtype"
        )
    if named and drafts_with_kv(config) is not None:
        raise LayoutError(
            "quantised KV cache scales with a draft model are not supported", reason="speculative"
        )
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


def scales_of_layers(scales: Scales, names: Iterable[str]) -> dict[str, tuple[float, float]]:
    """Return the KV scales (k, v) that each of these layers must have, by layer name. Raises LayoutError for
    names without a number."""
    if not scales:  # Names of draft model layers may contain no number.
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
