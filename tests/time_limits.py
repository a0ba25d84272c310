"""Upper bounds on durations: the fixture `within`.

    with within(10, "the daemon gives up after 0.25 s"):
        store.start_far_lookup(...)

A busy machine may exceed any bound, so `script/test` asserts no duration: the bounds are checked only if
DEVKIT_CHECK_DURATIONS=1. script/test-more sets it and runs every test that uses the fixture (marker `timed`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pytest

CHECK_VARIABLE: Final = "DEVKIT_CHECK_DURATIONS"


class TimeLimits:
    """Bounds on durations, each with the reason that a failure shows."""

    def __init__(self, *, checked: bool) -> None:
        self._checked = checked

    @classmethod
    def from_environment(cls) -> TimeLimits:
        return cls(checked=os.environ.get(CHECK_VARIABLE) == "1")

    @contextmanager
    def __call__(self, limit_s: float, why: str = "") -> Iterator[None]:
        """Fail if the block takes `limit_s` seconds or longer."""
        began_s = time.monotonic()
        yield
        self.check(time.monotonic() - began_s, limit_s, why)

    @contextmanager
    def cpu(
        self, limit_s: float, why: str = "", *, clock: Callable[[], float] = time.process_time
    ) -> Iterator[None]:
        """Fail if the block takes `limit_s` seconds of CPU time or more.

        Args:
            limit_s: Seconds of CPU time.
            why: Reason for the bound.
            clock: `time.process_time` or `time.thread_time`.
        """
        began_s = clock()
        yield
        self.check(clock() - began_s, limit_s, why)

    def check(self, measured: float, limit: float, why: str = "") -> None:
        """Fail if a figure that was computed from durations reaches the limit."""
        if self._checked and measured >= limit:
            reason = f": {why}" if why else ""
            pytest.fail(f"took {measured:.4g}, must be less than {limit:g}{reason}")
