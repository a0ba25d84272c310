"""KV of a draft beside several cache groups: whose layers are whose, and each byte that is read."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.errors import LayoutError
from cornplug.store.memory import MemoryStore
from cornplug.vllm_connector.kv.page_kinds import page_kinds

from .draft_rig import DraftingCore, drafting
from .group_rig import prompts
from .test_groups_scheduler import PAGES, PROMPT, nothing_left
from .test_page_kinds import FULL, config, planned, windowed

Make = Callable[..., DraftingCore]


@pytest.fixture
def drafters(config: Any, store: MemoryStore) -> Any:
    made: list[DraftingCore] = []

    def make(**options: Any) -> DraftingCore:
        made.append(DraftingCore(config, options.pop("connect", store.connect), **options))
        return made[-1]

    yield make
    for core in made:
        core.close()


@pytest.mark.parametrize(
    ("writer", "reader"),
    [({}, {}), ({"tp": 2}, {"block_size": 32}), ({"window": 100}, {"window": 100, "block_size": 64})],
)
@pytest.mark.parametrize("where", [False, True], ids=["full", "windowed"])
def test_draft_layers_fresh_engine_loads_the_prompt(
    drafters: Make, store: MemoryStore, writer: dict[str, Any], reader: dict[str, Any], where: bool
) -> None:
    first = drafters(**writer, windowed=where)
    first.answer(PROMPT, max_tokens=40)
    first.settle()
    second = drafters(**reader, windowed=where)
    second.answer(PROMPT, max_tokens=40)
    second.settle()
    assert (second.loaded(), second.failed) == (PAGES * 32, 0)
    assert second.accepted > 0 < second.rejected
    nothing_left(store, first, second)


def test_draft_layers_pages_of_answers_are_loaded(drafters: Make, store: MemoryStore) -> None:
    """Blocks of rejected proposals are written twice: saved are those that the model has accepted."""
    first, second = drafters(), drafters()
    answered = first.answer(PROMPT, max_tokens=60)
    first.settle()
    second.answer([*answered.all_token_ids, 300], max_tokens=8)
    second.settle()
    assert second.loaded() > PAGES * 32
    nothing_left(store, first, second)


@pytest.mark.parametrize("seed", range(3))
def test_draft_layers_of_many_requests_have_the_right_kv(
    drafters: Make, store: MemoryStore, seed: int
) -> None:
    chance = random.Random(seed)
    engines = [
        drafters(blocks=64),
        drafters(blocks=64, windowed=False, tp=2),
        drafters(blocks=64, block_size=32),
    ]
    for prompt in prompts(seed, 20):
        engine = chance.choice(engines)
        engine.add(prompt, max_tokens=chance.randint(1, 60))
        for _ in range(chance.randint(0, 6)):
            engine.step()
            engine.drain()
    for engine in engines:
        engine.settle()
    assert sum(engine.loaded() for engine in engines) > 0
    nothing_left(store, *engines)


def speculating(layers: int = 4, **of_draft: Any) -> Any:
    ours = config(layers)
    ours.speculative_config = drafting(**{"heads": 2, **of_draft})
    return ours


def beside(draft: str, *, group: int) -> Any:
    cache = planned(windowed(), FULL)
    cache.kv_cache_groups[group].layer_names.append(draft)
    return cache


@pytest.mark.parametrize(
    "draft", ["model.layers.4.self_attn.attn", "draft_model.model.layers.0.self_attn.attn"]
)
@pytest.mark.parametrize("group", [0, 1])
def test_draft_layers_are_behind_those_of_the_model(draft: str, group: int) -> None:
    kinds = page_kinds(speculating(), beside(draft, group=group), 64)
    expected = [(0, 2), (1, 3)]
    expected[group] = (*expected[group], 4)
    assert [kind.geometry.group for kind in kinds] == expected
    assert kinds[group].layer_names[-1] == draft


def test_draft_layers_in_a_group_of_their_own_are_a_kind_of_page() -> None:
    cache = planned(windowed(), FULL, FULL)
    names = ["draft_model.model.layers.1.attn", "draft_model.model.layers.0.attn"]
    cache.kv_cache_groups[2].layer_names[:] = names
    cache.kv_cache_groups[0].layer_names[:] = ["model.layers.0.attn"]
    cache.kv_cache_groups[1].layer_names[:] = ["model.layers.1.attn"]
    kinds = page_kinds(speculating(2), cache, 64)
    assert [kind.geometry.group for kind in kinds] == [(0,), (1,), (2, 3)]
    assert kinds[2].layer_names == tuple(reversed(names))


def test_draft_layers_without_a_draft_are_none() -> None:
    """Tokens from n-grams, or a head without attention (Medusa), keep no KV."""
    ours = config()
    ours.speculative_config = SimpleNamespace(uses_draft_kv_cache=lambda: False)
    assert [kind.geometry.group for kind in page_kinds(ours, planned(windowed(), FULL), 64)] == [
        (0, 2),
        (1, 3),
    ]


DRAFT = "model.layers.4.self_attn.attn"


@pytest.mark.parametrize(
    ("ours", "cache", "why"),
    [
        (speculating(method="mtp"), beside(DRAFT, group=1), "method mtp"),
        (speculating(method="draft_model"), beside(DRAFT, group=1), "method draft_model"),
        (speculating(method="dflash"), beside(DRAFT, group=1), "method dflash"),
        (speculating(dynamic=True), beside(DRAFT, group=1), "depends on the load"),
        (speculating(heads=4), beside(DRAFT, group=1), "number of KV heads"),
        (speculating(tp=2), beside(DRAFT, group=1), "number of KV heads"),
        (speculating(), planned(windowed(), FULL), "in 0 groups"),
        (speculating(3), beside(DRAFT, group=0), "in 2 groups"),
        (speculating(), planned(windowed(block_size=32), FULL), "block sizes"),
    ],
)
def test_draft_layers_of_other_drafts_are_refused(ours: Any, cache: Any, why: str) -> None:
    with expect_error(LayoutError, reason="speculative", match=why):
        page_kinds(ours, cache, 64)


def test_draft_layers_with_two_caches_a_layer_are_refused() -> None:
    cache = beside(DRAFT, group=1)
    cache.kv_cache_groups[1].layer_names.append("model.layers.4.cross_attn.attn")
    with expect_error(LayoutError, reason="speculative", match="two caches"):
        page_kinds(speculating(), cache, 64)
