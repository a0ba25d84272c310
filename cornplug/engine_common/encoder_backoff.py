"""Backoff for requests to the encoder service after a failure."""

from __future__ import annotations

from typing import Final

from cornplug.errors import EncoderError

_STEPS_S: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
_NOT_ITS_FAULT: Final = frozenset({"encoder_down", "bad_input", "no_inputs", "shm_cache"})
"""Failures that do not start a backoff: no service is running, or only one image is affected."""


class BackOff:
    """Exponential backoff after a failure of the encoder service.

    Times are seconds of one monotonic clock. Used by one thread.
    """

    def __init__(self) -> None:
        self._ask_after = 0.0
        self._failures = 0

    def spares(self, now: float) -> bool:
        """Return whether requests should skip the service because it failed recently."""
        return now < self._ask_after

    def failed(self, error: EncoderError, now: float) -> None:
        """Record a failure. Requests that were in flight together count as one failure."""
        if error.reason not in _NOT_ITS_FAULT and now >= self._ask_after:
            self._ask_after = now + _STEPS_S[min(self._failures, len(_STEPS_S) - 1)]
            self._failures += 1

    def answered(self) -> None:
        """Record a reply, which ends the backoff."""
        self._ask_after, self._failures = 0.0, 0
