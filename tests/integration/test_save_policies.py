"""`engine.save = "second"` on real engines: second uses are stored, and first ones by an idle engine."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from integration.stack import MACHINE_NOISE_S, PREAMBLE, Ask, Stack, count, forget_prefixes, services

from devkit import checkpoints
from devkit.engines import EngineServer, wait_until
from devkit.processes import cpu_s
from devkit.sglang_engine import SglangServer

SECOND = ("--cornplug-save", "second")
IDLE_S = 1.0


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


def stored(stack: Stack, pages: int) -> None:
    """Wait, as idle engines do, until the store has so many pages."""
    wait_until(
        lambda: stack.stat().entries >= pages,
        deadline_s=IDLE_S + MACHINE_NOISE_S,
        what=f"{pages} pages in the store",
    )


def shareable(prompt_tokens: int) -> int:
    """Tokens of a prompt in whole pages that another engine can take."""
    return (prompt_tokens - 1) // 64 * 64


@pytest.mark.support("Sharing", "an idle engine stores a prompt that it had once", engine="vllm sglang")
@pytest.mark.parametrize("name", ["v", "s"])
def test_engine_prompt_used_once_is_stored_while_idle(thrifty: Stack, name: str) -> None:
    engine, w = thrifty.servers[name], thrifty.servers["w"]
    before = thrifty.stat().entries
    ask = Ask(f"Once to {name}, and then a pause. {PREAMBLE} {PREAMBLE}")
    first = ask.put(engine)
    prefix = shareable(first.prompt_tokens)
    stored(thrifty, before + prefix // 64)
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
        wait_until(
            lambda before=before: thrifty.stat().entries > before,
            deadline_s=IDLE_S + MACHINE_NOISE_S,
            what="a first page in the store",
        )
        s.flush_cache()
        assert asks[0].put(s).token_ids == first[0]


@pytest.mark.support("Sharing", "an engine that has saved in idle steps sleeps, and its caches can be reset")
def test_engine_idle_saves_end(thrifty: Stack) -> None:
    v = thrifty.servers["v"]
    before = thrifty.stat().entries
    first = Ask(f"Then sleep. {PREAMBLE}").put(v)
    stored(thrifty, before + shareable(first.prompt_tokens) // 64)
    time.sleep(IDLE_S + 0.5)
    used, began = cpu_s(v), time.monotonic()
    time.sleep(2)
    share = (cpu_s(v) - used) / (time.monotonic() - began)
    assert share < 0.1, f"an idle engine takes {share:.0%} of a core"
    forget_prefixes(v)
    taken = count(v, "saved_tokens_total", app="v")
    assert Ask(f"Then sleep. {PREAMBLE}").put(v).token_ids == first.token_ids
    # Its own cache is empty, as no block was in use; else it would not load.
    assert count(v, "saved_tokens_total", app="v") - taken >= 0.9 * shareable(first.prompt_tokens)


@pytest.mark.support("Sharing", "a prompt that one engine has twice", engine="vllm sglang")
@pytest.mark.parametrize("name", ["v", "s"])
def test_engine_prefix_used_twice_reaches_another_engine(thrifty: Stack, name: str) -> None:
    engine, reader = thrifty.servers[name], thrifty.servers["w"]
    before = thrifty.stat().entries
    text = f"To {name}: {PREAMBLE}"
    first = Ask(f"{text} What is a cache?").put(engine)
    # Its pages are in the engine's own prefix cache, and of this prompt only the end is computed.
    Ask(f"{text} What is a page?").put(engine)
    prefix = shareable(first.prompt_tokens - 40)  # without its own end
    stored(thrifty, before + prefix // 64)
    forget_prefixes(reader)
    taken = count(reader, "saved_tokens_total", app="w")
    Ask(f"{text} What is a key?").put(reader)
    assert count(reader, "saved_tokens_total", app="w") - taken >= 0.9 * prefix


@pytest.mark.support("Sharing", "a prompt that two engines have once each")
def test_engine_prefix_of_two_engines_is_stored(thrifty: Stack) -> None:
    v, w = thrifty.servers["v"], thrifty.servers["w"]
    before = thrifty.stat().entries
    ask = Ask(f"Once here, once there. {PREAMBLE}")
    expected = ask.put(v)
    prefix = shareable(expected.prompt_tokens)
    assert ask.put(w).token_ids == expected.token_ids
    stored(thrifty, before + prefix // 64)
    forget_prefixes(v)
    taken = count(v, "saved_tokens_total", app="v")
    assert ask.put(v).token_ids == expected.token_ids
    assert count(v, "saved_tokens_total", app="v") - taken >= 0.9 * prefix
