"""vLLM 0.33 on runner V2 with a GPU's KV layout: a fresh engine takes pages and embeddings from the store.

Stock answers come from vLLM 0.32 on V1: a release and a runner must not change them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from integration.stack import ASKS, Stack, count, settle_saves
from promises.conftest import CALM, shareable

from devkit import vllm_beds
from devkit.processes import at_once

BED = "next-v2-gpu"
ASKED = (0, 1, 2, 4, 7)
"""Text alone, one image twice, two images, a prompt of several chunks."""


@pytest.fixture(scope="module", params=[BED])
def bed(stack: Stack, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Two engines of model q: the first was asked everything, the second nothing. The store begins empty."""
    assert stack.store is not None
    at_once(*(server.stop for server in stack.servers.values()), stack.encoder.stop, stack.store.stop)
    store = stack.start_store()
    vllm, name = vllm_beds.next_vllm(), request.param.removeprefix("next-")
    engines = {app: stack.vllm(app, "q", *CALM, bed=name, command=vllm) for app in ("first", "second")}
    at_once(stack.encoder.start, lambda: stack.start(**engines))
    for i in ASKED:
        stack.same_as_stock("q", i, ASKS[i].put(stack.servers["first"]))
    assert stack.tower_passes() == len({image for i in ASKED for image in ASKS[i].images})
    settle_saves(stack.servers["first"], store)
    yield stack
    at_once(*(stack.servers[app].stop for app in engines))


@pytest.mark.support("Sharing", "a fresh engine takes pages and embeddings from the store")
def test_fresh_engine_answers_from_the_store(bed: Stack) -> None:
    second, passes = bed.servers["second"], bed.tower_passes()
    pages = 0
    for i in ASKED:
        answer = ASKS[i].put(second)
        bed.same_as_stock("q", i, answer)
        pages += shareable(answer)
    assert bed.tower_passes() == passes
    taken = count(second, "saved_tokens_total", app="second") + second.metric("vllm:prefix_cache_hits_total")
    assert taken >= 0.9 * pages
