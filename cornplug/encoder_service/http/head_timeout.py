"""uvicorn's HTTP protocol, with a deadline for request heads and a limit of connections: uvicorn waits
without limit, and accepts connections until the process has no descriptor left.

Bodies have their deadline in `body_limits`; between requests uvicorn's keep-alive timeout applies.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.auto import AutoHTTPProtocol

HEAD_S: Final = 10.0
"""A connection without a complete request head is closed after HEAD_S to twice HEAD_S."""
BACKLOG: Final = 128
"""Connections waiting to be accepted; all may be accepted before the first is closed again."""
_MOST: Final = 4096
_FOR_OTHERS: Final = 512
"""Descriptors kept for engines, replicas, files, fetches, and connections that are being closed."""
_LEAST: Final = 64


def raise_descriptors() -> None:
    """Raise the soft limit of descriptors to the hard limit, at most 65,536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def connections_allowed() -> int:
    """HTTP connections that this process has descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, soft - _FOR_OTHERS))


class HeadTimeoutProtocol(AutoHTTPProtocol):
    """One connection. Checks every `HEAD_S` whether a request has begun since the last check."""

    most: ClassVar[int] = _MOST
    others: ClassVar[dict[HeadTimeoutProtocol, None]] = {}
    """All connections of this server, the oldest first."""

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
        """The connection to close for this one: the oldest idle one, else the oldest with an incomplete
        request; this one if all others wait for answers."""
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
    """The protocol of one server with at most `most` connections."""
    return type("Limited", (HeadTimeoutProtocol,), {"most": most, "others": {}})
