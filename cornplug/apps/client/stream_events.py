"""Server-sent events of an OpenAI stream: splits chunks of bytes into events, and formats events."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
_END: Final = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Splitter of a byte stream after each event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Yield the events that are now complete, each with its empty line."""
        self._rest += chunk
        begin = 0
        for end in _END.finditer(self._rest):
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


def data_of(event: bytes) -> dict[str, Any] | None:
    """Return the JSON object of an event, or None for a comment or other data."""
    if not event.startswith(b"data:"):
        return None
    try:
        return msgspec.json.decode(event[len(b"data:") :], type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def event_of(data: Mapping[str, Any]) -> bytes:
    """Return the event of a JSON object, as vLLM and SGLang write it."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
