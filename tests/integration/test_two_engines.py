"""One store, one encoder service, vLLM and SGLang of one checkpoint: neither engine computes the
other's entries again, and each answers as stock."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile

import pytest
from integration.stack import PREAMBLE, Ask, Stack, count, forget_prefixes, settle_saves

from devkit.engines import Answer, EngineServer, VllmServer
from devkit.processes import at_once
from devkit.sglang_engine import SglangServer

V_ARGS = ("--block-size", "32", "--max-num-batched-tokens", "256")
S_ARGS = ("--chunked-prefill-size", "256")
"""Chunked prefill on both sides; SGLang's pages are of the plugin's choice."""

FROM_VLLM: Sequence[Ask] = (
    Ask(f"{PREAMBLE} Name a store of words."),
    Ask(f"{PREAMBLE} What is to be seen here?", (0,)),
    Ask(f"{PREAMBLE} And how many?", (0, 1)),
    Ask(f"Which is older? {PREAMBLE}", (2, 1)),
)
FROM_SGLANG: Sequence[Ask] = (
    Ask(f"Begin with the end. {PREAMBLE}"),
    Ask(f"{PREAMBLE} Who stands there?", (3,)),
    Ask(f"What do both have? {PREAMBLE}", (4, 3)),
    Ask(f"{PREAMBLE} And what is missing?", (4,)),
)


def shareable(answer: Answer) -> int:
    """Prompt tokens in whole pages that another engine can have left."""
    return (answer.prompt_tokens - 1) // 64 * 64


def committed(stack: Stack, server: EngineServer) -> None:
    """Wait until all that `server` saves is to be seen by others."""
    assert stack.store is not None
    settle_saves(server, stack.store)


@pytest.fixture(scope="module")
def both(stack: Stack) -> Stack:
    """The stack with engines v (vLLM) and s (SGLang) of the Qwen2-VL, and no other; store and
    encoder begin anew, for other tests have asked about the same images."""
    for server in stack.servers.values():
        server.stop()
    stack.encoder.stop()
    if stack.store is not None:
        stack.store.stop()
    stack.start_store()
    engines = {"v": stack.vllm("v", "q", *V_ARGS), "s": stack.sglang("s", "q", *S_ARGS)}
    at_once(stack.encoder.start, lambda: stack.start(**engines))
    return stack


@pytest.fixture(scope="module")
def cold(both: Stack) -> Mapping[tuple[str, Ask], Answer]:
    """Answers of stock engines to the asks of this file."""
    asks = {*FROM_VLLM, *FROM_SGLANG}

    def answered(name: str, server: EngineServer) -> dict[tuple[str, Ask], Answer]:
        with server:
            return {(name, ask): ask.put(server) for ask in asks}

    v = VllmServer(both.models["q"], *V_ARGS, log=both.folder / "cold-v.log")
    s = SglangServer(both.models["q"], *S_ARGS, log=both.folder / "cold-s.log")
    of_v, of_s = at_once(lambda: answered("v", v), lambda: answered("s", s))
    return of_v | of_s


def same(expected: Answer, answer: Answer) -> None:
    assert answer.token_ids == expected.token_ids
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


@pytest.mark.support("Both engines", "each continues the other's prefixes", engine="vllm sglang")
@pytest.mark.parametrize(("first", "then", "asks"), [("v", "s", FROM_VLLM), ("s", "v", FROM_SGLANG)])
def test_engine_prefix_of_the_other_engine_is_continued(
    both: Stack, cold: Mapping[tuple[str, Ask], Answer], first: str, then: str, asks: Sequence[Ask]
) -> None:
    passes = both.tower_passes()
    for ask in asks:
        same(cold[first, ask], ask.put(both.servers[first]))
    images = {image for ask in asks for image in ask.images}
    assert both.tower_passes() == passes + len(images)
    committed(both, both.servers[first])
    reader = both.servers[then]
    for ask in asks:
        # One question at a time, and none about what this engine itself has just computed.
        forget_prefixes(reader)
        saved = count(reader, "saved_tokens_total", app=then)
        answer = ask.put(reader)
        same(cold[then, ask], answer)
        assert count(reader, "saved_tokens_total", app=then) - saved >= 0.9 * shareable(answer)
    assert both.tower_passes() == passes + len(images)


@pytest.mark.support("Both engines", "salts separate tenants", engine="vllm sglang")
def test_engines_salts_separate_tenants_alike(both: Stack) -> None:
    v, s = both.servers["v"], both.servers["s"]
    ask = Ask(f"{PREAMBLE} Whose is this?", (5,))
    ask.put(v, salt="tenant-1")
    committed(both, v)
    saved, passes = count(s, "saved_tokens_total", app="s"), both.tower_passes()
    ask.put(s, salt="tenant-2")
    ask.put(s)
    assert count(s, "saved_tokens_total", app="s") == saved
    assert both.tower_passes() == passes + 2
    answer = ask.put(s, salt="tenant-1")
    assert count(s, "saved_tokens_total", app="s") - saved >= 0.9 * shareable(answer)
    assert both.tower_passes() == passes + 2


@pytest.mark.support("Both engines", "one tower pass an image", engine="vllm sglang")
def test_encoder_image_asked_by_both_engines_at_once_runs_once(both: Stack) -> None:
    passes = both.tower_passes()
    ask = Ask("Which of us sees it first?", (9,))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: ask.put(both.servers[name]), ["v", "s", "v", "s"]))
    assert both.tower_passes() == passes + 1


@pytest.fixture(scope="module")
def fresh(both: Stack, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, EngineServer]:
    """SGLangs started later: `ranks` is unlike s in everything that must not matter, `rope` has another
    rotation base in its configuration, and the same weights."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    args = ("--page-size", "16", "--tp-size", "2", "--hicache-mem-layout", "layer_first")
    env = {"SGLANG_CPU_OMP_THREADS_BIND": f"{first}|{second}"}
    copy = tmp_path_factory.mktemp("rope") / "q"
    shutil.copytree(both.models["q"], copy)
    config = json.loads((copy / "config.json").read_text())
    assert config["rope_theta"] == 1e6
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 2e4}))
    both.start(ranks=both.sglang("ranks", "q", *args, env=env), rope=both.sglang("rope", copy))
    return both.servers


@pytest.mark.sglang_alone
@pytest.mark.support("Both engines", "two ranks and other page sizes", engine="sglang")
def test_sglang_small_pages_and_two_ranks_read_pages_of_both(
    both: Stack, cold: Mapping[tuple[str, Ask], Answer], fresh: Mapping[str, EngineServer]
) -> None:
    passes, server = both.tower_passes(), fresh["ranks"]
    for ask in (*FROM_VLLM, *FROM_SGLANG):
        forget_prefixes(server)
        saved = count(server, "saved_tokens_total", app="ranks")
        answer = ask.put(server)
        same(cold["s", ask], answer)
        assert count(server, "saved_tokens_total", app="ranks") - saved >= 0.9 * shareable(answer)
    assert both.tower_passes() == passes


@pytest.mark.sglang_alone
def test_sglang_another_rope_shares_embeddings_and_no_page(
    both: Stack, fresh: Mapping[str, EngineServer]
) -> None:
    """Same weights, same words, same image."""
    passes, server = both.tower_passes(), fresh["rope"]
    for ask in FROM_VLLM:
        ask.put(server)
    assert count(server, "saved_tokens_total", app="rope") == 0
    assert both.tower_passes() == passes


# -- bfloat16 -----------------------------------------------------------------------------------

BF16 = ("--dtype", "bfloat16")


@pytest.fixture(scope="module")
def halves(both: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Engines v16 and s16 of the same checkpoint in bfloat16, without an encoder service: each
    publishes its tower's output."""
    for server in both.servers.values():
        server.stop()
    both.encoder.stop()
    both.start(
        v16=both.vllm("v16", "q", *V_ARGS, *BF16),
        s16=both.sglang("s16", "q", *S_ARGS, *BF16),
    )
    yield both
    both.encoder.start()


def drift(one: Answer, other: Answer) -> float:
    """The largest difference of log-probabilities while both say the same."""
    steps = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
    agreed = takewhile(lambda step: step[0] == step[1], steps)
    return max((abs(a - b) for _, _, a, b in agreed), default=0.0)


@pytest.mark.support("Both engines", "bfloat16", engine="vllm sglang")
@pytest.mark.parametrize(("first", "then"), [("v16", "s16"), ("s16", "v16")])
def test_engines_in_bfloat16_drift_no_more_than_the_format(
    halves: Stack, cold: Mapping[tuple[str, Ask], Answer], first: str, then: str
) -> None:
    """On a CPU both engines repeat themselves exactly under any load, so run-to-run spread is no yardstick.
    The drift of each engine's bfloat16 from its own float32 is one: the sum of both bounds the drift of an
    engine that continues from the other's KV."""
    asks = FROM_VLLM if first == "v16" else FROM_SGLANG
    writer, reader = halves.servers[first], halves.servers[then]
    written, own, crossed = [], [], []
    for ask in asks:
        forget_prefixes(reader)
        alone = ask.put(reader, salt=f"alone-{then}")
        own.append(drift(cold[then.removesuffix("16"), ask], alone))
        written.append(drift(cold[first.removesuffix("16"), ask], ask.put(writer)))
        committed(halves, writer)
        saved = count(reader, "saved_tokens_total", app=then)
        answer = ask.put(reader)
        assert count(reader, "saved_tokens_total", app=then) - saved >= 0.9 * shareable(answer)
        crossed.append(drift(alone, answer))
    assert max(crossed) <= max(own) + max(written), (own, written, crossed)
