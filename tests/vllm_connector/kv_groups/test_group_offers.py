"""Where a hit ends beside windows: compared with a search that tries every end."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from cornplug.vllm_connector.kv_groups.group_offers import GroupOffers

SIZE, BLOCK = 32, 16


def kind(window: int) -> Any:
    def needed_from(end: int) -> int:
        return max(0, end - window + 1) // BLOCK * BLOCK if window else 0

    return SimpleNamespace(window=window, needed_from=needed_from)


@pytest.mark.parametrize("seed", range(200))
def test_group_offers_end_is_the_longest_with_all_windows(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [kind(window) for window in (chance.randint(2, 200), 0, chance.randint(2, 200))]
    pages, computed = chance.randint(0, 40), BLOCK * chance.randint(0, 20)
    stored = {
        (i, page) for i in range(3) for page in range(pages) if chance.random() < chance.choice([0.5, 1])
    }
    keys = [SimpleNamespace(of=lambda _, wanted, i=i: [(i, page) for page in wanted]) for i in range(3)]
    offers: Any = object.__new__(GroupOffers)
    offers._kinds, offers._page = kinds, SimpleNamespace(page_tokens=SIZE)
    offers._run = SimpleNamespace(
        config=SimpleNamespace(store=SimpleNamespace(deadline_s=1)),
        store=SimpleNamespace(contains=lambda keys, deadline_s: bytes(key in stored for key in keys)),
    )

    def whole(end: int) -> bool:
        needed = (
            (i, max(computed, k.needed_from(end * SIZE)) // SIZE) for i, k in enumerate(kinds) if k.window
        )
        return all((i, page) in stored for i, first in needed for page in range(first, end))

    longest = max((end for end in range(pages + 1) if end * SIZE > computed and whole(end)), default=0)
    assert offers._end_with_windows(computed, pages, keys, []) == longest
