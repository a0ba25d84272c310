"""uvicorn's HTTP protocol, with a deadline for request heads: uvicorn itself waits for ever.

Bodies have their deadline in `body_guard`; between requests uvicorn's own keep-alive timeout counts.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S: Final = 10.0
"""Within at most twice this, a connection has sent a whole request head, or it is closed."""


class Impatient(AutoHTTPProtocol):
    """One connection. Looks every `HEAD_S` whether a request has begun since it last looked."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._before: object = self  # no cycle is it
        self._look: asyncio.TimerHandle = self.loop.call_later(HEAD_S, self._tick)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _tick(self) -> None:
        cycle: Any = self.cycle
        idle = cycle is None or cycle.response_complete
        if idle and cycle is self._before:
            self.transport.close()
            return
        self._before = cycle
        self._look = self.loop.call_later(HEAD_S, self._tick)
