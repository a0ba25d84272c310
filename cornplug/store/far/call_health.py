"""Whether one kind of call to a far store succeeds, and when it may be tried again after a failure."""

from __future__ import annotations

import logging
import time
from typing import Final

from cornplug.store.circuit_breaker import CircuitBreaker

_KIND_S: Final = 1.0
"""The deadline that is passed to the breaker, which keeps its counts by deadline. Each kind of call has its
own breaker, so one value serves all."""
_log = logging.getLogger("cornplug.store")


class CallHealth:
    """Health of the reads, writes or deletions of one far store. Used by the daemon's loop alone.

    Reads, writes and deletions fail separately: a store that is full, or that refuses this host's writes,
    still answers reads.

    Args:
        label: Name of the far store in log lines.
        failing: What the log says when calls begin to fail.
        working: What the log says when calls succeed again.
    """

    def __init__(self, label: str, *, failing: str, working: str) -> None:
        self._label, self._failing, self._working = label, failing, working
        self._breaker = CircuitBreaker()
        self.state: bool | None = None
        """Whether the last call succeeded; None before the first call."""

    def succeeded(self) -> bool:
        """Note a call that succeeded. Returns whether it is the first one after a failure."""
        self._breaker.answered(_KIND_S)
        was, self.state = self.state, True
        if was is False:
            _log.info("far store %s %s again", self._label, self._working)
        return was is False

    def failed(self, why: str) -> None:
        """Note a call that failed, or that is late."""
        if self.state is not False:
            _log.warning("far store %s %s: %s", self._label, self._failing, why)
        self.state = False
        self._breaker.missed(_KIND_S, time.monotonic())

    def refuses(self, now_s: float) -> bool:
        """Whether calls must still pause after a failure."""
        return self._breaker.refuses(_KIND_S, now_s)
