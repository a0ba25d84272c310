"""Where a hit ends beside windows: compared with a search that tries every end."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from cornplug.metrics import Tally
from cornplug.vllm_connector.kv.cache_groups import GroupOffers

from ..rig import runtime

SIZE, BLOCK = 32, 16


def kind(window: int) -> Any:
    def first_needed_token(end: int) -> int:
        return max(0, end - window + 1) // BLOCK * BLOCK if window else 0

    return SimpleNamespace(
        needs_all_pages=not window,
        first_needed_token=first_needed_token,
        geometry=SimpleNamespace(page_tokens=SIZE),
    )


def offers_over(kinds: list[Any], contains: Callable[..., bytes]) -> Any:
    """Offers of a store that only answers lookups."""
    store, unused = SimpleNamespace(contains=contains, has_disk=False, is_far_up=False), SimpleNamespace()
    run = runtime(store, deadline_s=1)  # type: ignore[arg-type]
    return GroupOffers(run, kinds, [], Tally(), unused, unused)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(200))
def test_group_offers_end_is_the_longest_with_all_windows(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [kind(window) for window in (chance.randint(2, 200), 0, chance.randint(2, 200))]
    pages, computed = chance.randint(0, 40), BLOCK * chance.randint(0, 20)
    stored = {
        (i, page) for i in range(3) for page in range(pages) if chance.random() < chance.choice([0.5, 1])
    }
    keys = [SimpleNamespace(keys_for=lambda _, wanted, i=i: [(i, page) for page in wanted]) for i in range(3)]
    asked: list[Any] = []

    def contains(keys: list[Any], deadline_s: float) -> bytes:
        asked.extend(keys)
        return bytes(key in stored for key in keys)

    offers = offers_over(kinds, contains)

    def whole(end: int) -> bool:
        needed = (
            (i, max(computed, k.first_needed_token(end * SIZE)) // SIZE)
            for i, k in enumerate(kinds)
            if not k.needs_all_pages
        )
        return all((i, page) in stored for i, first in needed for page in range(first, end))

    longest = max((end for end in range(pages + 1) if end * SIZE > computed and whole(end)), default=0)
    tracked: Any = SimpleNamespace(recall=None, request=SimpleNamespace(all_token_ids=[]))
    assert offers._longest_hit(tracked, computed, pages, keys) == longest
    assert len(set(asked)) == len(asked)


@pytest.mark.parametrize("apart", [1, 10, 60, 1000])
def test_group_offers_questions_are_few_however_far_states_are_apart(apart: int) -> None:
    """Of 1000 pages, a state at the end of every so many."""
    questions: list[int] = []

    def contains(keys: list[int], deadline_s: float) -> bytes:
        questions.append(len(keys))
        return bytes(page % apart == 0 for page in keys)

    offers = offers_over([kind(0), kind(2)], contains)
    keys: Any = [SimpleNamespace(keys_for=lambda _, pages: pages)] * 2
    tracked: Any = SimpleNamespace(recall=None, request=SimpleNamespace(all_token_ids=[]))
    assert offers._longest_hit(tracked, 0, 1000, keys) == 999 // apart * apart + 1
    assert len(questions) <= 7 + apart / 60
