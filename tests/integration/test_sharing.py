"""Two apps on real vLLM engines: one tower pass an image, KV across engines, stock's output."""

from __future__ import annotations

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from integration.stack import ASKS, PREAMBLE, Ask, Stack, count, forget_prefixes

from devkit.engines import VllmServer, photos, wait_until

PICTURES = {i for ask in ASKS for i in ask.pictures}


@pytest.fixture(scope="module")
def asked(stack: Stack) -> Stack:
    """Every ask has been put to a and then to b, and was answered as stock answers."""
    before = stack.tower_passes()
    for name in ("a", "b"):
        for i, ask in enumerate(ASKS):
            stack.same_as_stock(name, i, ask.put(stack.servers[name]))
    assert stack.tower_passes() - before == len(PICTURES)
    return stack


def test_one_tower_pass_a_picture_for_both_apps(asked: Stack) -> None:
    a, b = asked.servers["a"], asked.servers["b"]
    assert count(a, "saved_tower_passes_total", app="a") == len(PICTURES)
    assert count(a, "hits_total", app="a", what="embedding", source="service_computed") == len(PICTURES)
    assert count(b, "hits_total", app="b", what="embedding", source="service_cached") == len(PICTURES)
    assert count(b, "misses_total", app="b", what="embedding") == 0


def test_two_models_never_share_pages(asked: Stack) -> None:
    b = asked.servers["b"]
    stored = count(b, "saves_total", app="b", what="kv_page", outcome="stored")
    # b asked exactly what a had asked; all that it met in the store is its own.
    assert stored > 0
    assert count(b, "hits_total", app="b", what="kv_page") < stored


def test_pages_return_after_the_engine_forgot(asked: Stack) -> None:
    a = asked.servers["a"]
    saved = count(a, "saved_tokens_total", app="a")
    forget_prefixes(a)
    answer = ASKS[7].put(a)
    asked.same_as_stock("a", 7, answer)
    shareable = (answer.prompt_tokens - 1) // 64 * 64
    assert count(a, "saved_tokens_total", app="a") - saved >= 0.9 * shareable


def test_salts_are_apart(asked: Stack) -> None:
    a = asked.servers["a"]
    passes, saved = asked.tower_passes(), count(a, "saved_tokens_total", app="a")
    asked.same_as_stock("a", 3, ASKS[3].put(a, salt="tenant-1"))
    assert count(a, "saved_tokens_total", app="a") == saved
    assert asked.tower_passes() == passes + 1
    forget_prefixes(a)
    asked.same_as_stock("a", 3, ASKS[3].put(a, salt="tenant-2"))
    assert count(a, "saved_tokens_total", app="a") == saved
    forget_prefixes(a)
    asked.same_as_stock("a", 3, ASKS[3].put(a, salt="tenant-1"))
    assert count(a, "saved_tokens_total", app="a") > saved


def test_a_client_uuid_names_nothing(asked: Stack) -> None:
    """Two images under one uuid: each gets its own answer."""
    a = asked.servers["a"]
    for picture in (0, 1):
        url = _data_url(photos()[picture].data)
        part = {"type": "image_url", "image_url": {"url": url}, "uuid": "same-for-both"}
        message = {"role": "user", "content": [part, {"type": "text", "text": ASKS[6].words}]}
        plain = Ask(ASKS[6].words, (picture,)).put(a)
        answer = a.chat([message], max_tokens=8)
        assert answer.token_ids == plain.token_ids
        assert answer.logprobs == pytest.approx(plain.logprobs, abs=1e-4)


def test_many_at_once(asked: Stack) -> None:
    jobs = [(name, i) for i in range(len(ASKS)) for name in ("a", "b")] * 2
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda job: ASKS[job[1]].put(asked.servers[job[0]]), jobs))
    for (name, i), answer in zip(jobs, answers, strict=True):
        asked.same_as_stock(name, i, answer)


def test_one_picture_asked_at_once_by_both_is_encoded_once(asked: Stack) -> None:
    before = asked.tower_passes()
    ask = Ask("Who sees it first?", (9,))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: ask.put(asked.servers[name]), ["a", "b", "a", "b"]))
    assert asked.tower_passes() == before + 1


@pytest.fixture(scope="module")
def fresh(asked: Stack) -> VllmServer:
    """A new engine of model a, unlike the first in all that must not matter: two ranks, other
    blocks, no prefix cache, so few blocks that it preempts, configured by the long JSON form."""
    extra = {
        "engine.app": "fresh",
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
    return asked.serve(
        "fresh",
        "a",
        *("--kv-transfer-config", json.dumps(kv), "--ec-transfer-config", json.dumps(ec)),
        *("--tensor-parallel-size", "2", "--no-enable-prefix-caching"),
        *("--block-size", "64", "--num-gpu-blocks-override", "40"),
        flags=False,
        env={"VLLM_CPU_OMP_THREADS_BIND": f"{first}|{second}"},
    )


def test_a_fresh_engine_reuses_what_the_first_computed(asked: Stack, fresh: VllmServer) -> None:
    passes = asked.tower_passes()
    shareable = 0
    for i, ask in enumerate(ASKS):
        answer = ask.put(fresh)
        asked.same_as_stock("a", i, answer)
        shareable += (answer.prompt_tokens - 1) // 64 * 64
    assert count(fresh, "saved_tokens_total", app="fresh") >= 0.9 * shareable
    assert asked.tower_passes() == passes
    assert count(fresh, "hits_total", app="fresh", what="embedding", source="store") > 0
    assert count(fresh, "misses_total", app="fresh", what="embedding") == 0


def test_preempted_requests_stay_right(asked: Stack, fresh: VllmServer) -> None:
    before = fresh.metric("vllm:num_preemptions_total")
    # All fit when they are admitted (40 blocks of 64 tokens), and not when they have grown: unless
    # a busy machine lets them in one after the other, so there is a second and a third try.
    for attempt in range(3):
        words = [f"{PREAMBLE} Number {i}, try {attempt}." for i in range(6)]
        with ThreadPoolExecutor(6) as pool:
            long = list(pool.map(lambda w: fresh.chat(w, max_tokens=256), words))
        if fresh.metric("vllm:num_preemptions_total") > before:
            break
    assert fresh.metric("vllm:num_preemptions_total") > before
    a = asked.servers["a"]
    for w, answer in zip(words, long, strict=True):
        expected = a.chat(w, max_tokens=256)
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


def test_qwen2_vl(asked: Stack) -> None:
    asked.servers.pop("fresh").stop()
    passes = asked.tower_passes()
    q = asked.serve("q", "q")
    try:
        for i, ask in enumerate(ASKS):
            asked.same_as_stock("q", i, ask.put(q))
        assert asked.tower_passes() - passes == len(PICTURES)
        assert count(q, "saved_tower_passes_total", app="q") == len(PICTURES)
        assert count(q, "misses_total", app="q", what="embedding") == 0
        forget_prefixes(q)
        asked.same_as_stock("q", 7, ASKS[7].put(q))
        assert count(q, "saved_tokens_total", app="q") > 0
    finally:
        asked.servers.pop("q").stop()


def test_nothing_is_left_reserved_or_leased(asked: Stack) -> None:
    for name in ("a", "b"):
        count(asked.servers[name], "hits_total")

    def idle() -> bool:
        stat = asked.stat()
        return stat.reservations == 0 and stat.leases == 0

    wait_until(idle, deadline_s=15, what="no lease and no reservation")
    assert {"a", "b", "fresh", "q"} <= set(asked.stat().bytes_by_app)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--kv-connector", "nonsense"), "invalid choice: 'nonsense'"),
        (("--kv-connector", "cornplug", "--cornplug-page-tokens", "50"), "engine.page_tokens"),
    ],
)
def test_a_wrong_flag_stops_before_anything_starts(asked: Stack, args: tuple[str, ...], message: str) -> None:
    command = [asked.servers["a"].argv[0], "serve", str(asked.models["a"]), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert message in done.stderr + done.stdout


def _data_url(image: bytes) -> str:
    import base64

    return f"data:image/jpeg;base64,{base64.b64encode(image).decode()}"
