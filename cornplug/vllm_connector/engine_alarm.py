"""Wakes an engine core that sleeps until its next request.

vLLM's core blocks on its input queue while it has no work. Without an alarm, an engine that may save after
a pause would have to step through each pause, hundreds of times a second in two processes. The alarm puts
vLLM's own wake-up into that queue, as its signal handler does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final


class EngineAlarm:
    """One per process; set by the engine's thread, and rung by a thread of its own."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._has_input: Callable[[], bool] | None = None
        self._in_wave: Callable[[], bool] | None = None
        self._due: float | None = None
        self._rings = False
        """A thread waits for the time."""

    def bind(
        self,
        wake: Callable[[], None] | None,
        has_input: Callable[[], bool] | None = None,
        in_wave: Callable[[], bool] | None = None,
    ) -> None:
        """Take the functions of an engine's loop; all None when it has ended.

        Args:
            wake: wakes the engine.
            has_input: whether input waits for it.
            in_wave: whether each of its steps is one of all data-parallel replicas.
        """
        with self._changed:
            self._wake, self._has_input, self._in_wave = wake, has_input, in_wave
            self._due = None
            self._changed.notify()

    def set(self, seconds: float) -> bool:
        """Whether the engine is woken in `seconds`: only a loop of its own sleeps.

        A later call puts it off. It is for one caller, whose time is always the same.
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
        """Whether a request, or the end of one, may wait for the engine's next step."""
        has_input = self._has_input
        return has_input is None or has_input()

    def replicas_wait(self) -> bool:
        """Whether other data-parallel replicas wait for each step: those of a mixture of experts compute in
        step while one of them has a request."""
        in_wave = self._in_wave
        return in_wave is not None and in_wave()

    def _ring(self) -> None:
        """Ring once and end. Pauses are many: a time that was put off is seen when the first one is up."""
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
