"""One request to one encoder service and its response, over httpx.

A response for several media is `multipart/mixed`, which is read part by part as bytes arrive. Requests carry
the caller's trace if opentelemetry-api is installed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Final

import httpx

from cornplug.encoder_service.client import responses
from cornplug.encoder_service.client.encode_many import MediaPayload, part_answer
from cornplug.encoder_service.client.responses import HttpAnswer
from cornplug.errors import EncoderUnavailable

MIXED: Final = "multipart/mixed"
_MAX_HEAD_BYTES: Final = 64 << 10
_MAX_BODY_BYTES: Final = 1 << 30
_END: Final = b"\r\n\r\n"
_CONNECT_S: Final = 1.0
"""A host that takes longer to accept a connection counts as down."""
_MAX_ANSWER_BYTES: Final = 1 << 30


def trace_headers() -> dict[str, str]:
    """Return headers of the current span: `traceparent` and those of the app's propagators. Empty without
    a span."""
    headers: dict[str, str] = {}
    inject = _inject()
    if inject is not None:
        inject(headers)
    return headers


@functools.cache
def _inject() -> Callable[[dict[str, str]], None] | None:
    # Imported at the first request, so that an app without it pays nothing.
    try:
        propagate = importlib.import_module("opentelemetry.propagate")
    except ImportError:
        return None
    inject: Callable[[dict[str, str]], None] = propagate.inject
    return inject


class MultipartReader:
    """Parser of a response's bytes. Each part has a content-length, so the boundary is never searched for."""

    def __init__(self, content_type: str) -> None:
        """Raise EncoderUnavailable("encoder_bad_response") for another content type."""
        kind, _, boundary = content_type.partition("boundary=")
        if not kind.startswith(MIXED) or not boundary:
            raise _bad_response(f"content-type {content_type[:80]!r}")
        self._delimiter = b"--" + boundary.strip('"').encode()
        self._held = bytearray()
        self._head: dict[str, str] | None = None
        self.ended = False
        """Whether the last delimiter has arrived."""

    def feed(self, data: bytes) -> list[tuple[dict[str, str], bytes]]:
        """Return (headers with names in lower case, body) of every part that is now complete.

        Raises EncoderUnavailable("encoder_bad_response").
        """
        self._held += data
        found = []
        while not self.ended:
            if self._head is None and not self._read_head():
                break
            if self._head is not None:
                size = _length(self._head)
                if len(self._held) < size + 2:
                    break
                found.append((self._head, bytes(self._held[:size])))
                del self._held[: size + 2]
                self._head = None
        return found

    def _read_head(self) -> bool:
        """Return whether the headers of a part or the last delimiter was read."""
        if self._held.startswith(self._delimiter + b"--"):
            self.ended = True
            return True
        at = self._held.find(_END)
        if at < 0:
            if len(self._held) > _MAX_HEAD_BYTES:
                raise _bad_response("the headers of a part are too long")
            return False
        first, *lines = bytes(self._held[:at]).split(b"\r\n")
        if first != self._delimiter:
            raise _bad_response("a part does not start with the delimiter")
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        self._head = {name.strip().lower(): value.strip() for name, _, value in pairs}
        del self._held[: at + len(_END)]
        return True


def _length(head: dict[str, str]) -> int:
    text = head.get("content-length", "")
    if not text.isdigit() or int(text) > _MAX_BODY_BYTES:
        raise _bad_response(f"a part of {text[:20] or 'no'} bytes")
    return int(text)


def _bad_response(why: str) -> EncoderUnavailable:
    return EncoderUnavailable(f"not a response of an encoder service: {why}", reason="encoder_bad_response")


async def exchange(
    http: httpx.AsyncClient,
    method: str,
    url: str,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> HttpAnswer:
    """Return the whole response. Raises httpx.HTTPError, EncoderUnavailable("encoder_bad_response")."""
    headers = {**trace_headers(), **(headers or {})}
    async with http.stream(method, url, timeout=_timeout(timeout_s), headers=headers, **body) as response:
        return await _whole(url, response)


async def stream(
    http: httpx.AsyncClient,
    url: str,
    media: Sequence[MediaPayload],
    fields: Mapping[str, str],
    timeout_s: float,
) -> AsyncGenerator[tuple[int, HttpAnswer], None]:
    """Yield (position, response) of several media in one request, as they arrive. Raises as
    `responses.check` does, and EncoderUnavailable("encoder_bad_response") for a truncated response."""
    files = [(medium.modality, (medium.name, medium.data)) for medium in media]
    headers = {**trace_headers(), "accept": MIXED}
    target = f"{url}/v1/encode"
    async with http.stream(
        "POST", target, timeout=_timeout(timeout_s), headers=headers, data=fields, files=files
    ) as response:
        if response.status_code != 200:
            responses.check(await _whole(target, response))
        parts = MultipartReader(response.headers.get("content-type", ""))
        async for chunk in response.aiter_raw():
            for head, body in parts.feed(chunk):
                yield part_answer(target, head, body)
        if not parts.ended:
            raise EncoderUnavailable(f"{url} sent a truncated response", reason="encoder_bad_response")


def form(model: str, cache_salt: str | None, deadline_s: float, *, inline: bool) -> dict[str, str]:
    """Return the form's fields other than the media."""
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
