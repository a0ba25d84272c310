"""Hashes of prompts: turns of a conversation share theirs, other prompts do not."""

from __future__ import annotations

from typing import Any

from cornplug.apps.engine_choice import STEP_BYTES, STEP_TOKENS, prompt_prefix

SYSTEM = {"role": "system", "content": "Answer with facts. " * 100}


def turns(*texts: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "m", "messages": [SYSTEM, *messages], **fields}


def shared(one: dict[str, Any], other: dict[str, Any]) -> int:
    pairs = zip(prompt_prefix(one).steps, prompt_prefix(other).steps, strict=False)
    return sum(a == b for a, b in pairs)


def test_prompt_prefix_next_turn_begins_with_the_last_one_s_steps() -> None:
    first, second = turns("Why? " * 300), turns("Why? " * 300, "Because. " * 100, "And then?")
    assert prompt_prefix(second).steps[: len(prompt_prefix(first).steps)] == prompt_prefix(first).steps
    assert prompt_prefix(first).conversation == prompt_prefix(second).conversation


def test_prompt_prefix_another_question_shares_the_system_prompt_only() -> None:
    one, other = turns("Why? " * 300), turns("How? " * 300)
    assert shared(one, other) == len(SYSTEM["content"]) // STEP_BYTES
    assert prompt_prefix(one).conversation != prompt_prefix(other).conversation


def test_prompt_prefix_other_model_salt_or_tools_share_nothing() -> None:
    for fields in ({"model": "n"}, {"cache_salt": "acme"}, {"tools": [{"type": "function"}]}):
        assert shared(turns("Why?"), turns("Why?") | fields) == 0


def test_prompt_prefix_sampling_fields_change_nothing() -> None:
    assert prompt_prefix(turns("Why?")) == prompt_prefix(turns("Why?", temperature=0.5, max_tokens=3))


def test_prompt_prefix_image_counts_as_some_hundred_tokens() -> None:
    def image(data: str) -> dict[str, Any]:
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return {"model": "m", "messages": [{"role": "user", "content": [part] * 2}]}

    long = prompt_prefix(image("A" * 100_000))
    assert 3 * STEP_TOKENS < long.tokens < 8 * STEP_TOKENS
    assert long.steps != prompt_prefix(image("A" * 99_999 + "B")).steps


def test_prompt_prefix_completion_s_prompt_is_hashed() -> None:
    one = prompt_prefix({"model": "m", "prompt": "x" * 4 * STEP_BYTES})
    assert len(one.steps) == 4
    assert 4 * STEP_TOKENS < one.tokens < 5 * STEP_TOKENS
    assert prompt_prefix({"model": "m", "prompt": [1, 2, 3]}).steps == ()
