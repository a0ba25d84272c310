"""Decisions about one request, by a clock of the test's: where it goes, when again, and when no more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from cornplug.apps.engine_choice import EngineChooser
from cornplug.apps.routed_call import CallRouter, ClassRoute, RoutedCall
from cornplug.encoder_service.client.retry import RetryPause

A, B = "http://one:8000", "http://two:8000/behind"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
JSON, EVENTS = (
    httpx.Headers({"content-type": "application/json"}),
    httpx.Headers({"content-type": "text/event-stream"}),
)


class Clock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Scene:
    """Calls of one client."""

    def __init__(self, *engines: str, retry_s: float = 30.0, route: ClassRoute | None = None) -> None:
        self.clock = Clock()
        self.route = route or ClassRoute({url: 1e6**-i for i, url in enumerate(engines)})
        self.poked: list[Mapping[str, float]] = []
        chooser = EngineChooser(clock=self.clock, uniform=lambda: 0.5)
        self._router = CallRouter(
            lambda: self.route, chooser, retry_s=retry_s, refresh_loads=self.poked.append
        )

    def call(self, body: Any = ASK, path: str = "/v1/chat/completions", method: str = "POST") -> RoutedCall:
        content = b"" if method == "GET" else json.dumps(body).encode()
        request = httpx.Request(method, f"http://routed.invalid{path}", content=content)
        return self._router.create_call(request, content)


def sent(call: RoutedCall) -> httpx.Request:
    step = call.next_step()
    assert isinstance(step, httpx.Request)
    return step


def pause(call: RoutedCall) -> float:
    step = call.next_step()
    assert isinstance(step, RetryPause)
    return step.seconds


def test_routed_call_request_is_rewritten_for_the_engine() -> None:
    request = sent(Scene(B).call(path="/v1/chat/completions?x=1"))
    assert str(request.url) == "http://two:8000/behind/v1/chat/completions?x=1"
    assert request.headers["host"] == "two:8000"
    assert json.loads(request.content) == ASK
    assert request.headers["content-length"] == str(len(request.content))


def test_routed_call_class_s_priority_and_salt_are_in_the_body() -> None:
    scene = Scene(route=ClassRoute({A: 1.0}, priority=-2, cache_salt="acme"))
    assert json.loads(sent(scene.call()).content) == {"priority": -2, "cache_salt": "acme", **ASK}
    own = ASK | {"priority": 5}
    assert json.loads(sent(scene.call(own)).content)["priority"] == 5
    # A field that an API does not know is an error of some servers.
    assert json.loads(sent(scene.call({"input": "Hi"}, "/v1/embeddings")).content) == {"input": "Hi"}


def test_routed_call_changed_routes_hold_for_the_next_attempt() -> None:
    scene = Scene(A)
    call = scene.call()
    sent(call)
    scene.route = ClassRoute({B: 1.0})
    call.record_failure(httpx.ConnectError("refused"))
    assert sent(call).url.host == "two"


def test_routed_call_pause_of_an_engine_is_every_call_s() -> None:
    scene = Scene(A, retry_s=30.0)
    first, second = scene.call(), scene.call()
    sent(first)
    assert not first.accept_response(503, httpx.Headers({"retry-after": "7"}))
    assert pause(first) == pause(second) == 7.0
    scene.clock.now += 7.0
    assert sent(first).url.host == "one"


def test_routed_call_date_of_retry_after_is_honoured() -> None:
    scene = Scene(A)
    call = scene.call()
    sent(call)
    assert call.accept_response(429, httpx.Headers({"retry-after": "Fri, 28 Nov 2098 12:00:00 GMT"}))
    past = scene.call()
    assert isinstance(past.next_step(), httpx.Request | RetryPause)


def test_routed_call_busy_engines_are_all_asked_before_a_pause() -> None:
    scene = Scene(A, B)
    call = scene.call()
    hosts = []
    for _ in range(2):
        hosts.append(sent(call).url.host)
        assert not call.accept_response(429, httpx.Headers({"retry-after": "3"}))
    assert hosts == ["one", "two"]
    assert pause(call) == 3.0


def test_routed_call_busy_answer_at_the_deadline_is_passed_on() -> None:
    scene = Scene(A, retry_s=5.0)
    call = scene.call()
    for _ in range(2):
        sent(call)
        assert not call.accept_response(503, httpx.Headers({"retry-after": "2"}))
        scene.clock.now += pause(call)
    sent(call)
    assert call.accept_response(503, httpx.Headers({"retry-after": "2"}))


def test_routed_call_without_time_for_retries_sends_once() -> None:
    scene = Scene(A, B, retry_s=0.0)
    call = scene.call()
    sent(call)
    assert call.accept_response(503, httpx.Headers())
    other = scene.call()
    sent(other)
    other.record_failure(httpx.ConnectError("refused"))
    with pytest.raises(httpx.ConnectError, match="refused"):
        other.next_step()


def test_routed_call_refused_connections_end_at_the_deadline_with_the_last_error() -> None:
    scene = Scene(A, B, retry_s=5.0)
    call = scene.call(path="/v1/responses")
    attempts = 0
    with pytest.raises(httpx.ConnectError, match="of attempt"):
        while attempts < 100:
            step = call.next_step()
            if isinstance(step, RetryPause):
                scene.clock.now += step.seconds
                continue
            attempts += 1
            call.record_failure(httpx.ConnectError(f"of attempt {attempts}"))
    assert 4 < attempts < 30
    assert 103.0 < scene.clock.now <= 105.0


@pytest.mark.parametrize(
    ("error", "path", "again"),
    [
        (httpx.ReadError("x"), "/v1/chat/completions", True),
        (httpx.RemoteProtocolError("x"), "/v1/completions", True),
        (httpx.WriteError("x"), "/v1/embeddings", True),
        (httpx.ReadError("x"), "/v1/responses", False),
        (httpx.ConnectTimeout("x"), "/v1/responses", True),
        (httpx.ReadTimeout("x"), "/v1/chat/completions", False),
        (httpx.PoolTimeout("x"), "/v1/chat/completions", False),
        (httpx.ProxyError("x"), "/v1/chat/completions", False),
    ],
)
def test_routed_call_only_a_harmless_request_is_sent_again(
    error: httpx.TransportError, path: str, again: bool
) -> None:
    call = Scene(A, B).call(path=path)
    sent(call)
    call.record_failure(error)
    if again:
        assert sent(call).url.host == "two"
        return
    with pytest.raises(type(error)):
        call.next_step()


def test_routed_call_conversation_returns_to_its_engine_until_it_is_lost() -> None:
    scene = Scene(route=ClassRoute({A: 1.0, B: 1.0}))
    body = ASK | {"messages": [{"role": "user", "content": "Hi. " * 600}]}
    first = scene.call(body)
    home = sent(first).url.host
    assert first.accept_response(200, JSON)
    first.release_engine()
    busy = [scene.call(ASK | {"messages": [{"role": "user", "content": f"{i}"}]}) for i in range(2)]
    assert {sent(call).url.host for call in busy} == {"one", "two"}
    again = scene.call(body)
    assert sent(again).url.host == home
    again.record_failure(httpx.ReadError("lost"))
    assert sent(again).url.host != home


def test_routed_call_stream_s_rest_has_a_deadline_of_its_own() -> None:
    scene = Scene(A, B, retry_s=5.0)
    call = scene.call(ASK | {"stream": True})
    assert sent(call).headers["accept-encoding"] == "identity"
    assert call.accept_response(200, EVENTS)
    event = b'data: {"id":"a","choices":[{"delta":{"content":"One"}}]}\n\n'
    assert list(call.forward(event)) == [event]
    scene.clock.now += 600.0
    assert call.end_stream(httpx.ReadError("lost")) is None
    rest = sent(call)
    assert rest.url.host == "two"
    assert json.loads(rest.content)["continue_final_message"] is True
    assert not call.accept_response(400, JSON)
    with pytest.raises(httpx.ReadError, match="lost"):
        call.next_step()


def test_routed_call_compressed_stream_is_forwarded_untouched() -> None:
    call = Scene(A).call(ASK | {"stream": True})
    sent(call)
    assert call.accept_response(200, httpx.Headers({**EVENTS, "content-encoding": "gzip"}))
    assert list(call.forward(b"\x1f\x8b")) == [b"\x1f\x8b"]
    assert call.end_stream(None) == b""


def test_routed_call_each_request_asks_for_loads() -> None:
    scene = Scene(A)
    scene.call()
    scene.call(method="GET", path="/v1/models")
    assert scene.poked == [scene.route.engines] * 2


def test_routed_call_body_that_is_no_json_goes_as_it_is() -> None:
    scene = Scene(route=ClassRoute({A: 1.0}, priority=-2))
    request = httpx.Request("POST", "http://routed.invalid/v1/audio/transcriptions", content=b"\x00")
    assert sent(scene._router.create_call(request, b"\x00")).content == b"\x00"
