"""Audit log: one JSON line for each reload and each refused access, in the logger "cornplug.audit".

At most 10 refusals per second are logged, after a burst of 100. The rest are counted.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final

from starlette.requests import HTTPConnection

AUDITED: Final = frozenset(
    {
        "unauthorized", "forbidden", "forbidden_host", "forbidden_origin", "forbidden_salt",
        "forbidden_receiver",
    }
)  # fmt: skip
"""Reasons of refusals that concern the caller, not the request."""
_BURST: Final = 100
_PER_S: Final = 10.0
_SHOWN: Final = 200

log = logging.getLogger("cornplug.audit")


class AuditLog:
    """Writer of the audit log of one service. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens = float(_BURST)
        self._at = clock()
        self._left_out = 0

    def refused(self, request: HTTPConnection, reason: str) -> None:
        """Log one refusal, unless its reason is not in `AUDITED` or the rate limit is reached."""
        if reason not in AUDITED:
            return
        now = self._clock()
        self._tokens = min(_BURST, self._tokens + (now - self._at) * _PER_S)
        self._at = now
        if self._tokens < 1:
            self._left_out += 1
            return
        self._tokens -= 1
        extra = {"left_out": self._left_out} if self._left_out else {}
        self._left_out = 0
        log.warning("%s", _line("refused", _who(request), reason=reason, **extra))

    def did(self, what: str, request: HTTPConnection, **about: Any) -> None:
        """Log an operator's request that took effect."""
        log.info("%s", _line(what, _who(request), **about))

    def did_here(self, what: str, **about: Any) -> None:
        """Log an operation that a signal started."""
        log.info("%s", _line(what, {"by": "signal"}, **about))


def _who(request: HTTPConnection) -> dict[str, Any]:
    return {
        "peer": request.client.host if request.client is not None else None,
        "method": request.scope.get("method"),
        "path": request.scope["path"][:_SHOWN],
        "host": request.headers.get("host", "")[:_SHOWN],
        "origin": request.headers.get("origin", "")[:_SHOWN],
    }


def _line(event: str, who: dict[str, Any], **about: Any) -> str:
    # JSON escapes line breaks and terminal codes, so a caller's text stays inside its field.
    return json.dumps({"event": event, **who, **about})
