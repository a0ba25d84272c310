"""Draft model layers in a model with several cache groups.

vLLM loads a draft (an EAGLE head or a draft model) after its target and adds its layers to the groups by
their KV cache specs. For example, the layers of GPT-OSS's EAGLE-3 head are added to the group of full
attention if it has the same heads. Page keys of an engine with a draft contain the draft's identity, so pages
of such a group contain the draft's layers after the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.cache_geometry import steady_drafts
from cornplug.vllm_connector.model.cache_specs import layer_number

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_METHODS: Final = frozenset({"eagle3"})
"""vLLM's names of draft methods that are tested with several cache groups."""
DRAFT_PREFIX: Final = "draft_model"
"""Prefix of a draft's layer names, whose numbers restart. Numbers of an EAGLE head continue after the
target's."""


def draft_layers(config: VllmConfig, cache: KVCacheConfig) -> Mapping[str, int]:
    """Name -> number of each draft layer with KV, after the model's layers. Empty without a draft.

    Raises LayoutError with the reason why its KV is not shared.
    """
    speculative = steady_drafts(config)
    if speculative is None:
        return {}
    several = f"{len(cache.kv_cache_groups)} KV cache groups (a hybrid model)"
    if speculative.method not in _METHODS:
        raise LayoutError(
            f"{several} with --speculative-config method {speculative.method} (not tested; "
            f"{', '.join(sorted(_METHODS))} and ngram can be shared)",
            reason="speculative",
        )
    model, draft = config.model_config, speculative.draft_model_config
    heads = draft.get_total_num_kv_heads(), speculative.draft_parallel_config.tensor_parallel_size
    if heads != (model.get_total_num_kv_heads(), config.parallel_config.tensor_parallel_size):
        raise LayoutError(
            f"{several}, and the draft model has a different number of KV heads", reason="speculative"
        )
    if len({group.kv_cache_spec.block_size for group in cache.kv_cache_groups}) > 1:
        # vLLM does this to equalize layers with different head sizes.
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
            f"{several}, and the draft model has layers in {len(found)} of them", reason="speculative"
        )
    names = sorted(found[0], key=layer_number)
    if len(set(map(layer_number, names))) < len(names):
        raise LayoutError(
            f"{several}, and the draft model has two caches per layer: {names}", reason="speculative"
        )
    return {name: total + place for place, name in enumerate(names)}
