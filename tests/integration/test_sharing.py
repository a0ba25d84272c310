"""Two apps on real vLLM engines: one tower pass per image, KV across engines, stock's output."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from integration.stack import ASKS, PREAMBLE, Ask, Stack, count, forget_prefixes, settle_saves

from devkit.engines import EngineServer, RequestFailed, data_url, photos, wait_until
from devkit.processes import at_once

IMAGES = {i for ask in ASKS for i in ask.images}


@pytest.fixture(scope="module")
def asked(stack: Stack) -> Stack:
    """Every ask has been put to a and then to b, and was answered as stock answers."""
    before = stack.tower_passes()
    for name in ("a", "b"):
        for i, ask in enumerate(ASKS):
            stack.same_as_stock(name, i, ask.put(stack.servers[name]))
    assert stack.tower_passes() - before == len(IMAGES)
    return stack


def forget(stack: Stack, engine: EngineServer) -> None:
    """Empty the engine's own prefix cache, once it has stored what it had once: it does so while it idles."""
    assert stack.store is not None
    settle_saves(engine, stack.store)
    forget_prefixes(engine)


@pytest.mark.support("Sharing", "one tower pass an image for two models")
def test_tower_image_of_both_apps_runs_once(asked: Stack) -> None:
    a, b = asked.servers["a"], asked.servers["b"]
    assert count(a, "saved_tower_passes_total", app="a") == len(IMAGES)
    assert count(a, "hits_total", app="a", kind="embedding", source="service_computed") == len(IMAGES)
    assert count(b, "hits_total", app="b", kind="embedding", source="service_cached") == len(IMAGES)
    assert count(b, "misses_total", app="b", kind="embedding") == 0


def test_kv_pages_of_two_models_are_not_shared(asked: Stack) -> None:
    b = asked.servers["b"]
    stored = count(b, "saves_total", app="b", kind="kv_page", outcome="stored")
    # b was asked exactly as a was; every page that it met in the store is its own.
    assert stored > 0
    assert count(b, "hits_total", app="b", kind="kv_page") < stored


@pytest.mark.support("Sharing", "pages return when the engine dropped its own prefix cache")
def test_kv_pages_return_after_prefix_cache_reset(asked: Stack) -> None:
    a = asked.servers["a"]
    shareable = (ASKS[7].put(a).prompt_tokens - 1) // 64 * 64

    def returned() -> bool:
        saved = count(a, "saved_tokens_total", app="a")
        forget(asked, a)
        asked.same_as_stock("a", 7, ASKS[7].put(a))
        return count(a, "saved_tokens_total", app="a") - saved >= 0.9 * shareable

    # In a busy moment the store answers after this engine's short deadline.
    wait_until(returned, deadline_s=60, what="pages from the store")


@pytest.mark.support("Sharing", "requests of different salts share nothing")
def test_store_salts_of_two_tenants_share_nothing(asked: Stack) -> None:
    a = asked.servers["a"]
    passes, saved = asked.tower_passes(), count(a, "saved_tokens_total", app="a")
    asked.same_as_stock("a", 3, ASKS[3].put(a, salt="tenant-1"))
    assert count(a, "saved_tokens_total", app="a") == saved
    assert asked.tower_passes() == passes + 1
    forget(asked, a)
    asked.same_as_stock("a", 3, ASKS[3].put(a, salt="tenant-2"))
    assert count(a, "saved_tokens_total", app="a") == saved

    def found() -> bool:
        forget(asked, a)
        asked.same_as_stock("a", 3, ASKS[3].put(a, salt="tenant-1"))
        return count(a, "saved_tokens_total", app="a") > saved

    wait_until(found, deadline_s=60, what="the first tenant's pages")


def test_request_client_uuid_does_not_name_the_image(asked: Stack) -> None:
    """Two images under one uuid: each gets its own answer."""
    a = asked.servers["a"]
    for image in (0, 1):
        url = data_url(photos()[image].data)
        part = {"type": "image_url", "image_url": {"url": url}, "uuid": "same-for-both"}
        message = {"role": "user", "content": [part, {"type": "text", "text": ASKS[6].words}]}
        plain = Ask(ASKS[6].words, (image,)).put(a)
        answer = a.chat([message], max_tokens=8)
        assert answer.token_ids == plain.token_ids
        assert answer.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


@pytest.mark.support("Sharing", "many requests at once")
def test_engines_many_requests_at_once_answer_as_stock(asked: Stack) -> None:
    jobs = [(name, i) for i in range(len(ASKS)) for name in ("a", "b")] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: ASKS[job[1]].put(asked.servers[job[0]]), jobs))
    for (name, i), answer in zip(jobs, answers, strict=True):
        asked.same_as_stock(name, i, answer)


def test_encoder_image_asked_by_two_engines_at_once_runs_once(asked: Stack) -> None:
    before = asked.tower_passes()
    ask = Ask("Which of you sees it first?", (9,))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: ask.put(asked.servers[name]), ["a", "b", "a", "b"]))
    assert asked.tower_passes() == before + 1


@pytest.fixture(scope="module")
def later(asked: Stack) -> Mapping[str, EngineServer]:
    """Engines started when the store is full: one of the Qwen2-VL, and `fresh` of model a, unlike the first
    in everything that must not matter: two ranks, other blocks, no prefix cache, so few blocks that it
    preempts, configured by the long JSON form."""
    extra = {
        "engine.app": "fresh",
        "engine.save": "always",  # also pages of requests that are preempted
        "store.socket": str(asked.store_socket),
        "encoder.socket": str(asked.encoder.socket),
    }
    kv = {
        "kv_connector": "CornplugConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }
    ec = {
        "ec_connector": "CornplugECConnector",
        "ec_role": "ec_both",
        "ec_connector_extra_config": extra,
    }
    # vLLM wants a NUMA node a rank unless it is told the cores.
    first, second = sorted(os.sched_getaffinity(0))[:2]
    fresh = asked.vllm(
        "fresh",
        "a",
        *("--kv-transfer-config", json.dumps(kv), "--ec-transfer-config", json.dumps(ec)),
        *("--tensor-parallel-size", "2", "--no-enable-prefix-caching"),
        *("--block-size", "64", "--num-gpu-blocks-override", "40"),
        flags=False,
        env={"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"},
    )
    asked.start(fresh=fresh, q=asked.vllm("q", "q"))
    return asked.servers


@pytest.mark.support("Sharing", "a fresh engine takes pages and embeddings from the store")
def test_vllm_fresh_engine_reuses_entries_of_the_first(
    asked: Stack, later: Mapping[str, EngineServer]
) -> None:
    passes, fresh = asked.tower_passes(), later["fresh"]
    shareable = 0
    for i, ask in enumerate(ASKS):
        answer = ask.put(fresh)
        asked.same_as_stock("a", i, answer)
        shareable += (answer.prompt_tokens - 1) // 64 * 64
    assert count(fresh, "saved_tokens_total", app="fresh") >= 0.9 * shareable
    assert asked.tower_passes() == passes
    assert count(fresh, "hits_total", app="fresh", kind="embedding", source="store") > 0
    assert count(fresh, "misses_total", app="fresh", kind="embedding") == 0


@pytest.mark.support("Sharing", "preempted requests")
def test_vllm_preempted_requests_answer_as_the_first(asked: Stack, later: Mapping[str, EngineServer]) -> None:
    fresh = later["fresh"]
    before = fresh.metric("vllm:num_preemptions_total")
    # All fit when they are admitted (40 blocks of 64 tokens), and not when they have grown. On a busy machine
    # they come one after the other, and some end before the last has grown: longer answers meet.
    for attempt, tokens in enumerate((256, 512, 1024)):
        words = [f"{PREAMBLE} Number {i}, try {attempt}." for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            long = list(pool.map(partial(fresh.chat, max_tokens=tokens), words))
        if fresh.metric("vllm:num_preemptions_total") > before:
            break
    assert fresh.metric("vllm:num_preemptions_total") > before
    a = asked.servers["a"]
    for w, answer in zip(words, long, strict=True):
        expected = a.chat(w, max_tokens=tokens)
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


@pytest.mark.support("Sharing", "Qwen2-VL: pages and embeddings")
def test_vllm_qwen2_vl_answers_as_stock(asked: Stack, later: Mapping[str, EngineServer]) -> None:
    passes, q = asked.tower_passes(), later["q"]
    for i, ask in enumerate(ASKS):
        asked.same_as_stock("q", i, ask.put(q))
    assert asked.tower_passes() - passes == len(IMAGES)
    assert count(q, "saved_tower_passes_total", app="q") == len(IMAGES)
    assert count(q, "misses_total", app="q", kind="embedding") == 0
    forget(asked, q)
    asked.same_as_stock("q", 7, ASKS[7].put(q))
    assert count(q, "saved_tokens_total", app="q") > 0


def test_store_after_all_requests_has_no_reservation_or_lease(
    asked: Stack, later: Mapping[str, EngineServer]
) -> None:
    for name in ("fresh", "q"):
        later[name].stop()
    for name in ("a", "b"):
        count(asked.servers[name], "hits_total")

    def idle() -> bool:
        stat = asked.stat()
        return stat.reservations == 0 and stat.leases == 0

    wait_until(idle, deadline_s=60, what="no lease and no reservation")
    assert {"a", "b", "fresh", "q"} <= set(asked.stat().bytes_by_app)


def test_vllm_text_asked_twice_is_answered_alike(asked: Stack) -> None:
    one, two = (asked.servers["a"].chat("what is a cache", max_tokens=8) for _ in range(2))
    assert one.token_ids == two.token_ids
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
    assert len(one.token_ids) == len(one.logprobs) == 8
    assert one.finish_reason == "length"
    assert 0 < one.ttft_s <= one.total_s


def test_vllm_other_image_changes_the_answer(asked: Stack) -> None:
    images = [photo.data for photo in photos()[:2]]
    one, two = (asked.servers["a"].chat("what is this", images=[data], max_tokens=8) for data in images)
    assert one.prompt_tokens == two.prompt_tokens
    assert one.token_ids != two.token_ids


def test_metric_prompt_tokens_counts_the_prompt(asked: Stack) -> None:
    a = asked.servers["a"]
    before = a.metric("vllm:prompt_tokens_total", model_name="model")
    answer = a.chat("count these words", max_tokens=1)
    assert a.metric("vllm:prompt_tokens_total", model_name="model") - before == answer.prompt_tokens
    assert a.metric("vllm:no_such_metric") == 0


def test_vllm_unreadable_image_is_400(asked: Stack) -> None:
    with pytest.raises(RequestFailed) as error:
        asked.servers["a"].chat("what is this", images=[b"no image"])
    assert error.value.status == 400


def test_flags_wrong_value_stops_before_the_engine_starts(asked: Stack) -> None:
    lines = {
        "invalid choice: 'nonsense'": ("--kv-connector", "nonsense"),
        "engine.page_tokens": ("--kv-connector", "cornplug", "--cornplug-page-tokens", "50"),
    }

    def run(args: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        command = [asked.servers["a"].argv[0], "serve", str(asked.models["a"]), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    for message, done in zip(lines, at_once(*(partial(run, args) for args in lines.values())), strict=True):
        assert done.returncode != 0
        assert message in done.stderr + done.stdout
