"""Whether the service takes requests: counts those under way by HTTP, and closes when it is to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from cornplug.encoder_service.http.responses import FailedMedium, refused

CLOSED: Final = FailedMedium(
    reason="draining", message="the service is stopping; ask another one", retry_after_s=1.0
)


class DrainState:
    """For one event loop. What came in before `close` may finish, streams included."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def closed(self) -> bool:
        return self._closed

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Around one request, until the last byte of its answer."""
        self._inside += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self._closed = True

    async def idle(self, deadline_s: float) -> bool:
        """Wait until nobody is inside. False when the deadline passed first."""
        try:
            await asyncio.wait_for(self._idle.wait(), deadline_s)
        except TimeoutError:
            return False
        return True


class DrainMiddleware:
    """ASGI middleware: what is posted passes the gate, or hears that it is closed.

    `still`: ends of paths that requests under way depend on, so they are let in to the end.
    """

    def __init__(
        self,
        app: ASGIApp,
        gate: DrainState,
        still: tuple[str, ...] = (),
        count: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._app = app
        self._count = count
        self._gate = gate
        self._still = still

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"].endswith(self._still):
            await self._app(scope, receive, send)
        elif self._gate.closed:
            self._count(CLOSED.reason)
            await refused(CLOSED)(scope, receive, send)
        else:
            with self._gate.passing():
                await self._app(scope, receive, send)
