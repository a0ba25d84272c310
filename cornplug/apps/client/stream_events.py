"""Server-sent events of an OpenAI stream: whole events out of chunks of bytes, and back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

DONE: Final = b"data: [DONE]\n\n"
_END: Final = re.compile(rb"\r?\n\r?\n")


class EventSplitter:
    """Cuts a stream of bytes after each event."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The events that are whole now, each with its empty line."""
        self._rest += chunk
        begin = 0
        for end in _END.finditer(self._rest):
            yield self._rest[begin : end.end()]
            begin = end.end()
        self._rest = self._rest[begin:]

    def take_rest(self) -> bytes:
        """Bytes of an event that has not ended; they are no longer kept."""
        rest, self._rest = self._rest, b""
        return rest


def is_done(event: bytes) -> bool:
    """Whether this event says that the stream is complete."""
    return event.strip() == DONE.strip()


def data_of(event: bytes) -> dict[str, Any] | None:
    """The JSON object of an event; None for a comment, and for data that are none."""
    if not event.startswith(b"data:"):
        return None
    try:
        return msgspec.json.decode(event[len(b"data:") :], type=dict[str, Any])
    except msgspec.DecodeError:
        return None


def event_of(data: Mapping[str, Any]) -> bytes:
    """The event of a JSON object, as vLLM and SGLang write it."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
