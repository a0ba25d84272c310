"""A stream of one engine after the other: its text, its limits and its usage, without any server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cornplug.apps.stream_continuation import (
    CHAT,
    COMPLETIONS,
    DONE,
    EngineFailedInStream,
    StreamContinuation,
    StreamDiverged,
    decode_event,
    encode_event,
)

ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
LIMITED = ASK | {"max_tokens": 10}


def stream(body: dict[str, Any], path: str = CHAT) -> StreamContinuation:
    made = StreamContinuation.for_request(path, body)
    assert made is not None
    return made


def event(text: str, tokens: int | None = None, *, of: str = "a", **choice: Any) -> bytes:
    """A chat's event with its usage so far."""
    usage = {} if tokens is None else {"usage": {"prompt_tokens": 7, "completion_tokens": tokens}}
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None} | choice]
    return encode_event({"id": of, "created": ord(of), "choices": choices, **usage})


def forwarded(of: StreamContinuation, *events: bytes) -> bytes:
    return b"".join(out for one in events for out in of.forward(one))


def texts(events: bytes) -> Sequence[str]:
    found = [decode_event(one + b"\n\n") for one in events.split(b"\n\n") if one]
    return [one["choices"][0]["delta"]["content"] for one in found if one is not None]


def test_stream_continuation_first_stream_is_forwarded_as_it_came() -> None:
    of = stream(ASK)
    events = (event("One"), b": ping\n\n", event(" two", finish_reason="stop"), DONE)
    assert of.next_request_body() == ASK
    assert forwarded(of, *events) == b"".join(events)
    assert of.finish() == b""


def test_stream_continuation_usage_that_only_the_client_asked_for_is_taken_out() -> None:
    of = stream(LIMITED)
    assert of.next_request_body()["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    last = encode_event({"id": "a", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}})
    assert forwarded(of, event("One", 1), last, DONE) == event("One") + DONE


def test_stream_continuation_rest_is_asked_for_with_the_text_so_far() -> None:
    of = stream(LIMITED)
    forwarded(of, event("One", 1), event(" two", 3))
    assert of.can_continue
    of.switch_engine()
    request = of.next_request_body()
    assert request["messages"] == [*ASK["messages"], {"role": "assistant", "content": "One two"}]
    assert (request["continue_final_message"], request["add_generation_prompt"]) == (True, False)
    assert request["max_tokens"] == 7
    assert ASK["messages"] == [{"role": "user", "content": "Hi"}]


def test_stream_continuation_rest_has_the_first_stream_s_id_and_no_second_role() -> None:
    of = stream(LIMITED)
    forwarded(of, event("", 0, delta={"role": "assistant", "content": ""}), event("One", 1))
    of.switch_engine()
    out = forwarded(
        of,
        event("", 0, of="b", delta={"role": "assistant", "content": ""}),
        event(" two", 1, of="b", finish_reason="stop"),
    )
    assert out == event(" two", finish_reason="stop")


@pytest.mark.parametrize("again", [("\n\n", "three"), ("\n", "\nthree"), ("\n\nthree",)])
def test_stream_continuation_white_space_at_the_end_comes_once(again: tuple[str, ...]) -> None:
    of = stream(LIMITED)
    forwarded(of, event("One two", 2), event("\n\n", 3))
    of.switch_engine()
    assert of.next_request_body()["messages"][-1]["content"] == "One two"
    assert of.next_request_body()["max_tokens"] == 8
    out = forwarded(of, *(event(text, i, of="b") for i, text in enumerate(again, 1)))
    assert "".join(texts(out)) == "three"


def test_stream_continuation_other_text_than_before_is_an_error() -> None:
    of = stream(ASK)
    forwarded(of, event("One"), event(" "))
    of.switch_engine()
    with pytest.raises(StreamDiverged):
        forwarded(of, event("\n", of="b"))
    assert not of.can_continue


def test_stream_continuation_nothing_came_asks_the_same_again() -> None:
    of = stream(LIMITED)
    of.switch_engine()
    assert of.next_request_body()["messages"] == ASK["messages"]
    role = event("", 0, of="b", delta={"role": "assistant", "content": ""})
    assert forwarded(of, role) == event("", of="b", delta={"role": "assistant", "content": ""})


def test_stream_continuation_half_an_event_is_not_forwarded() -> None:
    of = stream(ASK)
    assert forwarded(of, event("One") + b'data: {"id') == event("One")
    of.switch_engine()
    assert forwarded(of, event(" two", of="b")) == event(" two")


def test_stream_continuation_two_losses_add_up_tokens() -> None:
    of = stream(LIMITED | {"stream_options": {"include_usage": True}})
    forwarded(of, event("One", 2))
    of.switch_engine()
    forwarded(of, event(" two", 3, of="b"))
    of.switch_engine()
    assert of.next_request_body()["messages"][-1]["content"] == "One two"
    assert of.next_request_body()["max_tokens"] == 5
    last = {"prompt_tokens": 12, "completion_tokens": 4}
    out = forwarded(
        of, event(" three", 4, of="c", finish_reason="stop"), encode_event({"choices": [], "usage": last})
    )
    total = {"prompt_tokens": 7, "total_tokens": 16, "completion_tokens": 9}
    final = encode_event({"choices": [], "usage": total, "id": "a", "created": ord("a")})
    assert out.endswith(final)


def test_stream_continuation_usage_in_each_event_counts_the_whole_stream() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    of = stream(ASK | {"stream_options": options})
    assert forwarded(of, event("One", 2)) == event("One", 2)
    of.switch_engine()
    out = decode_event(forwarded(of, event(" two", 1, of="b")))
    assert out is not None
    assert out["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "events",
    [
        (event("One"),),
        (event("One", 10),),
        (event("One", 1), b"data: strange\n\n"),
        (event("", 1, delta={"reasoning_content": "Hm"}),),
        (event("", 1, delta={"tool_calls": [{"index": 0}]}),),
        (event("One", 1, finish_reason="stop"),),
        (event("One", 1), DONE),
        (event("One", 1), encode_event({"error": {"code": 400}})),
    ],
    ids=["uncounted", "full", "no JSON", "reasoning", "tools", "finished", "done", "refused"],
)
def test_stream_continuation_other_streams_cannot_go_on(events: tuple[bytes, ...]) -> None:
    of = stream(LIMITED)
    assert of.can_continue
    forwarded(of, *events)
    assert not of.can_continue


def test_stream_continuation_replaced_character_is_no_place_to_go_on() -> None:
    of = stream(ASK)
    forwarded(of, event("One"), event(" \N{REPLACEMENT CHARACTER}"))
    of.switch_engine()
    assert of.next_request_body()["messages"][-1]["content"] == "One"


def test_stream_continuation_engine_s_error_is_raised_where_it_can_go_on() -> None:
    error = encode_event({"error": {"message": "EngineCore died", "code": 500}})
    of = stream(ASK)
    with pytest.raises(EngineFailedInStream) as caught:
        forwarded(of, event("One"), error)
    assert caught.value.event == error
    full = stream(LIMITED)
    assert forwarded(full, event("One", 10), error).endswith(error)


def test_stream_continuation_loss_after_the_last_token_ends_the_stream() -> None:
    of = stream(LIMITED | {"stream_options": {"include_usage": True}})
    forwarded(of, event("One", 4, finish_reason="stop"))
    usage = {"prompt_tokens": 7, "total_tokens": 11, "completion_tokens": 4}
    assert of.finish() == encode_event({"id": "a", "created": ord("a"), "choices": [], "usage": usage}) + DONE
    assert of.finish() == b""


def test_stream_continuation_completion_goes_on_from_its_prompt() -> None:
    of = stream({"model": "m", "prompt": "Hi", "stream": True}, COMPLETIONS)
    forwarded(of, encode_event({"id": "a", "choices": [{"text": " there"}]}))
    of.switch_engine()
    assert of.next_request_body()["prompt"] == "Hi there"
    assert forwarded(of, encode_event({"id": "b", "choices": [{"text": "."}]})) == encode_event(
        {"id": "a", "choices": [{"text": "."}]}
    )
