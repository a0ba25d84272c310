"""A rank's place among the ranks that hold a model's KV: its pipeline stage, and its part of the heads.

tensor parallelism      a rank holds some heads of all layers      all ranks write a page together
pipeline parallelism    a stage holds some layers of all heads     all stages write a page together
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cornplug.errors import LayoutError

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig


class RankPlace(NamedTuple):
    """Place of one rank."""

    tp_rank: int
    tp_size: int
    stage: int
    layers_of_stages: tuple[range, ...]

    @property
    def layers(self) -> range:
        """Layers that this rank holds."""
        return self.layers_of_stages[self.stage]

    @property
    def ranks(self) -> int:
        """Number of ranks that compute a request together."""
        return self.tp_size * len(self.layers_of_stages)

    @property
    def first_layers(self) -> list[int]:
        """First layer of each stage."""
        return [layers.start for layers in self.layers_of_stages]


def rank_place(config: HiCacheStorageConfig, layers: int) -> RankPlace:
    """Place of this process's rank in a model with `layers` layers, from the storage's config.

    Raises LayoutError("parallelism") for ranks that cannot share KV.
    """
    if why := _excluded(config):
        raise LayoutError(why, reason="parallelism")
    return RankPlace(config.tp_rank, config.tp_size, config.pp_rank, layers_of_stages(layers, config.pp_size))


def layers_of_stages(layers: int, stages: int) -> tuple[range, ...]:
    """Layers of each pipeline stage of a model with `layers` layers, as SGLang divides them."""
    from sglang.srt.distributed.utils import get_pp_indices

    return tuple(range(*get_pp_indices(layers, stage, stages)) for stage in range(stages))


def require_stage(place: RankPlace, device_pool: Any) -> None:
    """Raise LayoutError("layout") unless SGLang's device pool begins with the first layer of the stage.

    `layout.page_geometry` checks the number of layers.
    """
    if device_pool.start_layer != place.layers.start:
        raise LayoutError(
            f"the KV pool of stage {place.stage} begins with layer {device_pool.start_layer}, expected "
            f"{place.layers.start}",
            reason="layout",
        )


def agreed(cache: Any, mine: bool) -> bool:
    """Return whether all ranks that compute this rank's requests agree, including all stages.

    Call it only at start, when all ranks call it. While SGLang handles requests, its stages are not in step,
    and it passes the first stage's decisions to later stages (`UnifiedRadixCache._all_reduce`).
    """
    vote = torch.tensor([mine], dtype=torch.int32)
    smallest = torch.distributed.ReduceOp.MIN
    cache._all_reduce_attn_groups(vote, smallest)
    if cache.pp_size > 1:
        torch.distributed.all_reduce(vote, op=smallest, group=cache.pp_group)
    return bool(vote.item())


def _excluded(config: HiCacheStorageConfig) -> str:
    """Kind of parallelism that excludes sharing, or ""."""
    from sglang.srt.layers.dp_attention import is_dp_attention_enabled

    for name, size in (("context", config.attn_cp_size), ("decode context", config.dcp_size)):
        if size > 1:
            return f"{name} parallelism with {size} ranks"
    if is_dp_attention_enabled():
        return "data parallel attention"
    ranks = config.tp_size * config.pp_size
    if ranks > 1 and torch.distributed.get_world_size() != ranks:
        return f"{torch.distributed.get_world_size()} ranks, but only {ranks} compute this rank's requests"
    return ""
