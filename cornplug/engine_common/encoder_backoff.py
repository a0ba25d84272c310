"""When to ask the encoder service again after it failed."""

from __future__ import annotations

from typing import Final

from cornplug.errors import EncoderError

_STEPS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
_NOT_ITS_FAULT: Final = frozenset({"encoder_down", "bad_input", "no_inputs", "shm_cache"})
"""Failures without a wait (no service), or of one image alone."""


class BackOff:
    """After a failure that is the service's, spare the next requests the wait, ever longer.

    Times are of one monotonic clock, in seconds. Used by one thread.
    """

    def __init__(self) -> None:
        self._ask_after = 0.0
        self._failures = 0

    def spares(self, now: float) -> bool:
        """Whether the service failed a moment ago and is not to be asked."""
        return now < self._ask_after

    def failed(self, error: EncoderError, now: float) -> None:
        """Those that were under way together fail together: one failure."""
        if error.reason not in _NOT_ITS_FAULT and now >= self._ask_after:
            self._ask_after = now + _STEPS_S[min(self._failures, len(_STEPS_S) - 1)]
            self._failures += 1

    def answered(self) -> None:
        """It works again."""
        self._ask_after, self._failures = 0.0, 0
