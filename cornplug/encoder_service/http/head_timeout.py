"""uvicorn's HTTP protocol, with a deadline for request heads and a bound on connections: uvicorn waits
for ever, and takes connections until the process has no descriptor left for anything.

Bodies have their deadline in `body_guard`; between requests uvicorn's own keep-alive timeout counts.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S: Final = 10.0
"""Within at most twice this, a connection has sent a whole request head, or it is closed."""
BACKLOG: Final = 128
"""Connections that wait to be taken; all of them may be, before the first is closed again."""
_MOST: Final = 4096
_FOR_OTHERS: Final = 512
"""Descriptors kept for engines, replicas, files, fetches, and connections that are being closed."""
_LEAST: Final = 64


def raise_descriptors() -> None:
    """Let this process have as many descriptors as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_allowed() -> int:
    """HTTP connections that this process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, soft - _FOR_OTHERS))


class HeadTimeoutProtocol(AutoHTTPProtocol):
    """One connection. Looks every `HEAD_S` whether a request has begun since it last looked."""

    most: ClassVar[int] = _MOST
    others: ClassVar[dict[HeadTimeoutProtocol, None]] = {}
    """All connections of this server, the oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._before: object = self  # no cycle is it
        self._look: asyncio.TimerHandle = self.loop.call_later(HEAD_S, self._tick)
        if len(self.others) >= self.most:
            self._spared().transport.abort()
        self.others[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        self.others.pop(self, None)
        super().connection_lost(exc)

    def _tick(self) -> None:
        cycle: Any = self.cycle
        idle = cycle is None or cycle.response_complete
        if idle and cycle is self._before:
            self.transport.close()
            return
        self._before = cycle
        self._look = self.loop.call_later(HEAD_S, self._tick)

    def _spared(self) -> HeadTimeoutProtocol:
        """Whom to close for this one: who asks nothing, then who has not sent its whole request, the
        longest there first; and this one where all the others wait for answers."""
        begun = None
        for one in self.others:
            cycle: Any = one.cycle
            if one.transport.is_closing():
                continue
            if cycle is None or cycle.response_complete:
                return one
            if begun is None and cycle.more_body and not cycle.response_started:
                begun = one
        return begun or self


def limited(most: int) -> type[HeadTimeoutProtocol]:
    """The protocol of one server with at most so many connections."""
    return type("Limited", (HeadTimeoutProtocol,), {"most": most, "others": {}})
