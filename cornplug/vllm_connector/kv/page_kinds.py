"""Page kinds of a model: the geometry of the pages for each of vLLM's cache groups.

In models with recurrent states, a page has as many tokens as a block, because a hit can end only at a token
for which vLLM keeps a state.

vLLM caches a recurrent state (Mamba, gated delta nets) in the block that contains the state's last token
(mamba cache mode "align"). A page contains that block: the states of all layers of the group after the page's
last token. The state's bytes are not interpreted, so every kind of state that vLLM describes by MambaSpec can
be shared.

vLLM loads a draft (an EAGLE head or a draft model) after its target and assigns the draft's layers to groups
by their KV cache specs. For example, the layers of GPT-OSS's EAGLE-3 head are added to the full attention
group if they have the same number of heads. Page keys of an engine with a draft contain the draft's identity.
Therefore pages of such a group contain the draft's layers after the model's layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cornplug.encoder_service.formats.tensors import dtype_name
from cornplug.errors import LayoutError
from cornplug.identity import LINK_TOKENS
from cornplug.kv_page import CombinedPageSize, PageGeometry, PageSize, tensor_parallel_heads
from cornplug.vllm_connector.kv.cache_geometry import (
    checked_draft_config,
    find_unlisted_field,
    layer_number,
    layers_in_page_order,
    page_dtype,
    page_geometry,
    require_complete_contexts,
    require_plain_blocks,
)
from cornplug.vllm_connector.model.model_config import draft_config_with_kv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


_TESTED_METHODS: Final = frozenset({"eagle3"})
"""Methods of speculative decoding (vLLM's names) that were tested with several cache groups."""
DRAFT_PREFIX: Final = "draft_model"
"""Prefix of the layer names of a draft model, whose layer numbers start again at 0. The layer numbers of an
EAGLE head continue after the target model's numbers."""
STATE_FIELDS: Final[Mapping[str, str]] = {
    "shapes": "in the page",
    "dtypes": "in the page",
    "mamba_type": "in the page",
    "block_size": "the page's tokens",
    "mamba_cache_mode": "compared with align",
    "num_speculative_blocks": "compared with 0",
    "num_prefill_checkpoint_blocks": "only blocks that vLLM caches under the hash of their tokens are saved",
    "prefill_checkpoint_alignment": "only blocks that vLLM caches under the hash of their tokens are saved",
    "page_size_padded": "the worker reads the strides of the cache itself",
    "block_stride_alignment": "the worker reads the strides of the cache itself",
    "dcp_sharded": "context parallelism is refused",
}
"""Fields of vLLM's MambaSpec that may have any value, each with the reason. All other fields must have their
default values."""


def draft_layers(config: VllmConfig, cache: KVCacheConfig) -> Mapping[str, int]:
    """Return the number of each of the draft model's layers that has KV, by layer name. The numbers continue
    after the target model's layers. Empty if there is no draft model.

    Raises LayoutError, with the reason, if the draft model's KV cannot be shared.
    """
    speculative = checked_draft_config(config)
    if speculative is None:
        return {}
    several = f"{len(cache.kv_cache_groups)} KV cache groups (a hybrid model)"
    if speculative.method not in _TESTED_METHODS:
        raise LayoutError(
            f"{several} with --speculative-config method {speculative.method} (which is not tested; "
            f"{', '.join(sorted(_TESTED_METHODS))} and ngram can be shared)",
            reason="speculative",
        )
    model, draft = config.model_config, speculative.draft_model_config
    heads = draft.get_total_num_kv_heads(), speculative.draft_parallel_config.tensor_parallel_size
    if heads != (model.get_total_num_kv_heads(), config.parallel_config.tensor_parallel_size):
        raise LayoutError(
            f"{several}, and a draft model with a different number of KV heads", reason="speculative"
        )
    if len({group.kv_cache_spec.block_size for group in cache.kv_cache_groups}) > 1:
        # vLLM gives layers with different head sizes different block sizes, so that their blocks have the
        # same number of bytes.
        raise LayoutError(f"{several} with different block sizes, and a draft model", reason="speculative")
    total = model.get_total_num_hidden_layers()
    groups = [
        [
            name
            for name in group.layer_names
            if name.startswith(f"{DRAFT_PREFIX}.") or layer_number(name) >= total
        ]
        for group in cache.kv_cache_groups
    ]
    found = [names for names in groups if names]
    if len(found) != 1:
        raise LayoutError(
            f"{several}, and a draft model with layers in {len(found)} groups", reason="speculative"
        )
    names = sorted(found[0], key=layer_number)
    if len(set(map(layer_number, names))) < len(names):
        raise LayoutError(
            f"{several}, and a draft model with two caches per layer: {names}", reason="speculative"
        )
    return {name: total + place for place, name in enumerate(names)}


def state_page_geometry(
    config: VllmConfig, spec: Any, layers: Sequence[int], page_tokens: int
) -> PageGeometry:
    """Return the page geometry of a cache group with the recurrent states of these layers. Raises LayoutError
    if the group cannot be shared."""
    from vllm.platforms import current_platform

    cache = config.cache_config
    if spec.mamba_cache_mode != "align":
        raise LayoutError(
            "vLLM keeps states only of running requests; set --enable-prefix-caching to keep more",
            reason="hybrid",
        )
    if spec.num_speculative_blocks:
        raise LayoutError("state layers with speculative decoding are not supported", reason="speculative")
    if cache.prefix_match_unit not in (None, spec.block_size):
        raise LayoutError(
            "state checkpoints inside blocks (--prefix-match-unit) are not supported", reason="hybrid"
        )
    if spec.block_size != page_tokens or page_tokens % LINK_TOKENS:
        raise LayoutError(
            f"states at the ends of blocks of {spec.block_size} tokens do not fit pages of {page_tokens} "
            "tokens",
            reason="layout",
        )
    if field := find_unlisted_field(spec, STATE_FIELDS):
        raise LayoutError(f"state layers with {field} are not supported", reason="hybrid")
    shapes = " ".join(
        f"{dtype_name(of)}{list(shape)}" for shape, of in zip(spec.shapes, spec.dtypes, strict=True)
    )
    return PageGeometry(
        page_tokens=page_tokens,
        # Each rank holds the states of its own heads. Its kernels define their order.
        heads=config.parallel_config.tensor_parallel_size,
        layers=len(layers),
        dim=spec.state_content_size_bytes,
        dtype="uint8",
        planes=1,
        engine="vllm",
        group=tuple(layers),
        # Kernels for another platform may order a state's values differently.
        state=f"{spec.mamba_type.name} {current_platform.device_type} {shapes}",
    )


@dataclass(frozen=True, slots=True)
class PageKind:
    """Page geometry, block size and layers of one cache group."""

    geometry: PageGeometry
    block_size: int
    layer_names: tuple[str, ...]
    """vLLM's names of the group's layers, in their order in a page."""

    @property
    def needs_all_pages(self) -> bool:
        """Whether a request that continues at a token needs all pages before that token. False if the request
        needs only the last pages (a window or a state)."""
        return not (self.geometry.window or self.geometry.state)

    def first_needed_token(self, end: int) -> int:
        """Return the first token whose blocks are necessary for a request to continue at token `end`.

        The result is a multiple of the block size, because vLLM keeps and caches only complete blocks.
        """
        if self.needs_all_pages:
            return 0
        tail = 1 if self.geometry.state else self.geometry.window - 1
        return max(0, end - tail) // self.block_size * self.block_size


def page_kinds(config: VllmConfig, cache: KVCacheConfig, page_tokens: int) -> tuple[PageKind, ...]:
    """Return one page kind per cache group of the model, in vLLM's order of groups.

    Raises LayoutError, with the reason, if KV cannot be shared. A prefix can be loaded only if every group
    has its pages. Therefore a model with one unsupported group shares nothing.
    """
    groups = cache.kv_cache_groups
    if not groups:
        raise LayoutError("this engine has no KV", reason="layout")
    if len(groups) == 1:
        geometry = page_geometry(config, cache, page_tokens)
        names = layers_in_page_order(config, cache)
        return (PageKind(geometry, groups[0].kv_cache_spec.block_size, names),)
    several = f"{len(groups)} KV cache groups (a hybrid model)"
    require_complete_contexts(config)
    if config.parallel_config.pipeline_parallel_size > 1:
        raise LayoutError(f"{several} with pipeline parallelism", reason="hybrid")
    of_states = [group.kv_cache_spec.block_size for group in groups if _is_state_group(group)]
    if of_states and draft_config_with_kv(config) is not None:
        raise LayoutError("state layers with speculative decoding are not supported", reason="speculative")
    drafts = draft_layers(config, cache)
    _require_model_layers(config, cache, drafts)
    page_tokens = max(of_states, default=page_tokens)
    kinds = tuple(_create_kind(config, group, page_tokens, several, drafts) for group in groups)
    if not any(kind.needs_all_pages for kind in kinds):
        raise LayoutError(f"{several}, none with full attention", reason="hybrid")
    if of_states and any(kind.geometry.window for kind in kinds):
        # For a model with both kinds, vLLM reports how many tokens its own cache has for full attention. The
        # cache may have fewer tokens for a window.
        raise LayoutError(f"{several}, with sliding windows and states", reason="hybrid")
    beside = ", ".join(sorted({kind.geometry.state for kind in kinds if kind.geometry.state}))
    return tuple(kind if kind.geometry.state else _with_model_state(kind, beside) for kind in kinds)


def _with_model_state(kind: PageKind, states: str) -> PageKind:
    return replace(kind, geometry=replace(kind.geometry, model_state=states))


def _is_state_group(group: KVCacheGroupSpec) -> bool:
    from vllm.v1.kv_cache_interface import MambaSpec

    return type(group.kv_cache_spec) is MambaSpec


def _require_model_layers(config: VllmConfig, cache: KVCacheConfig, drafts: Mapping[str, int]) -> None:
    """Raise LayoutError unless the cache groups contain exactly the layers of the model and its draft. Each
    model layer may occur at most once with KV and once with a state.

    A layer without a group has no cache (for example an MLP), or uses another layer's cache. The worker half
    rejects caches that belong to no group. Falcon-H1 numbers its states after all of its layers.
    """
    total = config.model_config.get_total_num_hidden_layers()
    for of_states, limit in ((False, total), (True, 2 * total)):
        groups = [group for group in cache.kv_cache_groups if _is_state_group(group) is of_states]
        names = [name for group in groups for name in group.layer_names if name not in drafts]
        numbers = sorted(map(layer_number, names))
        if len(set(numbers)) < len(numbers) or max(numbers, default=0) >= limit:
            raise LayoutError(
                f"unexpected layer numbers {numbers} for a model with {total} layers", reason="hybrid"
            )


def _create_kind(
    config: VllmConfig, group: KVCacheGroupSpec, page_tokens: int, description: str, drafts: Mapping[str, int]
) -> PageKind:
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupRole,
        SlidingWindowSpec,
    )

    spec: Any = group.kv_cache_spec
    if group.role is not KVCacheGroupRole.DEFAULT or group.host_resident or not group.enable_kv_transfer:
        raise LayoutError(f"{description}, one of which has a special role", reason="hybrid")
    numbered = {name: drafts.get(name, layer_number(name)) for name in group.layer_names}
    names = tuple(sorted(numbered, key=numbered.__getitem__))
    numbers = tuple(map(numbered.__getitem__, names))
    if _is_state_group(group):
        return PageKind(state_page_geometry(config, spec, numbers, page_tokens), spec.block_size, names)
    if type(spec) not in (FullAttentionSpec, SlidingWindowSpec):
        raise LayoutError(f"{description}, one with {type(spec).__name__}", reason="hybrid")
    require_plain_blocks(spec)
    dtype, quantised = page_dtype(config, spec)
    heads = config.model_config.get_total_num_kv_heads()
    held, _ = tensor_parallel_heads(heads, config.parallel_config.tensor_parallel_size, 0)
    if spec.num_kv_heads != len(held):
        raise LayoutError(f"{description}, with different KV heads", reason="hybrid")
    if page_tokens % spec.block_size and spec.block_size % page_tokens:
        raise LayoutError(
            f"{description}: blocks of {spec.block_size} tokens do not fit pages of {page_tokens} tokens",
            reason="layout",
        )
    geometry = PageGeometry(
        page_tokens=page_tokens,
        heads=heads,
        layers=len(names),
        dim=spec.head_size,
        dtype=dtype,
        # No test has compared the pages with SGLang's pages.
        engine="vllm",
        group=numbers,
        window=spec.sliding_window if type(spec) is SlidingWindowSpec else 0,
        quantised=quantised,
    )
    return PageKind(geometry, spec.block_size, names)


def combined_page_size(kinds: Sequence[PageKind]) -> PageSize:
    """Return the size of a page with all layers of the model, which is the sum of one page of each kind."""
    if len(kinds) == 1:
        return kinds[0].geometry
    return CombinedPageSize(kinds[0].geometry.page_tokens, sum(kind.geometry.page_bytes for kind in kinds))
