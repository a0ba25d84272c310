"""`engine.save = "second"` on real engines: second uses are stored, and first ones by an idle engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from integration.stack import PREAMBLE, Ask, Stack, count, forget_prefixes, services, wait_for_saves

from devkit import checkpoints
from devkit.engines import EngineServer, wait_until
from devkit.processes import cpu_s
from devkit.sglang_engine import SglangServer

SECOND = ("--cornplug-save", "second")


@pytest.fixture(scope="module")
def thrifty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A store, two vLLMs and an SGLang of one text model that save on second sight."""
    folder = tmp_path_factory.mktemp("thrifty")
    models = {"t": checkpoints.qwen2_text(folder / "t")}
    with services(folder, models, {}) as stack:
        names = ("v", "w")
        engines: dict[str, EngineServer] = {name: stack.vllm(name, "t", *SECOND) for name in names}
        stack.start(**engines, s=stack.sglang("s", "t", *SECOND))
        yield stack


def entries(stack: Stack) -> int:
    """In the store, once no engine writes what an earlier test has left to it."""
    assert stack.store is not None
    stack.store.settle()
    return stack.stat().entries


def stored(stack: Stack, engine: EngineServer, pages: int) -> None:
    """Wait until the store has so many pages, which the engine saves while it idles."""
    wait_for_saves(engine, lambda: stack.stat().entries >= pages, what=f"{pages} pages in the store")


def shareable(prompt_tokens: int) -> int:
    """Tokens of a prompt in whole pages that another engine can take."""
    return (prompt_tokens - 1) // 64 * 64


@pytest.mark.support("Sharing", "an idle engine stores a prompt that it had once", engine="vllm sglang")
@pytest.mark.parametrize("name", ["v", "s"])
def test_engine_prompt_used_once_is_stored_while_idle(thrifty: Stack, name: str) -> None:
    engine, w = thrifty.servers[name], thrifty.servers["w"]
    before = entries(thrifty)
    ask = Ask(f"Once to {name}, and then a pause. {PREAMBLE} {PREAMBLE}")
    first = ask.put(engine)
    prefix = shareable(first.prompt_tokens)
    stored(thrifty, engine, before + prefix // 64)
    forget_prefixes(w)
    taken = count(w, "saved_tokens_total", app="w")
    assert ask.put(w).token_ids == first.token_ids
    assert count(w, "saved_tokens_total", app="w") - taken >= 0.9 * prefix
    if name == "v":  # SGLang offers nothing before.
        assert count(engine, "saves_total", outcome="first_sight") >= prefix // 64


@pytest.mark.support("Sharing", "an engine that saves while it idles can be flushed at once", engine="sglang")
def test_engine_flush_after_the_last_answer_succeeds(thrifty: Stack) -> None:
    s = thrifty.servers["s"]
    assert isinstance(s, SglangServer)
    for i in range(5):
        before = thrifty.stat().entries
        asks = [Ask(f"Flush {i}.{j}. {PREAMBLE}") for j in range(8)]
        first = [ask.put(s).token_ids for ask in asks]
        # In the middle of its copies, as often as not.
        wait_for_saves(s, lambda n=before: thrifty.stat().entries > n, what="a first page in the store")  # type: ignore[misc]
        s.flush_cache()
        assert asks[0].put(s).token_ids == first[0]


def share_of_a_core(engine: EngineServer) -> float:
    used, began = cpu_s(engine), time.monotonic()
    time.sleep(2)
    return (cpu_s(engine) - used) / (time.monotonic() - began)


@pytest.mark.support("Sharing", "an engine that has saved in idle steps sleeps, and its caches can be reset")
def test_engine_idle_saves_end(thrifty: Stack) -> None:
    v = thrifty.servers["v"]
    before = entries(thrifty)
    first = Ask(f"Then sleep. {PREAMBLE}").put(v)
    stored(thrifty, v, before + shareable(first.prompt_tokens) // 64)
    wait_until(lambda: share_of_a_core(v) < 0.1, deadline_s=10, what="an idle engine that sleeps")
    forget_prefixes(v)
    taken = count(v, "saved_tokens_total", app="v")
    assert Ask(f"Then sleep. {PREAMBLE}").put(v).token_ids == first.token_ids
    # Its own cache is empty, as no block was in use; else it would not load.
    assert count(v, "saved_tokens_total", app="v") - taken >= 0.9 * shareable(first.prompt_tokens)


@pytest.mark.support("Sharing", "a prompt that one engine has twice", engine="vllm sglang")
@pytest.mark.parametrize("name", ["v", "s"])
def test_engine_prefix_used_twice_reaches_another_engine(thrifty: Stack, name: str) -> None:
    engine, reader = thrifty.servers[name], thrifty.servers["w"]
    before = entries(thrifty)
    text = f"To {name}: {PREAMBLE}"
    first = Ask(f"{text} What is a cache?").put(engine)
    # Its pages are in the engine's own prefix cache, and of this prompt only the end is computed.
    Ask(f"{text} What is a page?").put(engine)
    prefix = shareable(first.prompt_tokens - 40)  # without its own end
    stored(thrifty, engine, before + prefix // 64)
    forget_prefixes(reader)
    taken = count(reader, "saved_tokens_total", app="w")
    Ask(f"{text} What is a key?").put(reader)
    assert count(reader, "saved_tokens_total", app="w") - taken >= 0.9 * prefix


@pytest.mark.support("Sharing", "a prompt that two engines have once each")
def test_engine_prefix_of_two_engines_is_stored(thrifty: Stack) -> None:
    v, w = thrifty.servers["v"], thrifty.servers["w"]
    before = entries(thrifty)
    ask = Ask(f"Once here, once there. {PREAMBLE}")
    expected = ask.put(v)
    prefix = shareable(expected.prompt_tokens)
    assert ask.put(w).token_ids == expected.token_ids
    stored(thrifty, w, before + prefix // 64)
    forget_prefixes(v)
    taken = count(v, "saved_tokens_total", app="v")
    assert ask.put(v).token_ids == expected.token_ids
    assert count(v, "saved_tokens_total", app="v") - taken >= 0.9 * prefix
