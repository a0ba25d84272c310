"""Page kinds of a model, one for each of vLLM's cache groups.

With recurrent states, a page has as many tokens as a block, because a hit ends where vLLM keeps a state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cornplug.errors import LayoutError
from cornplug.kv_page import PageGeometry, PageSize, WholePage, tensor_parallel_heads
from cornplug.vllm_connector.kv.cache_geometry import page_geometry
from cornplug.vllm_connector.kv_groups.draft_layers import draft_layers
from cornplug.vllm_connector.kv_groups.state_pages import state_page
from cornplug.vllm_connector.model.cache_specs import (
    layer_number,
    page_dtype,
    require_plain,
    require_whole_contexts,
)
from cornplug.vllm_connector.model.model_config import drafts_with_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


@dataclass(frozen=True, slots=True)
class PageKind:
    """Pages of one cache group."""

    geometry: PageGeometry
    block_size: int
    layer_names: tuple[str, ...]
    """vLLM's layer names, in the order of the page's layers."""

    @property
    def whole(self) -> bool:
        """Whether a request that continues at a token needs all pages before it, and not only a tail."""
        return not (self.geometry.window or self.geometry.state)

    def needed_from(self, end: int) -> int:
        """Return the first token that a request which continues at token `end` needs in its blocks.

        vLLM keeps whole blocks, and caches each under the hash of all its tokens.
        """
        if self.whole:
            return 0
        tail = 1 if self.geometry.state else self.geometry.window - 1
        return max(0, end - tail) // self.block_size * self.block_size


def page_kinds(config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> tuple[PageKind, ...]:
    """Return the page kinds of this model, in vLLM's order of groups.

    Raises LayoutError with the reason if KV cannot be shared. A prefix counts only if every group has it, so
    a model with one unsupported group shares nothing.
    """
    groups = cache.kv_cache_groups
    if not groups:
        raise LayoutError("this engine has no KV", reason="layout")
    if len(groups) == 1:
        geometry = page_geometry(config, cache, page_tokens)
        return (PageKind(geometry, groups[0].kv_cache_spec.block_size, tuple(groups[0].layer_names)),)
    several = f"{len(groups)} KV cache groups (a hybrid model)"
    require_whole_contexts(config)
    if config.parallel_config.pipeline_parallel_size > 1:
        raise LayoutError(f"{several} with pipeline parallelism", reason="hybrid")
    of_states = [group.kv_cache_spec.block_size for group in groups if _keeps_states(group)]
    if of_states and drafts_with_kv(config) is not None:
        raise LayoutError("state layers with speculative decoding", reason="speculative")
    drafts = draft_layers(config, cache)
    _require_layers_of_the_model(config, cache, drafts)
    page_tokens = max(of_states, default=page_tokens)
    kinds = tuple(_kind(config, group, page_tokens, several, drafts) for group in groups)
    if not any(kind.whole for kind in kinds):
        raise LayoutError(f"{several}, none with full attention", reason="hybrid")
    if of_states and any(kind.geometry.window for kind in kinds):
        # In this case vLLM reports how much its own cache holds of full attention, but a window may have
        # less.
        raise LayoutError(f"{several}, with sliding windows and states", reason="hybrid")
    beside = ", ".join(sorted({kind.geometry.state for kind in kinds if kind.geometry.state}))
    return tuple(kind if kind.geometry.state else _beside(kind, beside) for kind in kinds)


def _beside(kind: PageKind, states: str) -> PageKind:
    return replace(kind, geometry=replace(kind.geometry, beside=states))


def _keeps_states(group: KVCacheGroupSpec) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return type(group.kv_cache_spec) is MambaSpec


def _require_layers_of_the_model(config: VllmConfig, cache: KVCacheConfig, drafts: Mapping[str, int]) -> None:
    """Raise LayoutError unless the groups contain exactly the model's layers, each at most once with KV and
    once with a state, and its draft's layers.

    A layer in no group has no cache (for example an MLP), or reads another layer's cache. The worker half
    refuses caches that are in no group. Falcon-H1 numbers its states after all of its layers.
    """
    total = config.model_config.get_total_num_hidden_layers()
    for of_states, limit in ((False, total), (True, 2 * total)):
        groups = [group for group in cache.kv_cache_groups if _keeps_states(group) is of_states]
        names = [name for group in groups for name in group.layer_names if name not in drafts]
        numbers = sorted(map(layer_number, names))
        if len(set(numbers)) < len(numbers) or max(numbers, default=0) >= limit:
            raise LayoutError(
                f"cache groups of layers {numbers}, in a model with {total} layers", reason="hybrid"
            )


def _kind(
    config: VllmConfig, group: KVCacheGroupSpec, page_tokens: int, several: str, drafts: Mapping[str, int]
) -> PageKind:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupRole,
        SlidingWindowSpec,
    )

    spec: Any = group.kv_cache_spec
    if group.role is not KVCacheGroupRole.DEFAULT or group.host_resident or not group.enable_kv_transfer:
        raise LayoutError(f"{several}, one with a special role", reason="hybrid")
    numbered = {name: drafts.get(name, layer_number(name)) for name in group.layer_names}
    names = tuple(sorted(numbered, key=numbered.__getitem__))
    numbers = tuple(map(numbered.__getitem__, names))
    if _keeps_states(group):
        return PageKind(state_page(config, spec, numbers, page_tokens), spec.block_size, names)
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise LayoutError(f"{several}, one with {type(spec).__name__}", reason="hybrid")
    require_plain(spec)
    dtype, quantised = page_dtype(config, spec)
    heads = config.model_config.get_total_num_kv_heads()
    held, _ = tensor_parallel_heads(heads, config.parallel_config.tensor_parallel_size, 0)
    if spec.num_kv_heads != len(held):
        raise LayoutError(f"{several}, with different KV heads", reason="hybrid")
    if page_tokens % spec.block_size and spec.block_size % page_tokens:
        raise LayoutError(
            f"{several}: blocks of {spec.block_size} tokens do not fit pages of {page_tokens} tokens",
            reason="layout",
        )
    geometry = PageGeometry(
        page_tokens=page_tokens,
        heads=heads,
        layers=len(names),
        dim=spec.head_size,
        dtype=dtype,
        # They have not been compared with SGLang's.
        engine="vllm",
        group=numbers,
        window=spec.sliding_window if type(spec) is SlidingWindowSpec else 0,
        quantised=quantised,
    )
    return PageKind(geometry, spec.block_size, names)


def whole_page(kinds: Sequence[PageKind]) -> PageSize:
    """Size of a page of all layers of the model: the sum of one page of each kind."""
    if len(kinds) == 1:
        return kinds[0].geometry
    return WholePage(kinds[0].geometry.page_tokens, sum(kind.geometry.page_bytes for kind in kinds))
