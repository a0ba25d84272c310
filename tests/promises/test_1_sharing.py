"""Two vLLM apps and one SGLang app: one tower pass per image, KV across engines, stock's output."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from integration.stack import ASKS, PREAMBLE, Ask, Stack, count, forget_prefixes
from promises.conftest import forget, shareable

IMAGES = {image for ask in ASKS for image in ask.images}
FROM_SGLANG = (Ask(f"Begin with the end. {PREAMBLE}"), Ask(f"{PREAMBLE} Who stands there?", (6,)))
STOCK_OF = {"a": "q", "b": "r", "s": "sglang:q"}


@pytest.fixture(scope="module")
def asked(apps: Stack) -> Stack:
    """Every ask has been put to a and then to b, and was answered as stock answers."""
    before = apps.tower_passes()
    for name in ("a", "b"):
        for i, ask in enumerate(ASKS):
            apps.same_as_stock(STOCK_OF[name], i, ask.put(apps.servers[name]))
    assert apps.tower_passes() - before == len(IMAGES)
    return apps


@pytest.mark.support("Sharing", "one tower pass an image for two models")
def test_image_of_two_apps_is_encoded_once(asked: Stack) -> None:
    a, b = asked.servers["a"], asked.servers["b"]
    assert count(a, "hits_total", app="a", kind="embedding", source="service_computed") == len(IMAGES)
    assert count(b, "hits_total", app="b", kind="embedding", source="service_cached") == len(IMAGES)
    assert count(b, "misses_total", app="b", kind="embedding") == 0


def test_kv_of_other_weights_is_not_used(asked: Stack) -> None:
    """b was asked exactly what a was asked, after a had stored its pages."""
    b = asked.servers["b"]
    stored = count(b, "saves_total", app="b", kind="kv_page", outcome="stored")
    assert stored > 0
    assert count(b, "hits_total", app="b", kind="kv_page") < stored


@pytest.mark.support("Both engines", "each continues the other's prefixes", engine="vllm sglang")
def test_sglang_continues_prefixes_of_vllm(asked: Stack) -> None:
    forget(asked, asked.servers["a"])
    s, passes = asked.servers["s"], asked.tower_passes()
    for i, ask in enumerate(ASKS):
        forget_prefixes(s)
        saved = count(s, "saved_tokens_total", app="s")
        answer = ask.put(s)
        asked.same_as_stock("sglang:q", i, answer)
        assert count(s, "saved_tokens_total", app="s") - saved >= 0.9 * shareable(answer)
    assert asked.tower_passes() == passes


@pytest.mark.support("Both engines", "each continues the other's prefixes", engine="vllm sglang")
def test_vllm_continues_prefixes_of_sglang(asked: Stack) -> None:
    a, s = asked.servers["a"], asked.servers["s"]
    for ask in FROM_SGLANG:
        ask.put(s)
    forget(asked, s)
    passes = asked.tower_passes()
    for ask in FROM_SGLANG:
        # Another namespace shares nothing, so this is the answer that vLLM computes alone.
        alone = ask.put(a, salt="computed-alone")
        saved = count(a, "saved_tokens_total", app="a")
        answer = ask.put(a)
        assert answer.token_ids == alone.token_ids
        assert answer.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert count(a, "saved_tokens_total", app="a") - saved >= 0.9 * shareable(answer)
    assert asked.tower_passes() == passes + len({image for ask in FROM_SGLANG for image in ask.images})


@pytest.mark.support("Both engines", "salts separate tenants", engine="vllm sglang")
def test_salts_separate_tenants(asked: Stack) -> None:
    a, s = asked.servers["a"], asked.servers["s"]
    passes, saved = asked.tower_passes(), count(a, "saved_tokens_total", app="a")
    asked.same_as_stock("q", 3, ASKS[3].put(a, salt="tenant-1"))
    forget(asked, a)
    asked.same_as_stock("q", 3, ASKS[3].put(a, salt="tenant-2"))
    assert count(a, "saved_tokens_total", app="a") == saved
    assert asked.tower_passes() == passes + 2
    # The same tenant is served by the other engine's pages, another tenant is not.
    saved = count(s, "saved_tokens_total", app="s")
    asked.same_as_stock("sglang:q", 3, ASKS[3].put(s, salt="tenant-3"))
    assert count(s, "saved_tokens_total", app="s") == saved
    answer = ASKS[3].put(s, salt="tenant-1")
    asked.same_as_stock("sglang:q", 3, answer)
    assert count(s, "saved_tokens_total", app="s") - saved >= 0.9 * shareable(answer)
    assert asked.tower_passes() == passes + 3


@pytest.mark.support("Sharing", "many requests at once")
def test_concurrent_requests_answer_as_stock(asked: Stack) -> None:
    passes = asked.tower_passes()
    new = Ask("Which of you sees it first?", (9,))
    jobs = [(name, i) for i in range(len(ASKS)) for name in STOCK_OF]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: new.put(asked.servers[name]), ["a", "s", "a", "s"]))
        answers = list(pool.map(lambda job: ASKS[job[1]].put(asked.servers[job[0]]), jobs))
    for (name, i), answer in zip(jobs, answers, strict=True):
        asked.same_as_stock(STOCK_OF[name], i, answer)
    assert asked.tower_passes() == passes + 1
