"""Page geometry of a model, and the part of each page that a rank holds, derived from the KV caches that vLLM
plans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cornplug.engine_common.kv_root import engine_of_latents
from cornplug.errors import LayoutError
from cornplug.kv_page import PLANES, PageGeometry, RankSlice, layer_runs, tensor_parallel_heads
from cornplug.vllm_connector.model.cache_specs import (
    layer_number,
    page_dtype,
    require_plain,
    require_whole_contexts,
)
from cornplug.vllm_connector.model.model_config import drafts_with_kv

if TYPE_CHECKING:
    import torch
    from vllm.config import SpeculativeConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def page_geometry(config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> PageGeometry:
    """Return the page geometry of a model with a single cache group. Raises LayoutError, with the reason, if
    KV cannot be shared.

    Hybrid models (sliding window, Mamba) have several cache groups (see `kv_groups.page_kinds`).
    """
    if len(cache.kv_cache_groups) != 1:
        raise LayoutError(f"{len(cache.kv_cache_groups)} KV cache groups (a hybrid model)", reason="hybrid")
    spec: Any = cache.kv_cache_groups[0].kv_cache_spec
    planes = _planes(spec)
    dtype, quantised = page_dtype(config, spec)
    require_whole_contexts(config)
    layers = _layers(config, cache)
    return PageGeometry(
        page_tokens=page_tokens,
        heads=1 if planes == 1 else config.model_config.get_total_num_kv_heads(),
        layers=layers,
        dim=spec.head_size,
        dtype=dtype,
        planes=planes,
        layer_runs=layer_runs(layers, _first_layers(layers, config.parallel_config.pipeline_parallel_size)),
        engine=_only_engine(config, planes, quantised),
        quantised=quantised,
    )


def _only_engine(config: VllmConfig, planes: int, quantised: str) -> str:
    if planes == 1:
        return engine_of_latents("vllm", config.model_config.hf_config.to_dict())
    return "vllm" if quantised else ""  # vLLM's fp8 KV has not been compared with SGLang's.


def _first_layers(layers: int, stages: int) -> list[int]:
    """Return the number of the first layer of each pipeline stage."""
    from vllm.distributed.utils import get_pp_indices

    if stages == 1:
        return [0]
    return [get_pp_indices(layers, stage, stages)[0] for stage in range(stages)]


def _layers(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Return the number of layers in a page: the model's layers that have their own cache, and a draft
    model's layers."""
    total = config.model_config.get_total_num_hidden_layers()
    if config.parallel_config.pipeline_parallel_size > 1:
        # `cache` may describe a single stage. Workers detect layers that share caches.
        if drafts_with_kv(config) is not None:
            raise LayoutError(
                "a draft model with pipeline parallelism is not supported", reason="speculative"
            )
        return total
    target, drafts = _split(config, cache)
    if len(target) > total:
        raise LayoutError(f"{len(target)} KV caches for {total} layers", reason="layout")
    return len(target) + len(drafts)


def steady_drafts(config: VllmConfig) -> SpeculativeConfig | None:
    """Return the speculation config if the draft model has its own KV, else None. Raises LayoutError if that
    KV may have gaps."""
    speculative = drafts_with_kv(config)
    if speculative is not None and speculative.uses_dynamic_speculative_decoding():
        # With dynamic speculative decoding, gaps occur in steps in which the engine was too busy to draft.
        raise LayoutError(
            "speculative decoding whose number of draft tokens depends on the load is not supported",
            reason="speculative",
        )
    return speculative


def _split(config: VllmConfig, cache: KVCacheConfig) -> tuple[list[str], list[str]]:
    """Split the layer names of a single cache group into (the model's layers by number, its draft's layers in
    vLLM's order).

    vLLM loads a draft model after its target model and appends the draft's layers. Their numbers continue or
    start again at 0. Raises LayoutError if the KV layout of the draft differs from the target's.
    """
    names, speculative = cache.kv_cache_groups[0].layer_names, steady_drafts(config)
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


def _planes(spec: Any) -> int:
    """Return the number of planes in the blocks of layers with this spec: 2 for full attention (K and V of
    each token), 1 for MLA (one latent per token).

    Raises LayoutError for all other kinds of layers. Some of them free blocks in the middle of a request
    (R-SWA), and some keep sink tokens before the request's first token.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise LayoutError(
            f"cornplug does not support the KV layout of {type(spec).__name__} layers",
            reason="attention_kind",
        )
    require_plain(spec)
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


def in_page_order(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return this rank's KV caches by layer name, in the order of the layers in a page.

    A layer that uses another layer's cache is left out, because the page already contains that cache. With
    pipeline parallelism, such a layer is kept and the worker rejects it, because the page then has a fixed
    number of layers.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        names = sorted(kv_caches, key=layer_number)
    else:
        target, drafts = _split(config, cache)
        names = [*target, *drafts]
    # If vLLM registers fewer caches than expected, the worker rejects them.
    return {name: kv_caches[name] for name in names if name in kv_caches}
