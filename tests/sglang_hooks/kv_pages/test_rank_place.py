"""A rank's place by SGLang's own settings of parallelism, and the vote of all ranks at start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt import runtime_context
from sglang.srt.layers import dp_attention

from cornplug.errors import LayoutError
from cornplug.sglang_hooks.kv_pages.layout import (
    all_ranks_agree,
    check_first_layer,
    layers_of_stages,
    rank_position,
)

from ..kv_rig import storage_config

MIN = torch.distributed.ReduceOp.MIN


def in_world(monkeypatch: pytest.MonkeyPatch, size: int, groups: int = 1) -> None:
    """A process of one world of so many ranks, in so many groups of attention DP."""
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *args, **more: size)
    monkeypatch.setattr(dp_attention, "is_dp_attention_enabled", lambda: groups > 1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(attn_dp_size=groups))


@pytest.mark.parametrize(("layers", "stages"), [(24, 2), (7, 2), (5, 4), (3, 1)])
def test_layers_of_stages_are_each_layer_once(layers: int, stages: int) -> None:
    found = layers_of_stages(layers, stages)
    assert [layer for stage in found for layer in stage] == list(range(layers))


def test_layers_of_stages_follow_sglangs_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "5,2")
    assert layers_of_stages(7, 2) == (range(5), range(5, 7))


@pytest.mark.parametrize(
    ("size", "groups", "more"),
    [
        (1, 1, {}),
        (2, 1, {"tp_size": 2, "tp_rank": 1}),
        (4, 1, {"tp_size": 2, "tp_rank": 1, "pp_size": 2, "pp_rank": 1}),
    ],
)
def test_rank_place_is_that_of_sglangs_storage(
    size: int, groups: int, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_world(monkeypatch, size, groups)
    place = rank_position(storage_config(**more), 7)
    assert (place.tp_rank, place.tp_size) == (more.get("tp_rank", 0), more.get("tp_size", 1))
    assert place.layers == (range(3, 7) if "pp_rank" in more else range(7))
    assert place.first_layers == ([0, 3] if "pp_size" in more else [0])


@pytest.mark.parametrize(
    ("size", "groups", "more", "why"),
    [
        (4, 1, {"tp_size": 2}, "4 ranks, but only 2"),
        (4, 2, {"tp_size": 2}, "data parallel attention"),
        (2, 1, {"attn_cp_size": 2}, "context parallelism"),
    ],
)
def test_rank_place_of_unknown_parallelism_is_refused(
    size: int, groups: int, more: dict[str, Any], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_world(monkeypatch, size, groups)
    with pytest.raises(LayoutError, match=why) as refused:
        rank_position(storage_config(**more), 7)
    assert refused.value.reason == "parallelism"


def test_require_stage_of_another_first_layer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    in_world(monkeypatch, 2)
    place = rank_position(storage_config(pp_size=2, pp_rank=1), 7)
    check_first_layer(place, SimpleNamespace(start_layer=3))
    with pytest.raises(LayoutError, match="layer 4, expected 3"):
        check_first_layer(place, SimpleNamespace(start_layer=4))


@pytest.mark.parametrize("mine", [True, False])
@pytest.mark.parametrize("of_heads", [True, False])
@pytest.mark.parametrize("of_stages", [True, False, None])
def test_agreed_only_if_all_ranks_of_all_stages_do(
    mine: bool, of_heads: bool, of_stages: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lower(tensor: torch.Tensor, op: Any, group: str = "") -> None:
        assert op == MIN
        tensor.fill_(min(int(tensor.item()), int(of_stages if group == "stages" else of_heads)))

    monkeypatch.setattr(torch.distributed, "all_reduce", lower)
    cache = SimpleNamespace(
        pp_size=1 if of_stages is None else 2, pp_group="stages", _all_reduce_attn_groups=lower
    )
    assert all_ranks_agree(cache, mine) is (mine and of_heads and of_stages is not False)
