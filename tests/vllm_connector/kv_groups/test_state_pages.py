"""The page of a group of states, and each that gives none."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.page_kinds import STATE_FIELDS, combined_page_size, page_kinds

FULL = FullAttentionSpec(block_size=528, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)

WINDOW = SlidingWindowSpec(
    block_size=528, num_kv_heads=2, head_size=32, dtype=torch.bfloat16, sliding_window=99
)


def state(**changes: Any) -> MambaSpec:
    shapes = {"shapes": ((3, 8), (2, 4, 4)), "dtypes": (torch.bfloat16, torch.float32)}
    return MambaSpec(**{"block_size": 528, "mamba_cache_mode": "align", **shapes, **changes})


def planned(*groups: tuple[list[int], Any]) -> KVCacheConfig:
    names = [([f"model.layers.{i}.mixer" for i in layers], spec) for layers, spec in groups]
    plan = [KVCacheGroupSpec(layers, spec) for layers, spec in names]
    return KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=plan)


def config(tp: int = 1, match: int | None = None) -> Any:
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1,
            tensor_parallel_size=tp,
        ),
        model_config=SimpleNamespace(
            get_total_num_kv_heads=lambda: 2 * tp, get_total_num_hidden_layers=lambda: 6,
            hf_config=SimpleNamespace(),
        ),
        cache_config=SimpleNamespace(cache_dtype="auto", prefix_match_unit=match),
    )  # fmt: skip


QWEN3_NEXT = [([3], FULL), ([0, 1], state()), ([2, 4, 5], state())]


def test_state_pages_are_blocks_whatever_pages_other_models_have() -> None:
    kinds = page_kinds(config(), planned(*QWEN3_NEXT), 64)
    assert [kind.geometry.page_tokens for kind in kinds] == [528] * 3
    assert [kind.needs_all_pages for kind in kinds] == [True, False, False]
    page = kinds[2].geometry
    content = 3 * 8 * 2 + 2 * 4 * 4 * 4
    assert (page.shape, page.page_bytes, page.group) == ((1, 3, 1, 1, content), 3 * content, (2, 4, 5))
    assert combined_page_size(kinds).page_bytes == 528 * 2 * 2 * 32 * 2 + 5 * content


@pytest.mark.parametrize(("end", "first"), [(0, 0), (528, 0), (1056, 528), (5280, 4752)])
def test_state_page_needed_is_the_one_before_the_end(end: int, first: int) -> None:
    assert page_kinds(config(), planned(*QWEN3_NEXT), 64)[1].first_needed_token(end) == first


@pytest.mark.parametrize(
    "changes",
    [{"shapes": ((8, 3), (2, 4, 4))}, {"dtypes": (torch.bfloat16, torch.bfloat16)}],
    ids=["shapes", "dtypes"],
)
def test_state_pages_and_those_beside_them_name_shapes_and_dtypes(changes: dict[str, Any]) -> None:
    other = [([3], FULL), ([0, 1], state(**changes)), ([2, 4, 5], state(**changes))]
    plans = [page_kinds(config(), planned(*groups), 64) for groups in (QWEN3_NEXT, other)]
    for one, another in zip(*plans, strict=True):
        assert one.geometry.spec() != another.geometry.spec()


def test_state_pages_name_the_tp_degree() -> None:
    full = FullAttentionSpec(block_size=528, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    (_, one, _), (_, two, _) = (
        page_kinds(config(tp), planned(([3], full), *QWEN3_NEXT[1:]), 64) for tp in (1, 2)
    )
    assert two.geometry.heads == 2
    assert one.geometry.spec() != two.geometry.spec()


@pytest.mark.parametrize("layers", [[0, 1, 2], [0, 1, 3]], ids=["an MLP alone", "a state beside KV"])
def test_state_pages_of_layers_with_nothing_or_two_caches_are_pages(layers: list[int]) -> None:
    assert len(page_kinds(config(), planned(([3], FULL), (layers, state())), 64)) == 2


def test_state_pages_numbered_behind_the_layers_are_pages() -> None:
    """Falcon-H1: each layer has attention, and a state under a number that goes on from the last layer."""
    full, states = page_kinds(config(), planned(([0, 1, 2, 3, 4, 5], FULL), ([*range(6, 12)], state())), 64)
    assert (full.needs_all_pages, full.geometry.layers, states.geometry.group) == (
        True,
        6,
        (6, 7, 8, 9, 10, 11),
    )


@pytest.mark.parametrize("kind", list(MambaAttentionBackendEnum))
def test_state_pages_name_the_kind_of_state(kind: MambaAttentionBackendEnum) -> None:
    """Mamba 1 too, which vLLM's CPU build has no kernel for: the bytes of a block are all that counts."""
    plan = planned(([3], FULL), ([0, 1], state(mamba_type=kind)))
    full, states = page_kinds(config(), plan, 64)
    assert states.geometry.state.startswith(f"{kind.name} ")
    assert states.geometry.state in str(full.geometry.spec())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mamba_cache_mode": "none"}, "hybrid"),
        ({"mamba_cache_mode": "all"}, "hybrid"),
        ({"num_speculative_blocks": 2}, "speculative"),
        ({"block_size": 1056}, "layout"),
        ({"tp_replicated": True}, "hybrid"),
        ({"tokens_per_state": 2}, "hybrid"),
    ],
)
def test_state_pages_of_other_states_are_refused(changes: dict[str, Any], reason: str) -> None:
    groups = [([3], FULL), ([0, 1], state()), ([2], state(**changes))]
    with pytest.raises(LayoutError) as error:
        page_kinds(config(), planned(*groups), 64)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("ours", "groups", "reason"),
    [
        (config(match=16), QWEN3_NEXT, "hybrid"),
        (config(), QWEN3_NEXT[1:], "hybrid"),
        (config(), [([9], FULL), ([0], state())], "hybrid"),
        (config(), [([3], FULL), ([12], state())], "hybrid"),
        (config(), [([3], FULL), ([0, 1], state()), ([1], state())], "hybrid"),
        (config(), [([3], FULL), ([0], state(block_size=40))], "layout"),
        (config(), [*QWEN3_NEXT, ([5], WINDOW)], "hybrid"),
    ],
    ids=[
        "inside blocks",
        "no attention",
        "of a draft",
        "states of a draft",
        "two states in a layer",
        "part of a link",
        "windows",
    ],
)
def test_state_pages_of_other_plans_are_refused(ours: Any, groups: Any, reason: str) -> None:
    with pytest.raises(LayoutError) as error:
        page_kinds(ours, planned(*groups), 64)
    assert error.value.reason == reason


def test_state_pages_know_every_field_that_may_differ() -> None:
    assert set(STATE_FIELDS) <= {field.name for field in fields(MambaSpec)}
