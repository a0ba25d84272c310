"""Graceful drain: counts the HTTP requests in flight, and refuses new requests while the service stops."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from cornplug.encoder_service.http.responses import HttpRefusal, refusal_response

DRAINING_REFUSAL: Final = HttpRefusal(
    reason="draining", message="the service is stopping; use another service", retry_after_s=1.0
)


class DrainState:
    """Counts the requests in flight. Use it from one event loop. Requests and streams that started before
    `close` may finish."""

    def __init__(self) -> None:
        self._in_flight = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_closed(self) -> bool:
        return self._closed

    @contextlib.contextmanager
    def track_request(self) -> Iterator[None]:
        """Count one request as in flight. The context must last until the last byte of the reply has been
        sent."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    def close(self) -> None:
        """Refuse new requests from now on."""
        self._closed = True

    async def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no request is in flight. Returns False if the deadline passes first."""
        try:
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        except TimeoutError:
            return False
        return True


class DrainMiddleware:
    """ASGI middleware that counts POST requests in flight. After `close`, it refuses new POST requests.

    `still` contains path suffixes that are never refused, because requests in flight depend on them.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: DrainState,
        still: tuple[str, ...] = (),
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._app = app
        self._count_refusal = count
        self._state = gate
        self._exempt_suffixes = still

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or scope["path"].endswith(self._exempt_suffixes)
        ):
            await self._app(scope, receive, send)
        elif self._state.is_closed:
            self._count_refusal(DRAINING_REFUSAL.reason)
            await refusal_response(DRAINING_REFUSAL)(scope, receive, send)
        else:
            with self._state.track_request():
                await self._app(scope, receive, send)
