"""The allow list of fields with which a stream may go on elsewhere."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from cornplug.apps.stream_continuation import CHAT, COMPLETIONS, may_continue

BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
GREEDY = {"temperature": 0, "max_tokens": 9, "stream_options": {"include_usage": True}, "n": 1, "top_p": 0.9}
MASKS = {"logit_bias": {"5": -100}, "allowed_token_ids": [5]}


@pytest.mark.parametrize("field", [{}, *({name: value} for name, value in (GREEDY | MASKS).items())])
def test_may_continue_harmless_field_is_allowed(field: dict[str, Any]) -> None:
    assert may_continue(CHAT, BODY | field)
    text = {"model": "m", "prompt": "Hi", "stream": True}
    assert may_continue(COMPLETIONS, text | field)


@pytest.mark.parametrize(
    "field",
    [
        {"n": 2},
        {"n": True},
        {"stream": False},
        {"logprobs": True},
        {"tools": []},
        {"response_format": {"type": "json_object"}},
        {"stop": ["."]},
        {"seed": 1},
        {"frequency_penalty": 0.5},
        {"presence_penalty": -1},
        {"max_tokens": "9"},
        {"max_tokens": True},
        {"stream_options": {"other": True}},
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "So"}]},
        {"continue_final_message": True},
        {"structured_outputs": {"regex": "a"}},
        {"prompt": "Hi"},
    ],
    ids=str,
)
def test_may_continue_other_field_or_value_is_not(field: dict[str, Any]) -> None:
    assert not may_continue(CHAT, BODY | field)


def test_may_continue_other_paths_and_lists_of_tokens_are_not() -> None:
    assert not may_continue("/v1/responses", BODY)
    assert not may_continue(COMPLETIONS, {"model": "m", "prompt": [1, 2], "stream": True})
    assert not may_continue(COMPLETIONS, {"model": "m", "prompt": "Hi", "echo": True, "stream": True})


def test_may_continue_every_other_argument_of_openai_is_not() -> None:
    """A field that a release adds is not on the list."""
    from openai.resources.chat.completions import Completions

    transport = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    names = set(inspect.signature(Completions.create).parameters) - transport
    known = {name for name in names if may_continue(CHAT, BODY | {name: BODY.get(name, 0)})}
    assert known == {
        "model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "user",
        "frequency_penalty", "presence_penalty", "stream",
    }  # fmt: skip
