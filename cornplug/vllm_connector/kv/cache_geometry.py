"""Page geometry of a model, and the part of each page that a rank holds, derived from vLLM's KV cache specs.
Checks whether pages can represent the blocks that the specs describe.

The same tables are used for models with one cache group and for each of several groups (`page_kinds.py`).

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
from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.engine_common.model_identity import only_engine_of_latents
from cornplug.errors import CheckpointError, LayoutError
from cornplug.kv_page import PLANES, PageGeometry, RankSlice, count_layer_runs, tensor_parallel_heads
from cornplug.vllm_connector.model.model_config import draft_config_with_kv

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


LATENT_FIELDS: Final[Mapping[str, str]] = {
    "head_size": "in the page",
    "dtype": "part of the page geometry, which refuses unknown dtypes",
    "cache_dtype_str": "compared with dtype",
    "num_kv_heads": "compared with 1",
    "max_tp_shards": "compared with 1: the first rank writes the whole latent, and every rank reads it",
    "kv_quant_mode": "compared with none",
    "block_size": "a page holds tokens, not blocks",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
    "is_draft": "the config determines the page's layers",
}
"""Fields of vLLM's MLAAttentionSpec that may have any value, each with the reason. All other fields must have
their default values."""

ATTENTION_FIELDS: Final[Mapping[str, str]] = {
    "num_kv_heads": "compared with the model's when a rank's slice is computed",
    "head_size": "in the page",
    "head_size_v": "compared with head_size",
    "dtype": "part of the page geometry, which refuses unknown dtypes",
    "kv_quant_mode": "part of the page geometry, or refused",
    "block_size": "a page holds tokens, not blocks",
    "sliding_window": "part of the page geometry, if vLLM frees blocks before the window",
    "attention_chunk_size": "vLLM keeps the blocks of all tokens",
    "max_tp_shards": "determined by the number of heads",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "page_size_padded": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
    "is_draft": "the config determines the page's layers",
}
"""Fields of vLLM's FullAttentionSpec and SlidingWindowSpec that may have any value, each with the reason. All
other fields must have their default values."""

_FP8: Final[Mapping[str, str]] = {
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    # For "auto", only workers read the checkpoint's scheme, and they treat it as "fp8". Workers verify the
    # format with test writes.
    "auto": "fp8_e4m3",
}
"""Values of `PageGeometry.quantised`, by vLLM's name for the cache format."""
Scales = Mapping[int, tuple[float, float]]
"""Scales of keys and values, (k, v), by layer number. A layer without an entry has scales of 1."""
_KNOWN_SCALE: Final = re.compile(
    r"(?:^|\.)layers\.(\d+)\.self_attn\.(?:attn\.|qkv_proj\.|([kv])_proj\.)?([kv])_scale$"
)
"""Pattern of scale names in published compressed-tensors and ModelOpt checkpoints."""
_ANY_SCALE: Final = re.compile(r"(?:kv|k|v)_(?:cache\.)?(?:scale|zero_point)|[kv]_cache\.scale")
"""Pattern of all other names under which vLLM might read a scale of keys or values."""


def page_geometry(config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> PageGeometry:
    """Return the page geometry of a model with a single cache group. Raises LayoutError, with the reason, if
    KV of the model cannot be shared.

    Hybrid models (sliding window, Mamba) have several cache groups (see `page_kinds.py`).
    """
    if len(cache.kv_cache_groups) != 1:
        raise LayoutError(f"{len(cache.kv_cache_groups)} KV cache groups (a hybrid model)", reason="hybrid")
    spec: Any = cache.kv_cache_groups[0].kv_cache_spec
    planes = _count_planes(spec)
    dtype, quantised = page_dtype(config, spec)
    require_complete_contexts(config)
    layers = _count_layers(config, cache)
    return PageGeometry(
        page_tokens=page_tokens,
        heads=1 if planes == 1 else config.model_config.get_total_num_kv_heads(),
        layers=layers,
        dim=spec.head_size,
        dtype=dtype,
        planes=planes,
        layer_runs=count_layer_runs(
            layers, _first_layers(layers, config.parallel_config.pipeline_parallel_size)
        ),
        engine=_only_engine(config, planes, quantised),
        quantised=quantised,
    )


def _only_engine(config: VllmConfig, planes: int, quantised: str) -> str:
    if planes == 1:
        return only_engine_of_latents("vllm", config.model_config.hf_config.to_dict())
    return "vllm" if quantised else ""  # vLLM's fp8 KV has not been compared with SGLang's.


def _first_layers(layers: int, stages: int) -> list[int]:
    """Return the number of the first layer of each pipeline stage."""
    from vllm.distributed.utils import get_pp_indices

    if stages == 1:
        return [0]
    return [get_pp_indices(layers, stage, stages)[0] for stage in range(stages)]


def _count_layers(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Return the number of layers in a page: the model's layers that have their own cache, and a draft
    model's layers."""
    total = config.model_config.get_total_num_hidden_layers()
    if config.parallel_config.pipeline_parallel_size > 1:
        # `cache` may describe a single pipeline stage. Workers detect layers that share caches.
        if draft_config_with_kv(config) is not None:
            raise LayoutError(
                "a draft model with pipeline parallelism is not supported", reason="speculative"
            )
        return total
    target, drafts = _split_layers(config, cache)
    if len(target) > total:
        raise LayoutError(f"{len(target)} KV caches for {total} layers", reason="layout")
    return len(target) + len(drafts)


def checked_draft_config(config: VllmConfig) -> SpeculativeConfig | None:
    """Return the speculative decoding config if the draft model has its own KV, else None. Raises LayoutError
    if the draft model's KV may have gaps."""
    speculative = draft_config_with_kv(config)
    if speculative is not None and speculative.uses_dynamic_speculative_decoding():
        # With dynamic speculative decoding, the KV has gaps after steps in which the engine was too busy to
        # draft.
        raise LayoutError(
            "speculative decoding whose number of draft tokens depends on the load is not supported",
            reason="speculative",
        )
    return speculative


def _split_layers(config: VllmConfig, cache: KVCacheConfig) -> tuple[list[str], list[str]]:
    """Split the layer names of a single cache group into (the model's layers by number, the draft model's
    layers in vLLM's order).

    vLLM loads a draft model after its target model and appends the draft's layers. Their layer numbers
    continue the target's numbers, or start again at 0. Raises LayoutError if the draft's and target's KV
    layouts differ.
    """
    names, speculative = cache.kv_cache_groups[0].layer_names, checked_draft_config(config)
    count = len(names)
    if speculative is not None:
        model, parallel = config.model_config, config.parallel_config
        draft, draft_parallel = speculative.draft_model_config, speculative.draft_parallel_config
        heads = draft.get_total_num_kv_heads(), draft_parallel.tensor_parallel_size
        if heads != (model.get_total_num_kv_heads(), parallel.tensor_parallel_size):
            raise LayoutError("the draft model has a different number of KV heads", reason="speculative")
        count = min(count, model.get_total_num_hidden_layers())
    target = sorted(names[:count], key=layer_number)
    if [layer_number(name) for name in target] != list(range(count)):
        raise LayoutError(f"layers {target} are not the first {count} layers of the model", reason="layout")
    return target, names[count:]


def _count_planes(spec: Any) -> int:
    """Return the number of planes in the blocks of layers with this spec: 2 for full attention (K and V of
    each token), 1 for MLA (one latent per token).

    Raises LayoutError for all other kinds of layers. Some of these layers free blocks in the middle of a
    request (R-SWA), and some keep sink tokens before the request's first token.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise LayoutError(
            f"cornplug does not support the KV layout of {type(spec).__name__} layers",
            reason="attention_kind",
        )
    require_plain_blocks(spec)
    return 1 if type(spec) is MLAAttentionSpec else PLANES


def rank_slice(config: VllmConfig, cache: KVCacheConfig, geometry: PageGeometry) -> RankSlice:
    """Return the heads and layers of a page that this worker's rank holds. Raises LayoutError if the layers
    are not contiguous."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    heads, writes = tensor_parallel_heads(
        geometry.heads, get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    )
    if config.parallel_config.pipeline_parallel_size == 1:
        return RankSlice(heads=heads, layers=range(geometry.layers), writes=writes)
    numbers = sorted(layer_number(name) for name in cache.kv_cache_groups[0].layer_names)
    layers = range(numbers[0], numbers[-1] + 1)
    if list(layers) != numbers or layers.stop > geometry.layers:
        raise LayoutError(
            f"layers {numbers} are not a contiguous range of {geometry.layers}", reason="layout"
        )
    return RankSlice(heads=heads, layers=layers, writes=writes)


def layers_in_page_order(config: VllmConfig, cache: KVCacheConfig) -> tuple[str, ...]:
    """Return the layer names of a model with a single cache group, in the order of the layers in a page. With
    pipeline parallelism, `cache` may have only the layers of one stage."""
    if config.parallel_config.pipeline_parallel_size > 1:
        return tuple(sorted(cache.kv_cache_groups[0].layer_names, key=layer_number))
    target, drafts = _split_layers(config, cache)
    return (*target, *drafts)


def require_complete_contexts(config: VllmConfig) -> None:
    """Raise LayoutError if a rank holds the KV of only some of a request's tokens (context parallelism)."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutError("context parallelism splits tokens across ranks", reason="context_parallel")


def require_plain_blocks(spec: Any) -> None:
    """Raise LayoutError unless the blocks of layers with this spec contain K and V, or one latent, for each
    token.

    Blocks are unsupported if they are compressed or packed, if their quantisation is unsupported
    (`page_dtype`), or if keys and values have different sizes.
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
        if field := find_unlisted_field(spec, LATENT_FIELDS):
            raise LayoutError(f"cornplug does not support MLA with {field}", reason="attention_kind")
        return
    if spec.head_size_v != spec.head_size:
        raise LayoutError("keys and values have different head sizes", reason="attention_kind")
    if spec.tokens_per_state != 1 or spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise LayoutError("the attention backend packs its blocks", reason="layout")
    if field := find_unlisted_field(spec, ATTENTION_FIELDS):
        raise LayoutError(f"cornplug does not support attention with {field}", reason="attention_kind")


def find_unlisted_field(spec: Any, listed: Mapping[str, str]) -> str:
    """Return the name and value of the first field of `spec` that is neither in `listed` nor at its default.
    Return "" if `spec` has no such field."""
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
    # AMD's first fp8 format uses the same name for other values.
    plain = current_platform.fp8_dtype() == torch.float8_e4m3fn
    if mode != KVQuantMode.FP8_PER_TENSOR or spec.dtype != torch.uint8 or name not in _FP8 or not plain:
        raise LayoutError(
            f"cornplug does not support a quantised KV cache ({mode.name}, {name})", reason="kv_dtype"
        )
    return "uint8", _FP8[name]


def layer_number(name: str) -> int:
    """Return the layer number in a layer's name. Raises LayoutError unless the name contains exactly one
    number."""
    from vllm.model_executor.models.utils import extract_layer_index

    try:
        return int(extract_layer_index(name))
    except (AssertionError, ValueError) as e:
        raise LayoutError(f"cannot find the layer number in {name}", reason="layout") from e


def checkpoint_scales(config: VllmConfig) -> Scales:
    """Return the KV scales in this engine's checkpoint, in the dtype that vLLM uses for scales.

    Raises LayoutError for scales with unknown names or shapes, and for a layer that has a scale only for keys
    or only for values.
    """
    model = config.model_config
    try:
        checkpoint = Checkpoint.open(model.model, model.revision, cache_dir=config.load_config.download_dir)
        located = checkpoint.locate("language_model")
    except CheckpointError as e:
        raise LayoutError(f"cannot read the scales of the KV cache: {e}", reason=e.reason) from e
    named = {name: _KNOWN_SCALE.search(name) for name in located if _ANY_SCALE.search(name)}
    if strange := [name for name, match in named.items() if not match or match[2] not in (None, match[3])]:
        raise LayoutError(
            f"the checkpoint has a KV scale with an unknown name: {min(strange)}", reason="kv_dtype"
        )
    if named and draft_config_with_kv(config) is not None:
        raise LayoutError(
            "quantised KV cache scales with a draft model are not supported", reason="speculative"
        )
    found: dict[int, dict[str, float]] = {}
    for name, match in named.items():
        assert match is not None
        value = _read_scalar(*located[name]).to(model.dtype).item()
        if found.setdefault(int(match[1]), {}).setdefault(match[3], value) != value or not value > 0:
            raise LayoutError(
                f"the checkpoint has no single positive value for scale {name}", reason="kv_dtype"
            )
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


def _read_scalar(file: Path, name: str) -> torch.Tensor:
    try:
        with safe_open(file, framework="pt") as tensors:
            found: torch.Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as e:
        raise LayoutError(f"cannot read {name} of the checkpoint: {e}", reason="unreadable") from e
    if found.numel() != 1 or not found.is_floating_point():
        raise LayoutError(f"{name} of the checkpoint is not a single number", reason="kv_dtype")
    return found.reshape(())
