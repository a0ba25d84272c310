"""Page geometry of a model, and a rank's slice of it, derived from the caches that vLLM plans."""

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
    """Return the page geometry of this model. Raises LayoutError with the reason if KV cannot be shared.

    Hybrid models (sliding window, Mamba) have several cache groups, and a prefix counts only if every group
    has it. They run as stock, and the log gives the reason.
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
    return "vllm" if quantised else ""  # fp8 KV has not been compared with SGLang's.


def _first_layers(layers: int, stages: int) -> list[int]:
    """Return the first layer of each pipeline stage."""
    from vllm.distributed.utils import get_pp_indices

    if stages == 1:
        return [0]
    return [get_pp_indices(layers, stage, stages)[0] for stage in range(stages)]


def _layers(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Return the number of layers of a page: the model's layers with their own cache, then a draft
    model's."""
    total = config.model_config.get_total_num_hidden_layers()
    if config.parallel_config.pipeline_parallel_size > 1:
        # This plan may be for a single stage. Workers detect layers that share caches.
        if drafts_with_kv(config) is not None:
            raise LayoutError("a draft model with pipeline parallelism", reason="speculative")
        return total
    target, drafts = _split(config, cache)
    if len(target) > total:
        raise LayoutError(f"{len(target)} KV caches for {total} layers", reason="layout")
    return len(target) + len(drafts)


def steady_drafts(config: VllmConfig) -> SpeculativeConfig | None:
    """Return `drafts_with_kv`. Raises LayoutError if the KV of drafts has gaps."""
    speculative = drafts_with_kv(config)
    if speculative is not None and speculative.uses_dynamic_speculative_decoding():
        # Gaps occur when the engine was too busy to draft.
        raise LayoutError("the number of draft tokens depends on the load", reason="speculative")
    return speculative


def _split(config: VllmConfig, cache: KVCacheConfig) -> tuple[list[str], list[str]]:
    """Return the names of the group's layers: the model's layers by number, then its draft's layers in vLLM's
    order.

    vLLM loads a draft after its target and appends its layers, with numbers that continue or restart. Raises
    LayoutError if the KV layout of the draft differs from the target's.
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
        raise LayoutError(f"layers {target} are not the first {count} of the model", reason="layout")
    return target, names[count:]


def _planes(spec: Any) -> int:
    """Return 2 for layers of full attention whose blocks hold K and V of every token, 1 for MLA latents.

    Raises LayoutError for all others. Some subclasses free blocks in the middle of a request (R-SWA), and
    some keep sinks before its first token.
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
    """Return the slice of a page that this worker's rank holds. Raises LayoutError if it is not
    contiguous."""
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
    """Return this rank's caches in the order of a page's layers.

    A layer that uses another layer's cache is left out, because the page already has that cache. With
    pipeline parallelism it is kept, and the worker refuses it, because the page then has a fixed number of
    layers.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        names = sorted(kv_caches, key=layer_number)
    else:
        target, drafts = _split(config, cache)
        names = [*target, *drafts]
    # If vLLM registers fewer caches, the worker refuses them.
    return {name: kv_caches[name] for name in names if name in kv_caches}
