"""uvicorn's HTTP protocol with a deadline for request headers and a limit on connections.

uvicorn waits indefinitely, and accepts connections until the process has no file descriptors left.
`body_limits` sets a deadline for bodies, and uvicorn's keep-alive timeout applies between requests.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S: Final = 10.0
"""A connection without complete request headers is closed after HEAD_S to twice HEAD_S."""
BACKLOG: Final = 128
"""Connections waiting to be accepted. All may be accepted before the first is closed again."""
_MOST: Final = 4096
_FOR_OTHERS: Final = 512
"""File descriptors reserved for engines, replicas, files, fetches, and connections that are being closed."""
_LEAST: Final = 64


def raise_descriptors() -> None:
    """Raise the soft limit of file descriptors to the hard limit, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_allowed() -> int:
    """Return the number of HTTP connections that this process has file descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, soft - _FOR_OTHERS))


class HeadTimeoutProtocol(AutoHTTPProtocol):
    """One connection. Every `HEAD_S` it checks whether a request has started since the last check."""

    most: ClassVar[int] = _MOST
    others: ClassVar[dict[HeadTimeoutProtocol, None]] = {}
    """All connections of this server, oldest first."""

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._before: object = self  # no cycle is it
        self._look: asyncio.TimerHandle = self.loop.call_later(HEAD_S, self._tick)
        if len(self.others) >= self.most:
            self._evicted().transport.abort()
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

    def _evicted(self) -> HeadTimeoutProtocol:
        """Return the connection to close for this one: the oldest idle connection, or else the oldest with
        an incomplete request. Returns this connection if all others wait for replies."""
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
    """Return the protocol class of one server with at most `most` connections."""
    return type("Limited", (HeadTimeoutProtocol,), {"most": most, "others": {}})
