"""OpenAI client of an application. The client sends each request directly to the engine that can begin first.

    openai.OpenAI ──> RoutedTransport ──> RoutedCall: chooses the engine, repeats requests, continues streams
                                            │         (no I/O, also used by AsyncRoutedTransport)
                                            ├─> EngineChooser: prefixes, queues and pauses of each engine
                                            └─> StreamContinuation: text so far, and the request for the rest

`Application.client()` of `cornplug.apps` creates a client, and only then imports this module.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import httpx

from cornplug.apps.engine_choice import EngineChooser, LoadPoller, MissPrice
from cornplug.apps.routed_call import STREAM_ERRORS, CallRouter, RoutedCall, Routes
from cornplug.apps.stream_continuation import EngineFailedInStream
from cornplug.encoder_service.client.retry import RetryPause
from cornplug.errors import ConfigError
from cornplug.host import tls_context

if TYPE_CHECKING:
    import openai


__all__ = [
    "AsyncRoutedTransport",
    "MissPrice",
    "RoutedTransport",
    "async_client",
    "create_router",
    "sync_client",
]

_LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=100)
_BASE_URL: Final = "http://routed.invalid/v1"
"""Base URL of the client. The transport replaces it by an engine's address."""
_NO_KEY: Final = "none"
"""API key that is sent by default. `OPENAI_API_KEY` is not used, because that key is for another service."""
_RESERVED_ARGUMENTS: Final = ("base_url", "http_client")


class RoutedTransport(httpx.BaseTransport):
    """Transport for `httpx.Client`.

    The host in a request's URL is ignored, because `router` chooses the engine.
    """

    def __init__(self, router: CallRouter, engines: httpx.BaseTransport | None = None) -> None:
        self._router = router
        self._engines = engines or httpx.HTTPTransport(verify=tls_context(), limits=_LIMITS)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Return the engine's response. Raises the last engine's httpx.TransportError."""
        call = self._router.create_call(request, request.read())
        response = self.send_call(call)
        if call.is_buffered:
            return response
        return _with_stream(response, _RoutedStream(self, call, response))

    def send_call(self, call: RoutedCall) -> httpx.Response:
        """Send the call's requests one after another, and return the first response that the caller should
        get.

        If `RoutedCall.is_buffered` is True, the response has been read completely.
        """
        while True:
            step = call.next_step()
            if isinstance(step, RetryPause):
                time.sleep(step.seconds)
                continue
            with call.attempt():
                response = self._engines.handle_request(step)
                if not call.accept_response(response.status_code, response.headers):
                    response.close()
                elif not call.is_buffered:
                    return response
                else:
                    with closing(response):
                        content = b"".join(_sync_stream(response))
                    call.release_engine()
                    return _complete_response(response, content)

    def close(self) -> None:
        """Close the engines' connections."""
        self._engines.close()


class AsyncRoutedTransport(httpx.AsyncBaseTransport):
    """Transport for `httpx.AsyncClient`. See `RoutedTransport`."""

    def __init__(self, router: CallRouter, engines: httpx.AsyncBaseTransport | None = None) -> None:
        self._router = router
        self._engines = engines or httpx.AsyncHTTPTransport(verify=tls_context(), limits=_LIMITS)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Return the engine's response. Raises the last engine's httpx.TransportError."""
        call = self._router.create_call(request, await request.aread())
        response = await self.send_call(call)
        if call.is_buffered:
            return response
        return _with_stream(response, _AsyncRoutedStream(self, call, response))

    async def send_call(self, call: RoutedCall) -> httpx.Response:
        """Send the call's requests one after another, and return the first response that the caller should
        get.

        If `RoutedCall.is_buffered` is True, the response has been read completely.
        """
        while True:
            step = call.next_step()
            if isinstance(step, RetryPause):
                await asyncio.sleep(step.seconds)
                continue
            with call.attempt():
                response = await self._engines.handle_async_request(step)
                if not call.accept_response(response.status_code, response.headers):
                    await response.aclose()
                elif not call.is_buffered:
                    return response
                else:
                    async with aclosing(response):
                        content = b"".join([chunk async for chunk in _async_stream(response)])
                    call.release_engine()
                    return _complete_response(response, content)

    async def aclose(self) -> None:
        """Close the engines' connections."""
        await self._engines.aclose()


class _RoutedStream(httpx.SyncByteStream):
    """Body of a response, which several engines may send one after another."""

    def __init__(self, transport: RoutedTransport, call: RoutedCall, response: httpx.Response) -> None:
        self._transport = transport
        self._call = call
        self._response = response

    def __iter__(self) -> Iterator[bytes]:
        last = None
        while last is None:
            lost = None
            try:
                for chunk in _sync_stream(self._response):
                    yield from self._call.forward(chunk)
            except STREAM_ERRORS as e:
                lost = e
            self._response.close()
            try:
                last = self._call.end_stream(lost)
                if last is None:
                    self._response = self._transport.send_call(self._call)
            except EngineFailedInStream as e:
                last = e.event
        if last:
            yield last

    def close(self) -> None:
        self._call.release_engine()
        self._response.close()


class _AsyncRoutedStream(httpx.AsyncByteStream):
    """Async form of `_RoutedStream`."""

    def __init__(self, transport: AsyncRoutedTransport, call: RoutedCall, response: httpx.Response) -> None:
        self._transport = transport
        self._call = call
        self._response = response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        last = None
        while last is None:
            lost = None
            try:
                async for chunk in _async_stream(self._response):
                    for out in self._call.forward(chunk):
                        yield out
            except STREAM_ERRORS as e:
                lost = e
            await self._response.aclose()
            try:
                last = self._call.end_stream(lost)
                if last is None:
                    self._response = await self._transport.send_call(self._call)
            except EngineFailedInStream as e:
                last = e.event
        if last:
            yield last

    async def aclose(self) -> None:
        self._call.release_engine()
        await self._response.aclose()


def _sync_stream(response: httpx.Response) -> httpx.SyncByteStream:
    """Return the response's bytes as the engine sent them, because the client decodes them."""
    assert isinstance(response.stream, httpx.SyncByteStream)
    return response.stream


def _async_stream(response: httpx.Response) -> httpx.AsyncByteStream:
    assert isinstance(response.stream, httpx.AsyncByteStream)
    return response.stream


def _complete_response(response: httpx.Response, content: bytes) -> httpx.Response:
    return httpx.Response(
        response.status_code,
        headers=response.headers,
        stream=httpx.ByteStream(content),
        extensions=response.extensions,
    )


def _with_stream(
    response: httpx.Response, stream: httpx.SyncByteStream | httpx.AsyncByteStream
) -> httpx.Response:
    """Return a response with the same status and headers and another stream.

    The content-length header is removed, because another engine may continue the response.
    """
    headers = [(k, v) for k, v in response.headers.raw if k.lower() != b"content-length"]
    return httpx.Response(
        response.status_code, headers=headers, stream=stream, extensions=response.extensions
    )


def create_router(routes: Routes, price: MissPrice | None, retry_s: float) -> CallRouter:
    """Return the router of one client. Raises ConfigError if `retry_s` is invalid."""
    if not 0 <= retry_s < float("inf"):
        raise ConfigError("retry_s", f"{retry_s} is not a valid time", "Set seconds, or 0 for no retries.")
    chooser = EngineChooser(price)
    poller = LoadPoller(chooser.update_loads)
    return CallRouter(routes, chooser, retry_s=retry_s, refresh_loads=poller.refresh)


def sync_client(router: CallRouter, arguments: dict[str, Any]) -> openai.OpenAI:
    """Create a client. `arguments` are passed to `openai.OpenAI`.

    Raises ConfigError if the package openai is not installed, or if an argument is not supported.
    """
    package = _import_openai()
    http = httpx.Client(
        transport=RoutedTransport(router), trust_env=False, **_httpx_options(package, arguments)
    )
    made: openai.OpenAI = package.OpenAI(http_client=http, **_with_defaults(arguments))
    return made


def async_client(router: CallRouter, arguments: dict[str, Any]) -> openai.AsyncOpenAI:
    """Create a client. `arguments` are passed to `openai.AsyncOpenAI`.

    Raises the same errors as `sync_client`.
    """
    package = _import_openai()
    transport = AsyncRoutedTransport(router)
    http = httpx.AsyncClient(transport=transport, trust_env=False, **_httpx_options(package, arguments))
    made: openai.AsyncOpenAI = package.AsyncOpenAI(http_client=http, **_with_defaults(arguments))
    return made


def _import_openai() -> ModuleType:
    try:
        import openai
    except ModuleNotFoundError as e:
        raise ConfigError(
            "client", f"the package {e.name} is not installed", "Run: pip install 'cornplug[client]'"
        ) from e
    return openai


def _httpx_options(package: ModuleType, arguments: dict[str, Any]) -> dict[str, Any]:
    for name in _RESERVED_ARGUMENTS:
        if name in arguments:
            raise ConfigError(
                name, "not supported by this client", "Remove it, and pass addresses as `routes`."
            )
    # openai sets the timeout of each request, and uses this value as its default.
    seconds = package.DEFAULT_TIMEOUT
    timeout = httpx.Timeout(
        connect=seconds.connect, read=seconds.read, write=seconds.write, pool=seconds.pool
    )
    return {"timeout": timeout, "follow_redirects": False}


def _with_defaults(arguments: dict[str, Any]) -> dict[str, Any]:
    """Add default arguments of the client.

    The openai package's own retries are off, because they would repeat requests that must not be repeated.
    """
    return {"api_key": _NO_KEY, "max_retries": 0, "base_url": _BASE_URL, **arguments}
