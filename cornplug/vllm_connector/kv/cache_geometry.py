"""The page of a model, and a rank's slice of it, from the caches that vLLM plans; or the reason for none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.errors import LayoutError
from cornplug.kv_page import PageGeometry, RankSlice, tensor_parallel_heads

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig


def page_geometry(config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> PageGeometry:
    """The page of this model. Raises LayoutError with the reason why KV cannot be shared.

    Hybrid models (sliding window, Mamba) have several cache groups, and a prefix counts only
    where every group has it: they run as stock, and the log names the reason.
    """
    if len(cache.kv_cache_groups) != 1:
        raise LayoutError(f"{len(cache.kv_cache_groups)} KV cache groups (a hybrid model)", reason="hybrid")
    spec = _plain(cache.kv_cache_groups[0].kv_cache_spec)
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutError("context parallelism splits tokens over ranks", reason="context_parallel")
    model = config.model_config
    return PageGeometry(
        page_tokens=page_tokens,
        heads=model.get_total_num_kv_heads(),
        layers=model.get_total_num_hidden_layers(),
        dim=spec.head_size,
        dtype=dtype_name(spec.dtype),
    )


def _plain(spec: Any) -> FullAttentionSpec:
    """The spec, where it is one of full attention whose blocks hold K and V of every token, and no more.

    Raises LayoutError for all others. Of subclasses some free blocks in the middle of a request (R-SWA), and
    some keep sinks before its first token.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode

    if type(spec) is not FullAttentionSpec:
        raise LayoutError(f"{type(spec).__name__} layers have no page layout yet", reason="attention_kind")
    if spec.non_causal:
        raise LayoutError("non-causal attention: KV depends on tokens that follow", reason="attention_kind")
    if spec.head_size_v != spec.head_size:
        raise LayoutError(
            "keys and values of different width have no page layout yet", reason="attention_kind"
        )
    if spec.kv_quant_mode != KVQuantMode.NONE:
        raise LayoutError(f"a quantised KV cache ({spec.kv_quant_mode.name})", reason="kv_dtype")
    if spec.tokens_per_state != 1 or spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise LayoutError("blocks that the attention backend packs", reason="layout")
    plain: FullAttentionSpec = spec
    return plain


def rank_slice(config: VllmConfig, cache: KVCacheConfig, geometry: PageGeometry) -> RankSlice:
    """The slice of a page that this worker's rank holds. Raises LayoutError where it is no plain slice."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
    from vllm.model_executor.models.utils import extract_layer_index

    heads, writes = tensor_parallel_heads(
        geometry.heads, get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    )
    numbers = sorted(extract_layer_index(name) for name in cache.kv_cache_groups[0].layer_names)
    layers = range(numbers[0], numbers[-1] + 1)
    if list(layers) != numbers or layers.stop > geometry.layers:
        raise LayoutError(f"layers {numbers} are no plain range of {geometry.layers}", reason="layout")
    return RankSlice(heads=heads, layers=layers, writes=writes)
