"""`Retry-After` header in responses of vLLM's HTTP server, whose exception handlers set only status and
body."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_LEAST_S: Final = 1.0
_noted: ContextVar[list[float] | None] = ContextVar("cornplug_retry_after", default=None)
"""Delays noted for the current HTTP request."""


def note(seconds: float | None) -> float:
    """Set the delay that the response to this request requests, if its status is 503."""
    pause_s = math.ceil(max(_LEAST_S, seconds or 0.0))
    noted = _noted.get()
    if noted is not None:
        noted.append(pause_s)
    return pause_s


class RetryAfter:
    """ASGI middleware that adds the header for the delay passed to `note`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Tasks of this request have copies of the context, which refer to this same list.
        noted: list[float] = []

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503 and noted:
                MutableHeaders(scope=message)["retry-after"] = f"{max(noted):.0f}"
            await send(message)

        token = _noted.set(noted)
        try:
            await self._app(scope, receive, marked)
        finally:
            _noted.reset(token)


def _init_exception_handler(original: Callable[..., Any], app: Any) -> None:
    original(app)
    app.add_middleware(RetryAfter)


WRAPS: Final[tuple[tuple[str, str, Callable[..., Any]], ...]] = (
    ("vllm.entrypoints.launchers.app", "init_exception_handler", _init_exception_handler),
)
"""Used only in the API processes of an engine without a tower, which have imported this vLLM module."""
