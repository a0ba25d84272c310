"""ASGI middleware between the socket and the routes: limits on the size, time, number and shape of bodies.

    head   Content-Length must not exceed the path's limit.
    body   Each piece is checked before it is kept: the bytes of the body, the bytes of all bodies of its
           class, and for JSON the number of values, because a parser makes objects of fifty times their size.
    time   The whole body must arrive within `BODY_DEADLINE_S` seconds.

(The kernel ends a connection whose client does not read its reply, because `server.BoundListeners` sets
TCP_USER_TIMEOUT.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cornplug.config import EncoderConfig
from cornplug.encoder_service.http.access_control import ENGINES, SEAL
from cornplug.encoder_service.http.responses import FailedMedium, refused
from cornplug.encoder_service.preprocess.byte_budget import ByteBudget
from cornplug.encoder_service.wire import engine_seal
from cornplug.errors import EncoderRefused
from cornplug.qos import QosClasses

BODY_DEADLINE_S: Final = 30.0
"""Maximum time in seconds for receiving the body of an HTTP request."""
_HELD_BYTES: Final = 1 << 30
"""Maximum bytes of all bodies in memory at the same time, unless `_LEAST_BODIES` bodies need more. Half is
divided among the classes of service by their shares, and a quarter is reserved for engines."""
_LEAST_BODIES: Final = 4
"""Minimum capacity of the budget, in bodies of the maximum size."""
MAX_VIDEO_IMAGES: Final = 4096
"""Maximum number of images in a video that is sent as images."""
_FORM_OVERHEAD_BYTES: Final = 64 << 10
_SMALL_BYTES: Final = 64 << 10
"""Maximum bytes of a body on a route that does not accept media."""
_MAX_MEDIA: Final = 256
"""Maximum number of media in one request. Only SGLang's servers send several (`sglang.wire.EncodePart`)."""
_QUOTES_A_MEDIUM: Final = 32
"""Maximum number of quotation marks for one medium. It has at most five fields, each with four quotation
marks for the name and the value."""
_BRACKETS_A_MEDIUM: Final = 4
_ENGINES_SHARE: Final = 0.25
_CLASSES_SHARE: Final = 0.5


class JsonShape:
    """Counter of quotation marks, brackets and commas in a JSON text that arrives in pieces.

    The number of marks bounds the number and depth of the values. `add` raises EncoderRefused("too_large") if
    there are more marks than a valid request can have.
    """

    def __init__(self) -> None:
        quotes = _QUOTES_A_MEDIUM * _MAX_MEDIA
        self._left = {
            (b'"',): quotes,
            (b"[", b"{"): _BRACKETS_A_MEDIUM * _MAX_MEDIA,
            (b",",): MAX_VIDEO_IMAGES * _MAX_MEDIA + quotes,
        }

    def add(self, piece: bytes) -> None:
        """Count the marks in the next piece of the text."""
        for marks, left in self._left.items():
            left -= sum(map(piece.count, marks))
            if left < 0:
                raise EncoderRefused("body: more values than a request can have", reason="too_large")
            self._left[marks] = left


def body_budget(classes: QosClasses, config: EncoderConfig) -> ByteBudget:
    """Return the budget for the bytes of incoming bodies."""
    return ByteBudget(
        {qos: _CLASSES_SHARE * qos.share for qos in classes.all()} | {ENGINES: _ENGINES_SHARE},
        max(_HELD_BYTES, _LEAST_BODIES * (config.max_body_bytes + _FORM_OVERHEAD_BYTES)),
        purpose="to receive it",
    )


class BodyGuard:
    """Middleware that limits the bytes, duration and values of bodies. A refused request gets a JSON reply,
    and its connection is closed."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        classes: QosClasses,
        held: ByteBudget,
        max_bytes: int,
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Create the middleware.

        Args:
            held: Budget that counts the bytes of bodies in memory.
            max_bytes: Maximum bytes of a body with media.
            count: Called with the reason of each request that is refused because of its Content-Length.
        """
        self._app = app
        self._count = count
        self._classes = classes
        self._max_bytes = max_bytes + _FORM_OVERHEAD_BYTES
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        max_bytes = self._max_bytes if _takes_media(scope["path"]) else _SMALL_BYTES
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > max_bytes:
            self._count("too_large")
            await refused(FailedMedium.of(_too_large(max_bytes)))(scope, receive, send)
            return
        shape = None if _is_opaque(scope["path"], headers) else JsonShape()
        qos = ENGINES if SEAL in scope else self._classes.of_headers(headers).qos
        end = asyncio.get_running_loop().time() + BODY_DEADLINE_S
        seen = 0
        whole = False

        async def counted() -> Message:
            nonlocal seen, whole
            if whole:
                # The body is complete, so this only waits for a disconnect, at any time before the reply.
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                problem = f"body: not complete after {BODY_DEADLINE_S:g} s"
                raise EncoderRefused(problem, reason="slow_body") from None
            whole = not message.get("more_body", False)
            piece = message.get("body", b"")
            seen += len(piece)
            if seen > max_bytes:
                raise _too_large(max_bytes)
            held.need(seen)
            if shape is not None:
                shape.add(piece)
            return message

        with self._held.share(qos) as held:
            await self._app(scope, counted, send)


def _takes_media(path: str) -> bool:
    """Return whether the path is /v1/encode, /v1/engine, or SGLang's /encode and /sglang/MODEL/encode."""
    return path.endswith("/encode") or path == engine_seal.PATH


def _is_opaque(path: str, headers: Headers) -> bool:
    """Return whether the body is a form or sealed bytes. All other bodies are parsed as JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "multipart/form-data" or path == engine_seal.PATH


def _too_large(max_bytes: int) -> EncoderRefused:
    return EncoderRefused(f"body: larger than the limit of {max_bytes} bytes", reason="too_large")
