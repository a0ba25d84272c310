"""Exchange of one request and its response with one encoder service, over httpx.

Requests carry the caller's trace context if opentelemetry-api is installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Final

import httpx

from cornplug.encoder_service.client.responses import HttpAnswer
from cornplug.errors import EncoderUnavailable

_CONNECT_S: Final = 1.0
"""Seconds to wait for a connection. A host that takes longer to accept a connection counts as down."""
_MAX_ANSWER_BYTES: Final = 1 << 30


def trace_headers() -> dict[str, str]:
    """Return the headers that propagate the current span (`traceparent` and any of the app's propagators).

    Empty if there is no span.
    """
    headers: dict[str, str] = {}
    inject = _inject()
    if inject is not None:
        inject(headers)
    return headers


@functools.cache
def _inject() -> Callable[[dict[str, str]], None] | None:
    # Imported at the first request, so that importing this module stays cheap.
    try:
        propagate = importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
    inject: Callable[[dict[str, str]], None] = propagate.inject
    return inject


async def exchange(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> HttpAnswer:
    """Send a request and return the complete response.

    Raises httpx.HTTPError, or EncoderUnavailable("encoder_bad_response") if the response is too large.
    """
    headers = {**trace_headers(), **(headers or {})}
    async with http.stream(method, url, timeout=_timeout(timeout_s), headers=headers, **body) as response:
        return await _whole(url, response)


def form(model: str, cache_salt: str | None, deadline_s: float, *, inline: bool) -> dict[str, str]:
    """Return the form fields of a request to `/v1/encode`, without the medium."""
    fields = {"model": model, "deadline_s": f"{deadline_s:g}", "inline": "true" if inline else "false"}
    return fields if cache_salt is None else {**fields, "cache_salt": cache_salt}


async def _whole(url: str, response: httpx.Response) -> HttpAnswer:
    chunks, size = [], 0
    async for chunk in response.aiter_raw():
        chunks.append(chunk)
        size += len(chunk)
        if size > _MAX_ANSWER_BYTES:
            raise EncoderUnavailable(
                f"{url} sent a response that is too large", reason="encoder_bad_response"
            )
    headers = {name.lower(): value for name, value in response.headers.items()}
    return HttpAnswer(url=url, status=response.status_code, headers=headers, body=b"".join(chunks))


def _timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S))
