"""The kinds of pages of a model: one for each of vLLM's cache groups; or the reason for none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cornplug.encoder_service.wire.tensors import dtype_name
from cornplug.errors import LayoutError
from cornplug.kv_page import PageGeometry, tensor_parallel_heads
from cornplug.vllm_connector.kv.cache_geometry import (
    layer_number,
    page_geometry,
    require_whole_contexts,
    unlisted_field,
)
from cornplug.vllm_connector.model.model_config import drafts_with_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

_OF_GROUPS: Final[Mapping[str, str]] = {
    "num_kv_heads": "compared with the model's",
    "head_size": "in the page",
    "head_size_v": "compared with head_size",
    "dtype": "in the page, which refuses what it has no name for",
    "kv_quant_mode": "compared with none",
    "block_size": "a page holds tokens, not blocks; compared with the page",
    "sliding_window": "in the page",
    "max_tp_shards": "follows from the heads",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "page_size_padded": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
    "is_draft": "draft models are refused",
}
"""Fields of vLLM's specs that may have any value, and why: all others must have their default."""


@dataclass(frozen=True, slots=True)
class PageKind:
    """The pages of one cache group."""

    geometry: PageGeometry
    block_size: int
    layer_names: tuple[str, ...]
    """vLLM's, in the order of the page's layers."""

    @property
    def window(self) -> int:
        """Tokens that a layer attends to; 0: all."""
        return self.geometry.window

    def needed_from(self, end: int) -> int:
        """The first token that a request which goes on at token `end` needs in its blocks.

        vLLM keeps whole blocks, and caches each under the hash of all its tokens.
        """
        if not self.window:
            return 0
        return max(0, end - self.window + 1) // self.block_size * self.block_size


def page_kinds(config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> tuple[PageKind, ...]:
    """The kinds of pages of this model, in vLLM's order of groups.

    Raises LayoutError with the reason why KV cannot be shared. A prefix counts only where every group has
    it: a model with one group of another kind shares nothing.
    """
    groups = cache.kv_cache_groups
    if len(groups) == 1:
        geometry = page_geometry(config, cache, page_tokens)
        return (PageKind(geometry, groups[0].kv_cache_spec.block_size, tuple(groups[0].layer_names)),)
    several = f"{len(groups)} KV cache groups (a hybrid model)"
    require_whole_contexts(config)
    if config.parallel_config.pipeline_parallel_size > 1:
        raise LayoutError(f"{several} beside pipeline parallelism", reason="hybrid")
    if drafts_with_kv(config) is not None:
        raise LayoutError(f"{several} beside a draft model", reason="speculative")
    _require_every_layer(config, cache)
    kinds = tuple(_kind(config, group, page_tokens, several) for group in groups)
    if all(kind.window for kind in kinds):
        raise LayoutError(f"{several}, none of full attention", reason="hybrid")
    return kinds


def _require_every_layer(config: VllmConfig, cache: KVCacheConfig) -> None:
    """Raise LayoutError unless each of the model's layers is in exactly one group."""
    numbers = sorted(layer_number(name) for group in cache.kv_cache_groups for name in group.layer_names)
    total = config.model_config.get_total_num_hidden_layers()
    if numbers != list(range(total)):
        raise LayoutError(f"cache groups of layers {numbers}, in a model of {total}", reason="hybrid")


def _kind(config: VllmConfig, group: KVCacheGroupSpec, page_tokens: int, several: str) -> PageKind:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupRole,
        KVQuantMode,
        SlidingWindowSpec,
    )

    spec: Any = group.kv_cache_spec
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise LayoutError(f"{several}, one of {type(spec).__name__}", reason="hybrid")
    if group.role is not KVCacheGroupRole.DEFAULT or group.host_resident or not group.enable_kv_transfer:
        raise LayoutError(f"{several}, one with a role of its own", reason="hybrid")
    if spec.kv_quant_mode != KVQuantMode.NONE:
        raise LayoutError(f"a quantised KV cache ({spec.kv_quant_mode.name})", reason="kv_dtype")
    if spec.head_size_v != spec.head_size:
        raise LayoutError(f"{several}, one with keys and values of different width", reason="hybrid")
    if field := unlisted_field(spec, _OF_GROUPS):
        raise LayoutError(f"{several}, one with {field}", reason="hybrid")
    heads = config.model_config.get_total_num_kv_heads()
    held, _ = tensor_parallel_heads(heads, config.parallel_config.tensor_parallel_size, 0)
    if spec.num_kv_heads != len(held):
        raise LayoutError(f"{several}, with different KV heads", reason="hybrid")
    if page_tokens % spec.block_size and spec.block_size % page_tokens:
        raise LayoutError(
            f"{several}: blocks of {spec.block_size} tokens and pages of {page_tokens}", reason="layout"
        )
    names = sorted(group.layer_names, key=layer_number)
    geometry = PageGeometry(
        page_tokens=page_tokens,
        heads=heads,
        layers=len(names),
        dim=spec.head_size,
        dtype=dtype_name(spec.dtype),
        # No test compares them with SGLang's.
        engine="vllm",
        group=tuple(map(layer_number, names)),
        window=spec.sliding_window if type(spec) is SlidingWindowSpec else 0,
    )
    return PageKind(geometry, spec.block_size, tuple(names))


def whole_page(kinds: Sequence[PageKind]) -> PageGeometry:
    """A page of all layers of the model: as large as one page of each kind."""
    if len(kinds) == 1:
        return kinds[0].geometry
    layers = sum(kind.geometry.layers for kind in kinds)
    widest = max(kinds, key=lambda kind: kind.geometry.dim).geometry
    return replace(widest, layers=layers, group=(), window=0)
