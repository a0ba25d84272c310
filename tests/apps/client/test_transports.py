"""Requests of the sync and the async client to real HTTP servers: retries, losses, and streams that go on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from cornplug.host import free_port

from .callers import APP, ASK, Kind, chat, complete, models, respond, text_of
from .fake_engine import (
    STORY,
    TOLD,
    FakeEngine,
    die_after,
    die_before_events,
    engines,
    fail_after,
    hang_up,
    refuse,
)

EACH_KIND = pytest.mark.parametrize("kind", ["sync", "async"])
STREAM = ASK | {"stream": True}
WITH_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


@pytest.fixture
def two() -> Iterator[list[FakeEngine]]:
    with engines(2) as found:
        yield found


def first_and_other(two: list[FakeEngine]) -> tuple[list[FakeEngine], dict[str, float]]:
    """The engine that takes the first request, the other one, and their addresses."""
    return two, {two[0].url: 1e9, two[1].url: 1.0}


@EACH_KIND
def test_transports_answer_comes_as_the_engine_sent_it(two: list[FakeEngine], kind: Kind) -> None:
    (answer,) = chat(kind, [two[0].url], ASK | {"max_tokens": 3})
    assert answer.choices[0].message.content == "".join(STORY[:3])
    assert two[0].seen[0].path == "/v1/chat/completions"
    assert two[0].seen[0].headers["host"] == two[0].url.removeprefix("http://")


@EACH_KIND
def test_transports_stream_without_loss_is_the_engine_s(two: list[FakeEngine], kind: Kind) -> None:
    (chunks,) = chat(kind, [two[0].url], STREAM)
    assert text_of(chunks) == TOLD
    assert {chunk.usage for chunk in chunks} == {None}
    assert chunks[-1].choices[0].finish_reason == "stop"


@EACH_KIND
def test_transports_refused_connection_goes_to_the_other_engine(two: list[FakeEngine], kind: Kind) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    (answer,) = chat(kind, {dead: 1e9, two[1].url: 1.0})
    assert answer.id == "id-b"


@EACH_KIND
def test_transports_busy_engine_s_request_goes_to_the_other_one(two: list[FakeEngine], kind: Kind) -> None:
    (first, _), routes = first_and_other(two)
    first.script.append(refuse(503, "30"))
    answers = chat(kind, routes, ASK, ASK)
    assert [answer.id for answer in answers] == ["id-b", "id-b"]
    assert len(first.seen) == 1


@EACH_KIND
def test_transports_only_engine_is_asked_again_after_its_pause(two: list[FakeEngine], kind: Kind) -> None:
    two[0].script.append(refuse(429, "0.1"))
    began = time.monotonic()
    (answer,) = chat(kind, [two[0].url])
    assert answer.id == "id-a"
    assert time.monotonic() >= began + 0.1


@EACH_KIND
def test_transports_pause_beyond_the_deadline_passes_the_answer_on(two: list[FakeEngine], kind: Kind) -> None:
    two[0].script.append(refuse(503, "60"))
    with pytest.raises(openai.InternalServerError) as caught:
        chat(kind, [two[0].url], retry_s=5.0)
    assert caught.value.response.headers["retry-after"] == "60"
    assert "503 of a" in caught.value.response.text
    assert len(two[0].seen) == 1


@EACH_KIND
@pytest.mark.parametrize("status", [400, 404, 500, 502])
def test_transports_other_error_is_passed_on_at_once(two: list[FakeEngine], kind: Kind, status: int) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(refuse(status))
    with pytest.raises(openai.APIStatusError) as caught:
        chat(kind, routes)
    assert (caught.value.status_code, len(first.seen), len(other.seen)) == (status, 1, 0)


@EACH_KIND
def test_transports_loss_before_the_answer_sends_a_completion_again(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, _), routes = first_and_other(two)
    first.script.append(hang_up)
    assert chat(kind, routes)[0].id == "id-b"


@EACH_KIND
def test_transports_loss_of_a_request_that_may_change_something_is_the_caller_s(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(hang_up)
    with pytest.raises(openai.APIConnectionError):
        respond(kind, routes, {"model": "model", "input": "Hello"})
    assert (len(first.seen), len(other.seen)) == (1, 0)


@EACH_KIND
def test_transports_each_engine_lost_gives_the_last_one_s_error(two: list[FakeEngine], kind: Kind) -> None:
    """After three losses the request may be the cause."""
    for engine in two:
        engine.script.extend([hang_up] * 3)
    with pytest.raises(openai.APIConnectionError) as caught:
        chat(kind, [engine.url for engine in two])
    assert isinstance(caught.value.__cause__, httpx.ReadError | httpx.RemoteProtocolError)
    assert sum(len(engine.seen) for engine in two) == 3


@EACH_KIND
@pytest.mark.parametrize("tokens", [0, 1, 5, 6, 7, len(STORY) - 1])
def test_transports_stream_of_a_killed_engine_goes_on(two: list[FakeEngine], kind: Kind, tokens: int) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(die_after(tokens))
    (chunks,) = chat(kind, routes, STREAM | WITH_USAGE | {"temperature": 0, "max_tokens": 50})
    assert text_of(chunks) == TOLD
    assert {(chunk.id, chunk.created) for chunk in chunks} == {("id-a", ord("a"))}
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices].count("assistant") == 1
    assert chunks[-1].usage.completion_tokens == len(STORY)
    assert chunks[-1].usage.total_tokens == 7 + len(STORY)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert len(other.seen) == 1


@EACH_KIND
def test_transports_engine_killed_after_its_last_token_is_not_replaced(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(die_after(len(STORY)))
    (chunks,) = chat(kind, routes, STREAM | WITH_USAGE)
    assert text_of(chunks) == TOLD
    assert chunks[-1].usage.total_tokens == 7 + len(STORY)
    assert other.seen == []


@EACH_KIND
def test_transports_continued_completion_has_the_text_of_one_engine(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(die_after(4))
    request = {"model": "model", "prompt": "Tell:>", "max_tokens": 9, "stream": True}
    (chunks,) = complete(kind, routes, request)
    assert text_of(chunks) == "".join(STORY[:9])
    assert other.bodies[0]["prompt"] == "Tell:>Once upon a time"
    assert other.bodies[0]["max_tokens"] == 5


@EACH_KIND
def test_transports_engine_s_error_event_lets_the_stream_go_on(two: list[FakeEngine], kind: Kind) -> None:
    (first, _), routes = first_and_other(two)
    first.script.append(fail_after(3))
    assert text_of(chat(kind, routes, STREAM)[0]) == TOLD


@EACH_KIND
def test_transports_only_engine_that_restarts_ends_its_own_stream(two: list[FakeEngine], kind: Kind) -> None:
    two[0].script.append(die_after(8))
    assert text_of(chat(kind, [two[0].url], STREAM)[0]) == TOLD
    assert two[0].bodies[1]["messages"][-1] == {"role": "assistant", "content": "".join(STORY[:8])}


@EACH_KIND
def test_transports_stream_survives_two_losses_and_no_third(two: list[FakeEngine], kind: Kind) -> None:
    two[0].script.extend([die_after(2), die_after(2)])
    assert text_of(chat(kind, [two[0].url], STREAM)[0]) == TOLD
    two[0].script.extend([die_after(2)] * 3)
    with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
        chat(kind, [two[0].url], STREAM)
    assert len(two[0].seen) == 6


@EACH_KIND
def test_transports_stream_with_tools_does_not_go_on(two: list[FakeEngine], kind: Kind) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(die_after(3))
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
        chat(kind, routes, STREAM | {"tools": tools})
    assert other.seen == []


@EACH_KIND
def test_transports_stream_with_tools_lost_before_its_first_event_is_asked_again(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, _), routes = first_and_other(two)
    first.script.append(die_before_events)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert text_of(chat(kind, routes, STREAM | {"tools": tools})[0]) == TOLD


@EACH_KIND
def test_transports_engine_that_refuses_the_rest_gives_the_first_loss(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(die_after(3))
    other.script.append(refuse(400))
    with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
        chat(kind, routes, STREAM)


@EACH_KIND
def test_transports_error_event_without_another_engine_reaches_the_caller(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(fail_after(3))
    other.script.append(refuse(400))
    with pytest.raises(openai.APIError, match="EngineCore died"):
        chat(kind, routes, STREAM)


@EACH_KIND
def test_transports_template_that_strips_gives_the_same_text(two: list[FakeEngine], kind: Kind) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(die_after(6))
    other.strips = True
    assert text_of(chat(kind, routes, STREAM)[0]) == TOLD
    assert other.bodies[0]["messages"][-1]["content"] == "Once upon a time,"


@EACH_KIND
def test_transports_other_engine_with_another_text_gives_the_first_loss(
    two: list[FakeEngine], kind: Kind
) -> None:
    (first, other), routes = first_and_other(two)
    first.script.append(die_after(6))
    other.story = (*STORY[:5], " but", *STORY[6:])
    with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
        chat(kind, routes, STREAM)


@EACH_KIND
def test_transports_list_of_models_is_any_engine_s(two: list[FakeEngine], kind: Kind) -> None:
    (first, _), routes = first_and_other(two)
    first.script.append(hang_up)
    assert models(kind, routes).at == "b"


def test_transports_stream_closed_early_frees_the_engine(two: list[FakeEngine]) -> None:
    with APP.client(routes=[two[0].url]) as client:
        with client.chat.completions.create(**STREAM) as stream:
            next(iter(stream))
        transport: Any = client._client._transport
    assert transport._router._chooser._sent[two[0].url] == 0
