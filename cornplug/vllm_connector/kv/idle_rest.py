"""A short sleep in steps that an engine runs only because page copies or disk reads are in flight.

vLLM polls for them about 650 times per second, in two processes. On a small host this takes CPU time from the
copies, the store, and the API server that will receive the next request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from cornplug.vllm_connector.engine_alarm import ALARM, EngineAlarm

REST_S: Final = 1e-3
"""Maximum delay that this adds before an engine notices a request or the end of a copy."""


class IdleRest:
    """Idle sleeps of one engine core."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep, alarm: EngineAlarm = ALARM) -> None:
        self._sleep, self._alarm = sleep, alarm
        self._empty = False
        """Whether the last step had nothing to compute."""

    def step(self, *, empty: bool, waits: Callable[[], bool]) -> None:
        """Sleep if this step and the previous one are empty, the engine `waits` for cornplug, and no other
        replica waits for the engine.

        With asynchronous scheduling, the step after a step that computes is scheduled before that step's
        output arrives. Therefore a single empty step does not sleep.
        """
        if empty and self._empty and waits() and not self._alarm.replicas_wait():
            self._sleep(REST_S)
        self._empty = empty
