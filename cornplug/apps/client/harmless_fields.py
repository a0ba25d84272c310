"""Allow list of fields with which a stream may continue on another engine. Any other field prevents it.

A field is allowed if the remaining text depends on it only through the prompt and the text so far. Penalties
and seeds depend on the tokens of one request, stop strings hold back text, and formats and tools parse the
text from its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

_LAST_ROLES: Final = frozenset({"user", "tool", "system", "developer"})
_USAGE: Final = frozenset({"include_usage", "continuous_usage_stats"})

Test = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _is_zero(value: Any) -> bool:
    return value is None or (_is_number(value) and value == 0)


def _ends_with_a_question(messages: Any) -> bool:
    """Return whether the last message is not the assistant's, which the text so far would follow."""
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return False
    return messages[-1].get("role") in _LAST_ROLES


def _asks_for_usage_only(options: Any) -> bool:
    return options is None or (isinstance(options, dict) and set(options) <= _USAGE)


_ANY: Final[Mapping[str, Test]] = {
    "model": lambda value: isinstance(value, str),
    "stream": lambda value: value is True,
    "stream_options": _asks_for_usage_only,
    "max_tokens": _is_limit,
    "temperature": _is_number,
    "top_p": _is_number,
    "top_k": _is_number,
    "min_p": _is_number,
    "n": lambda value: value is None or (value == 1 and value is not True),
    "ignore_eos": lambda value: isinstance(value, bool),
    "logit_bias": lambda value: value is None or isinstance(value, dict),
    "allowed_token_ids": lambda value: value is None or isinstance(value, list),
    "logprobs": _is_off,
    "frequency_penalty": _is_zero,
    "presence_penalty": _is_zero,
    "seed": lambda value: value is None,
    "stop": lambda value: value is None or value == [],
    "user": lambda value: True,
    "priority": _is_limit,
    "cache_salt": lambda value: value is None or isinstance(value, str),
}
_FIELDS: Final[Mapping[str, Mapping[str, Test]]] = {
    CHAT: {**_ANY, "messages": _ends_with_a_question, "max_completion_tokens": _is_limit},
    COMPLETIONS: {**_ANY, "prompt": lambda value: isinstance(value, str), "echo": _is_off},
}
_NEEDED: Final[Mapping[str, str]] = {CHAT: "messages", COMPLETIONS: "prompt"}


def fields_of(path: str) -> frozenset[str]:
    """Return the allowed field names for requests to a path."""
    return frozenset(_FIELDS.get(path, ()))


def may_continue(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether a stream of this request may continue on another engine: every field and value is
    allowed."""
    fields = _FIELDS.get(path)
    if fields is None or body.get("stream") is not True or _NEEDED[path] not in body:
        return False
    return all(name in fields and fields[name](value) for name, value in body.items())
