"""A short sleep in steps that an engine makes only because copies of pages, or reads from disk, go on.

vLLM asks about them some 650 times a second, in two processes: on a small host that takes the cores from the
copies themselves, from the store, and from the API server to which the next request comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cornplug.vllm_connector.engine_alarm import ALARM, EngineAlarm

REST_S: Final = 1e-3
"""Longest that an engine notices a request, or the end of a copy, later than it would without."""


class IdleRest:
    """One per engine core."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep, alarm: EngineAlarm = ALARM) -> None:
        self._sleep, self._alarm = sleep, alarm
        self._empty = False
        """The last step had nothing to compute."""

    def step(self, *, empty: bool, waits: Callable[[], bool]) -> None:
        """Sleep if this step and the one before are empty, the engine `waits` for cornplug, and no other
        replica waits for the engine.

        After a step that computes, the next one is scheduled while its output is still to come
        (asynchronous scheduling): no token waits for a sleep.
        """
        if empty and self._empty and waits() and not self._alarm.replicas_wait():
            self._sleep(REST_S)
        self._empty = empty
