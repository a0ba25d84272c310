"""Pages of MLA: every rank holds the whole latent, the first writes it, and no page of K and V meets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from cornplug.store.memory import MemoryStore

from ..conftest import open_in
from ..rig import DIM, LAYERS, Engine, LatentBackend

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens

Make = Callable[..., Engine]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ({}, {}),
        ({}, {"tp": 2}),
        ({"tp": 2}, {}),
        ({"tp": 8}, {"tp": 2, "pp": 2}),
        ({"pp": 2}, {"tp": 3}),
        ({"block_size": 64}, {"block_size": 16}),
        ({"block_size": 64, "kernel_block": 16}, {"tp": 2}),
        ({"accelerator": True, "tp": 2}, {"accelerator": True, "pp": 2}),
        ({"second_runner": True, "tp": 2}, {"second_runner": True, "accelerator": True}),
    ],
)
def test_latent_pages_load_across_ranks_and_block_sizes(
    engine: Make, store: MemoryStore, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    first, second = engine(latent=True, **writer), engine(latent=True, **reader)
    first.run("a", PROMPT)
    assert first.counts["saves", "kv_page", "stored"] == 4
    # One plane without heads, by one rank of each stage.
    assert first.counts["bytes", "kv_page", "save"] == 4 * LAYERS * 32 * DIM * 4
    assert second.run("b", PROMPT).external_tokens == 128
    assert open_in(store) == (0, 0)


@pytest.mark.parametrize("latent", [True, False])
def test_latent_pages_and_pages_of_heads_do_not_meet(engine: Make, latent: bool) -> None:
    engine(latent=latent).run("a", PROMPT)
    assert engine(latent=not latent).run("b", PROMPT).external_tokens == 0


class _Unmapped(LatentBackend):
    """Keeps no rotary part."""

    def do_kv_cache_update(self, compressed: Any, rotary: Any, cache: Any, *rest: Any) -> None:
        super().do_kv_cache_update(compressed, 0 * rotary, cache, *rest)


def test_latent_cache_that_cannot_be_mapped_is_not_shared(engine: Make) -> None:
    first = engine(latent=True, backends=[_Unmapped()])
    first.run("a", PROMPT)
    assert ("saves", "kv_page", "stored") not in first.counts
