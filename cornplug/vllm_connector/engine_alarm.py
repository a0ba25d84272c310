"""Timer that wakes an idle engine core, and a short sleep in steps that compute nothing.

vLLM's core blocks on its input queue while it has no work. Without this timer, an engine that saves pages
after a pause would have to run steps during each pause, hundreds of times per second in two processes. The
timer puts vLLM's own wake-up message into that queue, like vLLM's signal handler.

While page copies or disk reads are in flight, vLLM polls for them about 650 times per second, in two
processes. On a small host this takes CPU time from the copies, the store, and the API server that will
receive the next request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

REST_S: Final = 1e-3
"""Maximum delay that this adds before an engine notices a request or the end of a copy."""


class EngineAlarm:
    """Timer that wakes the engine core. There is one per process. The engine's thread sets it, and a separate
    thread fires it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._has_input: Callable[[], bool] | None = None
        self._in_wave: Callable[[], bool] | None = None
        self._due: float | None = None
        self._rings = False
        """Whether a thread is waiting."""

    def bind(
        self,
        wake: Callable[[], None] | None,
        has_input: Callable[[], bool] | None = None,
        in_wave: Callable[[], bool] | None = None,
    ) -> None:
        """Set the functions of an engine's loop, or None for all after the loop has ended.

        Args:
            wake: wakes the engine.
            has_input: returns whether input is queued.
            in_wave: returns whether each step runs on all data-parallel replicas.
        """
        with self._changed:
            self._wake, self._has_input, self._in_wave = wake, has_input, in_wave
            self._due = None
            self._changed.notify()

    def set(self, seconds: float) -> bool:
        """Wake the engine in `seconds`, and return whether that is possible: only an engine with its own loop
        sleeps.

        A later call postpones the wake-up. There is a single caller, whose delay is constant.
        """
        with self._changed:
            if self._wake is None:
                return False
            self._due = time.monotonic() + seconds
            if not self._rings:
                self._rings = True
                threading.Thread(target=self._ring, name="cornplug-alarm", daemon=True).start()
            return True

    def input_waits(self) -> bool:
        """Return whether a request, or the end of a request, may wait for the engine's next step."""
        has_input = self._has_input
        return has_input is None or has_input()

    def replicas_wait(self) -> bool:
        """Return whether other data-parallel replicas wait for each step. Replicas of a mixture of experts
        compute in step while one of them has a request."""
        in_wave = self._in_wave
        return in_wave is not None and in_wave()

    def _ring(self) -> None:
        """Fire once and end. Pauses are frequent, so a postponed time is checked when the original time has
        passed.
        """
        with self._changed:
            while self._due is not None:
                left = self._due - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            wake = self._wake if self._due is not None else None
            self._due, self._rings = None, False
        if wake is not None:
            wake()


ALARM: Final = EngineAlarm()


def _run_busy_loop(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc

    ALARM.bind(
        lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)),
        lambda: not core.input_queue.empty(),
        lambda: isinstance(core, DPEngineCoreProc) and core.engines_running,
    )
    try:
        return original(core, *args, **kwargs)
    finally:
        ALARM.bind(None)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCoreProc.run_busy_loop", _run_busy_loop),
    ("vllm.v1.engine.core", "DPEngineCoreProc.run_busy_loop", _run_busy_loop),
)


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
