"""The page of a model, and a rank's slice of it, from the caches that vLLM plans; or the reason for none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.engine_common.kv_root import engine_of_latents
from cornplug.engine_common.model_identity import declares_quantised_kv
from cornplug.errors import LayoutError
from cornplug.kv_page import PLANES, PageGeometry, RankSlice, layer_runs, tensor_parallel_heads
from cornplug.vllm_connector.model.model_config import drafts_with_kv

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec

_OF_LATENTS: Final[Mapping[str, str]] = {
    "head_size": "in the page",
    "dtype": "in the page, which refuses what it has no name for",
    "cache_dtype_str": "compared with dtype",
    "num_kv_heads": "compared with 1",
    "max_tp_shards": "compared with 1: the first rank writes the whole latent, and every rank reads it",
    "kv_quant_mode": "compared with none",
    "block_size": "a page holds tokens, not blocks",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
    "is_draft": "the page's layers follow from the config",
}
"""Fields of vLLM's MLAAttentionSpec that may have any value, and why: all others must have their default."""


_FP8: Final[Mapping[str, str]] = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
"""vLLM's names of formats, and those of `PageGeometry.quantised`."""


def page_geometry(config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> PageGeometry:
    """The page of this model. Raises LayoutError with the reason why KV cannot be shared.

    Hybrid models (sliding window, Mamba) have several cache groups, and a prefix counts only
    where every group has it: they run as stock, and the log names the reason.
    """
    if len(cache.kv_cache_groups) != 1:
        raise LayoutError(f"{len(cache.kv_cache_groups)} KV cache groups (a hybrid model)", reason="hybrid")
    spec: Any = cache.kv_cache_groups[0].kv_cache_spec
    planes = _planes(spec)
    quantised = _quantised(config, spec)
    require_whole_contexts(config)
    if planes == 1 and drafts_with_kv(config) is not None:
        raise LayoutError("a draft model beside MLA: no test shares its KV", reason="speculative")
    layers = _layers(config, cache)
    return PageGeometry(
        page_tokens=page_tokens,
        heads=1 if planes == 1 else config.model_config.get_total_num_kv_heads(),
        layers=layers,
        dim=spec.head_size,
        dtype="uint8" if quantised else dtype_name(spec.dtype),
        planes=planes,
        layer_runs=layer_runs(layers, _first_layers(layers, config.parallel_config.pipeline_parallel_size)),
        engine=_only_engine(config, planes, quantised),
        quantised=quantised,
    )


def require_whole_contexts(config: VllmConfig) -> None:
    """Raise LayoutError where a rank holds some of a request's tokens."""
    parallel = config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise LayoutError("context parallelism splits tokens over ranks", reason="context_parallel")


def unlisted_field(spec: Any, listed: Mapping[str, str]) -> str:
    """The first field, with its value, that is neither listed nor has its default; "" where there is none."""
    for field in fields(spec):
        value = getattr(spec, field.name)
        if field.name not in listed and value != field.default:
            return f"{field.name} {value!r}"
    return ""


def _only_engine(config: VllmConfig, planes: int, quantised: str) -> str:
    if planes == 1:
        return engine_of_latents("vllm", config.model_config.hf_config.to_dict())
    return "vllm" if quantised else ""  # No test compares bytes of fp8 with SGLang's.


def _quantised(config: VllmConfig, spec: Any) -> str:
    """The format of a cache of one byte a value, as `PageGeometry.quantised`; "" for a plain cache.

    Raises LayoutError for all but fp8 with a scale for each tensor, which the worker compares with 1.
    """
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import KVQuantMode

    mode = spec.kv_quant_mode
    if mode == KVQuantMode.NONE:
        return ""
    name = config.cache_config.cache_dtype
    # AMD's first fp8 has other values under the same name.
    plain = current_platform.fp8_dtype() == torch.float8_e4m3fn
    if mode != KVQuantMode.FP8_PER_TENSOR or spec.dtype != torch.uint8 or name not in _FP8 or not plain:
        raise LayoutError(f"a quantised KV cache ({mode.name}, {name})", reason="kv_dtype")
    if field := declares_quantised_kv(config.model_config.hf_config):
        raise LayoutError(
            f"the checkpoint brings scales of a quantised KV cache ({field})", reason="kv_dtype"
        )
    return _FP8[name]


def _first_layers(layers: int, stages: int) -> list[int]:
    """The first layer of each pipeline stage."""
    from vllm.distributed.utils import get_pp_indices

    if stages == 1:
        return [0]
    return [get_pp_indices(layers, stage, stages)[0] for stage in range(stages)]


def _layers(config: VllmConfig, cache: KVCacheConfig) -> int:
    """Layers of a page: the model's with a cache of their own, then a draft model's."""
    total = config.model_config.get_total_num_hidden_layers()
    if config.parallel_config.pipeline_parallel_size > 1:
        # This plan may be of one stage alone. Where layers share caches, the ranks find out.
        if drafts_with_kv(config) is not None:
            raise LayoutError("a draft model beside pipeline parallelism", reason="speculative")
        return total
    target, drafts = _split(config, cache)
    if len(target) > total:
        raise LayoutError(f"{len(target)} KV caches for {total} layers", reason="layout")
    return len(target) + len(drafts)


def _split(config: VllmConfig, cache: KVCacheConfig) -> tuple[list[str], list[str]]:
    """Names of the group's layers: the model's by their numbers, then its draft's as vLLM has them.

    vLLM loads a draft after its target and appends its layers, under numbers that go on or begin again.
    Raises LayoutError for drafts whose KV lies otherwise than the target's.
    """
    names, speculative = cache.kv_cache_groups[0].layer_names, drafts_with_kv(config)
    count = len(names)
    if speculative is not None:
        model, parallel = config.model_config, config.parallel_config
        draft, draft_parallel = speculative.draft_model_config, speculative.draft_parallel_config
        if speculative.uses_dynamic_speculative_decoding():
            # Its KV has gaps where the engine was too busy to draft.
            raise LayoutError("a number of drafts that follows the load", reason="speculative")
        heads = draft.get_total_num_kv_heads(), draft_parallel.tensor_parallel_size
        if heads != (model.get_total_num_kv_heads(), parallel.tensor_parallel_size):
            raise LayoutError("a draft model with other KV heads than its target", reason="speculative")
        count = min(count, model.get_total_num_hidden_layers())
    target = sorted(names[:count], key=layer_number)
    if [layer_number(name) for name in target] != list(range(count)):
        raise LayoutError(f"layers {target} are not the first {count} of the model", reason="layout")
    return target, names[count:]


def _planes(spec: Any) -> int:
    """2 for layers of full attention whose blocks hold K and V of every token, 1 for MLA's latents; no more.

    Raises LayoutError for all others. Of subclasses some free blocks in the middle of a request (R-SWA), and
    some keep sinks before its first token.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVQuantMode, MLAAttentionSpec

    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        raise LayoutError(f"{type(spec).__name__} layers have no page layout yet", reason="attention_kind")
    if spec.non_causal:
        raise LayoutError("non-causal attention: KV depends on tokens that follow", reason="attention_kind")
    if type(spec) is MLAAttentionSpec:
        if spec.kv_quant_mode != KVQuantMode.NONE:
            raise LayoutError(f"quantised latents ({spec.kv_quant_mode.name})", reason="kv_dtype")
        _require_plain_latents(spec)
        return 1
    if spec.head_size_v != spec.head_size:
        raise LayoutError(
            "keys and values of different width have no page layout yet", reason="attention_kind"
        )
    if spec.tokens_per_state != 1 or spec.num_head_slots is not None or spec.state_content_bytes is not None:
        raise LayoutError("blocks that the attention backend packs", reason="layout")
    return PLANES


def _require_plain_latents(spec: MLAAttentionSpec) -> None:
    """Raise LayoutError for MLA whose blocks hold anything but one latent of every token.

    Such are compressed, windowed, padded and packed caches, and those of sparse attention's indexers.
    """
    if spec.cache_dtype_str not in (None, "auto", dtype_name(spec.dtype)):
        raise LayoutError(f"MLA with a KV cache of {spec.cache_dtype_str}", reason="kv_dtype")
    if spec.num_kv_heads != 1 or spec.max_tp_shards not in (None, 1):
        raise LayoutError("MLA whose latents are split over heads or ranks", reason="attention_kind")
    if field := unlisted_field(spec, _OF_LATENTS):
        raise LayoutError(f"MLA with {field} has no page layout yet", reason="attention_kind")


def rank_slice(config: VllmConfig, cache: KVCacheConfig, geometry: PageGeometry) -> RankSlice:
    """The slice of a page that this worker's rank holds. Raises LayoutError where it is no plain slice."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    heads, writes = tensor_parallel_heads(
        geometry.heads, get_tensor_model_parallel_world_size(), get_tensor_model_parallel_rank()
    )
    if config.parallel_config.pipeline_parallel_size == 1:
        return RankSlice(heads=heads, layers=range(geometry.layers), writes=writes)
    numbers = sorted(layer_number(name) for name in cache.kv_cache_groups[0].layer_names)
    layers = range(numbers[0], numbers[-1] + 1)
    if list(layers) != numbers or layers.stop > geometry.layers:
        raise LayoutError(f"layers {numbers} are no plain range of {geometry.layers}", reason="layout")
    return RankSlice(heads=heads, layers=layers, writes=writes)


def in_page_order(
    config: VllmConfig, cache: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """This rank's caches in the order of a page's layers.

    A layer that reads and writes another's cache is left out: the page has that cache already. Beside
    pipeline parallelism it stays, as the page then has no room for fewer layers: the worker refuses it.
    """
    if config.parallel_config.pipeline_parallel_size > 1:
        names = sorted(kv_caches, key=layer_number)
    else:
        target, drafts = _split(config, cache)
        names = [*target, *drafts]
    # Where vLLM registers fewer, the worker refuses them.
    return {name: kv_caches[name] for name in names if name in kv_caches}


def layer_number(name: str) -> int:
    """The layer's number in its name. Raises LayoutError for a name with none, or with several."""
    from vllm.model_executor.models.utils import extract_layer_index

    try:
        return int(extract_layer_index(name))
    except (AssertionError, ValueError) as e:
        raise LayoutError(f"layer {name} has no single number", reason="layout") from e
