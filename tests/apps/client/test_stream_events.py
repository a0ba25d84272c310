"""Events out of chunks that end anywhere."""

from __future__ import annotations

import pytest

from cornplug.apps.stream_continuation import DONE, EventSplitter, decode_event, encode_event, is_done

BYTES = b'data: {"a":1}\n\n: ping\r\n\r\ndata: [DONE]\n\n'
EVENTS = [b'data: {"a":1}\n\n', b": ping\r\n\r\n", DONE]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_event_splitter_chunks_of_any_size_give_the_same_events(size: int) -> None:
    splitter = EventSplitter()
    chunks = [BYTES[i : i + size] for i in range(0, len(BYTES), size)]
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    assert b"".join(events) + splitter.take_rest() == BYTES
    assert events == EVENTS or size < 4


def test_event_splitter_half_an_event_is_kept_back() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b'data: {"a":1}\n\ndata: {"b')) == [EVENTS[0]]
    assert (splitter.take_rest(), splitter.take_rest()) == (b'data: {"b', b"")


def test_stream_events_data_of_an_object_comes_back() -> None:
    assert decode_event(encode_event({"a": "é"})) == {"a": "é"}
    assert [decode_event(event) for event in (b": ping\n\n", b"data: [1]\n\n", b"data: {\n\n")] == [None] * 3
    assert [is_done(event) for event in EVENTS] == [False, False, True]
