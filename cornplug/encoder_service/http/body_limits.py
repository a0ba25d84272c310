"""ASGI middleware between the socket and the routes: bodies that are too large, too slow or too many.

A body is bounded by its length header or where it passes, has `read_s` seconds to arrive, and all
bodies being received share one budget. (The kernel ends a connection whose client does not read its answer:
`server.Listeners` sets TCP_USER_TIMEOUT.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cornplug.encoder_service.http.responses import FailedMedium, refused
from cornplug.errors import EncoderRefused

_FORM_OVERHEAD_BYTES: Final = 64 << 10


class BodyGuard:
    """Limits in bytes and seconds. A refused request gets a JSON answer, and its connection ends."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_bytes: int,
        max_held_bytes: int,
        read_s: float,
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`count` is called with the reason of each request that is refused before its route."""
        self._app = app
        self._count = count
        self._max_bytes = max_bytes + _FORM_OVERHEAD_BYTES
        self._max_held_bytes = max(max_held_bytes, self._max_bytes)
        self._read_s = read_s
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            self._count("too_large")
            await refused(FailedMedium.of(_too_large(self._max_bytes)))(scope, receive, send)
            return
        end = asyncio.get_running_loop().time() + self._read_s
        seen = 0
        whole = False

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:
                # Only to notice a disconnect, which may come at any time before the answer.
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                problem = f"body: not complete after {self._read_s:g} s"
                raise EncoderRefused(problem, reason="slow_body") from None
            whole = not message.get("more_body", False)
            size = len(message.get("body", b""))
            seen += size
            self._held_bytes += size
            if seen > self._max_bytes:
                raise _too_large(self._max_bytes)
            if self._held_bytes > self._max_held_bytes:
                raise EncoderRefused("too many bytes of requests are held already", reason="overloaded")
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held_bytes -= seen


def _too_large(max_bytes: int) -> EncoderRefused:
    return EncoderRefused(f"body: at most {max_bytes} bytes are accepted", reason="too_large")
