"""vLLM as GPUs run it (runner V2, their KV layout, one process, asynchronous scheduling), and its next one.

The answers of stock vLLM on V1 are the measure for each bed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from integration.stack import ASKS, Stack, count, services, settle_saves

from devkit import vllm_beds
from devkit.engines import Answer
from devkit.processes import at_once

ASKED = (0, 1, 2, 4, 7)
"""Text alone, one image twice, two images, a prompt of several chunks."""
PAGE = 64
ALL = ("v2", "v2-gpu", "next-v1", "next-v2-gpu")


@pytest.fixture(
    scope="module",
    params=ALL,
)
def bed(
    request: pytest.FixtureRequest,
    models: Mapping[str, Path],
    stock: dict[tuple[str, int], Answer],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stack]:
    """Two engines of model a on one bed: the first was asked everything, the second nothing."""
    name = request.param.removeprefix("next-")
    vllm = vllm_beds.next_vllm() if request.param.startswith("next-") else None
    with services(tmp_path_factory.mktemp(request.param), {"a": models["a"]}, stock) as stack:
        engines = {app: stack.vllm(app, "a", bed=name, command=vllm) for app in ("first", "second")}
        at_once(stack.encoder.start, lambda: stack.start(**engines))
        for i in ASKED:
            stack.same_as_stock("a", i, ASKS[i].put(stack.servers["first"]))
        assert stack.tower_passes() == len({image for i in ASKED for image in ASKS[i].images})
        assert stack.store is not None
        settle_saves(stack.servers["first"], stack.store)
        yield stack


@pytest.mark.support("Sharing", "a fresh engine takes pages and embeddings from the store")
def test_vllm_beds_fresh_engine_answers_as_stock_from_the_store(bed: Stack) -> None:
    second, passes = bed.servers["second"], bed.tower_passes()
    shareable = 0
    for i in ASKED:
        answer = ASKS[i].put(second)
        bed.same_as_stock("a", i, answer)
        shareable += (answer.prompt_tokens - 1) // PAGE * PAGE
    assert bed.tower_passes() == passes
    taken = count(second, "saved_tokens_total", app="second") + second.metric("vllm:prefix_cache_hits_total")
    assert taken >= 0.9 * shareable
