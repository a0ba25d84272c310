"""One request to one encoder service and its response, over httpx."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Final

import httpx

from cornplug.encoder_service.client import responses
from cornplug.encoder_service.client.encode_many import part_answer
from cornplug.encoder_service.client.media_payload import MediaPayload
from cornplug.encoder_service.client.multipart import MIXED, MultipartReader
from cornplug.encoder_service.client.responses import HttpAnswer
from cornplug.encoder_service.client.trace_headers import trace_headers
from cornplug.errors import EncoderUnavailable

_CONNECT_S: Final = 1.0
"""A host that takes longer to accept a connection counts as down."""
_MAX_ANSWER_BYTES: Final = 1 << 30


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
