"""Continuation of a stream on another engine if the first engine is lost. No I/O.

The caller receives one stream: the events of the first engine, then the events of the next engine with the
first engine's id. The request for the rest contains the text up to the last event that does not end with
white space, because a chat template may strip white space from a message. The next engine therefore repeats
any text after that event, and the repeated text is not forwarded again.

If a token limit or the usage depends on the number of received tokens, each engine is requested to send the
usage in every event. The usage is removed from the events unless the caller has also requested it.

A stream may continue only if all fields of its request are in an allow list. A field is allowed if the
remaining text depends on the field only through the prompt and the text so far. For example, penalties and
seeds depend on the tokens of one request, stop strings delay text, and formats and tools parse the text from
its beginning.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self

import msgspec

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"

_LAST_ROLES: Final = frozenset({"user", "tool", "system", "developer"})
_USAGE: Final = frozenset({"include_usage", "continuous_usage_stats"})

FieldTest = Callable[[Any], bool]
_REQUIRED_FIELD: Final[Mapping[str, str]] = {CHAT: "messages", COMPLETIONS: "prompt"}
DONE: Final = b"data: [DONE]\n\n"
_EVENT_END: Final = re.compile(rb"\r?\n\r?\n")
_LIMIT_FIELDS: Final = ("max_tokens", "max_completion_tokens")
_COPIED_FIELDS: Final = ("id", "object", "created", "model")
"""Fields that are copied from the first event to the events of later engines."""


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def _is_off(value: Any) -> bool:
    return value is None or value is False


def _is_zero(value: Any) -> bool:
    return value is None or (_is_number(value) and value == 0)


def _ends_with_prompt(messages: Any) -> bool:
    """Return whether the last message is not an assistant message, which the engine would already
    continue."""
    if not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return False
    return messages[-1].get("role") in _LAST_ROLES


def _requests_only_usage(options: Any) -> bool:
    return options is None or (isinstance(options, dict) and set(options) <= _USAGE)


_COMMON_FIELDS: Final[Mapping[str, FieldTest]] = {
    "model": lambda value: isinstance(value, str),
    "stream": lambda value: value is True,
    "stream_options": _requests_only_usage,
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
_FIELDS: Final[Mapping[str, Mapping[str, FieldTest]]] = {
    CHAT: {**_COMMON_FIELDS, "messages": _ends_with_prompt, "max_completion_tokens": _is_limit},
    COMPLETIONS: {**_COMMON_FIELDS, "prompt": lambda value: isinstance(value, str), "echo": _is_off},
}


def allowed_fields(path: str) -> frozenset[str]:
    """Return the names of fields with which requests to a path may continue."""
    return frozenset(_FIELDS.get(path, ()))


def may_continue(path: str, body: Mapping[str, Any]) -> bool:
    """Return whether the stream of this request may continue on another engine.

    All fields and values of the request must be allowed.
    """
    fields = _FIELDS.get(path)
    if fields is None or body.get("stream") is not True or _REQUIRED_FIELD[path] not in body:
        return False
    return all(name in fields and fields[name](value) for name, value in body.items())


class EventSplitter:
    """Splits a byte stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the events that are complete after this chunk, each with its empty line."""
        self._rest += chunk
        begin = 0
        for end in _EVENT_END.finditer(self._rest):
            yield self._rest[begin : end.end()]
            begin = end.end()
        self._rest = self._rest[begin:]

    def take_rest(self) -> bytes:
        """Remove and return the bytes of an incomplete event."""
        rest, self._rest = self._rest, b""
        return rest


def is_done(event: bytes) -> bool:
    """Return whether this event marks the end of the stream."""
    return event.strip() == DONE.strip()


def decode_event(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object of an event, or None for a comment or other data."""
    if not event.startswith(b"data:"):
        return None
    try:
        return msgspec.json.decode(event[len(b"data:") :], type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def encode_event(data: Mapping[str, Any]) -> bytes:
    """Encode a JSON object as a server-sent event, in the format of vLLM and SGLang."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class StreamDiverged(Exception):
    """The text of the next engine does not continue the stream."""


class EngineFailedInStream(Exception):
    """The engine ended the stream with an error.

    `event` is the engine's error event, which the caller receives if no other engine continues the stream.
    """

    def __init__(self, event: bytes) -> None:
        super().__init__("the engine ended its stream with an error")
        self.event = event


class StreamContinuation:
    """One stream for the caller, assembled from the streams of several engines."""

    def __init__(self, path: str, body: Mapping[str, Any]) -> None:
        self._is_chat = path == CHAT
        self._body = body
        options = body.get("stream_options") or {}
        self._usage_requested = bool(options.get("include_usage"))
        self._usage_in_every_event = self._usage_requested and bool(options.get("continuous_usage_stats"))
        self._has_limit = any(body.get(name) is not None for name in _LIMIT_FIELDS)
        self._needs_token_count = self._has_limit or self._usage_requested
        """Whether the remaining limit or the usage depends on the number of received tokens."""
        self._events = EventSplitter()
        self._text = ""
        self._overlap = ""
        """Text that was already forwarded and that the current engine still has to repeat."""
        self._tokens_before = 0
        """Number of tokens of generated text in the current engine's request."""
        self._tokens: int | None = 0
        """Number of tokens of all generated text, or None if the engine does not report the number."""
        self._resume_point = (0, 0)
        """(characters, tokens) of the generated text that a request to the next engine would contain."""
        self._first_fields: dict[str, Any] | None = None
        self._prompt_tokens: int | None = None
        self._usage_sent = False
        self._engine_count = 1
        self._has_unknown_data = False
        self.finish_sent = False
        """Whether an event with a finish reason was forwarded."""
        self.done_sent = False
        """Whether the event that ends a stream was forwarded."""

    @classmethod
    def for_request(cls, path: str, body: Mapping[str, Any]) -> Self | None:
        """Return the continuation of a request's stream, or None if the stream must not continue."""
        return cls(path, body) if may_continue(path, body) else None

    @property
    def can_continue(self) -> bool:
        """Whether another engine may continue the stream."""
        return (
            not (self._has_unknown_data or self.done_sent or self.finish_sent)
            and self._next_limits() is not None
        )

    def next_request_body(self) -> dict[str, Any]:
        """Return the body of the next request: the caller's body, or a body for the rest of the text."""
        body = dict(self._body)
        if self._needs_token_count:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        text = self._text[: self._resume_point[0]]
        if not text:
            return body
        body |= self._next_limits() or {}
        if self._is_chat:
            body["messages"] = [*body["messages"], {"role": "assistant", "content": text}]
            return body | {"continue_final_message": True, "add_generation_prompt": False}
        body["prompt"] += text
        return body

    def switch_engine(self) -> None:
        """Record that the engine was lost and that the next request is sent to another engine."""
        characters, self._tokens_before = self._resume_point
        self._tokens = self._tokens_before
        self._overlap = self._text[characters:]
        self._events.take_rest()
        if self._first_fields is not None:
            self._engine_count += 1

    def forward(self, chunk: bytes) -> Iterator[bytes]:
        """Yield events for the caller.

        Raises StreamDiverged if the next engine does not repeat the text so far, and EngineFailedInStream if
        the engine sends an error event.
        """
        return filter(None, map(self._forward_event, self._events.feed(chunk)))

    def finish(self) -> bytes:
        """Return the last bytes for the caller, after the stream ended or its engine was lost after the last
        token."""
        if self.done_sent or not self.finish_sent:
            return self._events.take_rest()
        self.done_sent = True
        if (
            not self._usage_requested
            or self._usage_sent
            or self._tokens is None
            or self._first_fields is None
        ):
            return DONE
        return (
            encode_event({**self._first_fields, "choices": [], "usage": self._usage_object(self._tokens)})
            + DONE
        )

    def _next_limits(self) -> dict[str, int] | None:
        """Return the token limits for the rest of the text.

        Returns None if the limit is reached or the number of tokens so far is not available.
        """
        if not self._has_limit:
            return {}
        if self._tokens is None:
            return None
        limits = {
            name: self._body[name] - self._resume_point[1]
            for name in _LIMIT_FIELDS
            if self._body.get(name) is not None
        }
        return limits if min(limits.values()) > 0 else None

    def _forward_event(self, event: bytes) -> bytes:
        if is_done(event):
            self.done_sent = True
            return event
        data = decode_event(event)
        if data is None:
            # Comments keep the connection open and are allowed. After other data, the stream cannot continue.
            self._has_unknown_data |= event.startswith(b"data:")
            return event
        if "error" in data:
            if self.can_continue and _is_engine_error(data["error"]):
                raise EngineFailedInStream(event)
            self._has_unknown_data = True
            return event
        if self._first_fields is None:
            self._first_fields = {name: data[name] for name in _COPIED_FIELDS if name in data}
        usage = data.get("usage")
        if isinstance(usage, dict) and self._prompt_tokens is None and not self._tokens_before:
            self._prompt_tokens = usage.get("prompt_tokens")
        choices = data.get("choices")
        if not choices:
            return self._forward_usage(event, data, usage)
        return self._forward_choice(event, data, choices[0], usage)

    def _forward_usage(self, event: bytes, data: dict[str, Any], usage: Any) -> bytes:
        if not self._usage_requested:
            return b"" if self._needs_token_count else event
        self._usage_sent = True
        if self._engine_count == 1 or not isinstance(usage, dict):
            return event
        total = self._tokens_before + int(usage.get("completion_tokens") or 0)
        return encode_event({**data, **(self._first_fields or {}), "usage": self._usage_object(total)})

    def _forward_choice(
        self, event: bytes, data: dict[str, Any], choice: dict[str, Any], usage: Any
    ) -> bytes:
        text = self._text_of(choice)
        fresh = self._strip_overlap(text)
        self._record_text(fresh, usage)
        self.finish_sent |= choice.get("finish_reason") is not None
        stripped = usage is not None and self._needs_token_count and not self._usage_in_every_event
        if self._engine_count == 1 and not stripped:
            return event
        if stripped:
            del data["usage"]
        if self._engine_count == 1:
            return encode_event(data)
        if not fresh and not self.finish_sent:
            return b""
        self._set_text(choice, fresh)
        if "usage" in data and self._tokens is not None:
            data["usage"] = self._usage_object(self._tokens)
        return encode_event({**data, **(self._first_fields or {})})

    def _text_of(self, choice: dict[str, Any]) -> str:
        """Return the new text of an event.

        After reasoning and other parts, the stream cannot continue on another engine.
        """
        if not self._is_chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        self._has_unknown_data |= any(
            value for name, value in delta.items() if name not in ("role", "content")
        )
        return delta.get("content") or ""

    def _set_text(self, choice: dict[str, Any], text: str) -> None:
        if self._is_chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text

    def _strip_overlap(self, text: str) -> str:
        again = min(len(text), len(self._overlap))
        if text[:again] != self._overlap[:again]:
            self._has_unknown_data = True
            raise StreamDiverged(
                f"the next engine sent {text[:again]!r} instead of {self._overlap[:again]!r}"
            )
        self._overlap = self._overlap[again:]
        return text[again:]

    def _record_text(self, fresh: str, usage: Any) -> None:
        came = usage.get("completion_tokens") if isinstance(usage, dict) else None
        self._tokens = None if came is None else self._tokens_before + came
        self._text += fresh
        is_counted = self._tokens is not None or not self._needs_token_count
        if fresh and is_counted and not fresh[-1].isspace() and fresh[-1] != "\N{REPLACEMENT CHARACTER}":
            self._resume_point = (len(self._text), self._tokens or 0)

    def _usage_object(self, tokens: int) -> dict[str, int]:
        prompt = self._prompt_tokens or 0
        return {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}


def _is_engine_error(error: Any) -> bool:
    """Return whether an error is caused by the engine, such as an exited process, and not by the request."""
    code = error.get("code") if isinstance(error, dict) else None
    return isinstance(code, int) and code >= 500
