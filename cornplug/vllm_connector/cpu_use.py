"""Reduces the CPU use of vLLM's processes to the level without a connector.

`WakeTimer` wakes an idle engine core. vLLM's engine core blocks on its input queue while it has no work.
Without this timer, an engine that saves pages after a pause would have to run steps during each pause,
hundreds of times per second in two processes. The timer puts vLLM's own wake-up message into that queue, like
vLLM's signal handler.

`IdleBackoff` sleeps briefly in steps that compute nothing. While pages are copied or read from disk, vLLM
polls for their completion about 650 times per second, in two processes. On a small host, this polling takes
CPU time from the copies, the store, and the API server that will receive the next request.

A vLLM worker polls shared memory continuously for one second after each message from its engine core.
cornplug makes an engine run steps while it waits for the encoder service or copies KV. Each of these steps
would start another second of polling. The polling uses a CPU core that another process or engine needs. With
this module, the second begins at the last step with tokens, as in an engine without cornplug.

With any KV connector, an engine on a CPU reserves one more core per worker, intended for NIXL's progress
thread. On a host with two cores, vLLM then reserves no core and computes on both cores. Every other process
interrupts vLLM's threads, which wait for each other at each operation. With this module, vLLM does not
reserve a core for cornplug.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from cornplug.vllm_connector.compat import KV_CONNECTOR

BACKOFF_S: Final = 1e-3
"""Seconds that an idle engine core sleeps in one step. A new request or a completed copy is noticed at most
this much later."""

_RECHECK_MS: Final = 50
"""Maximum milliseconds that a worker waits for a notification before it looks for a message itself."""


class WakeTimer:
    """Timer that wakes this process's engine core. There is one timer per process. The engine's thread sets
    the timer, and a separate thread waits for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._has_input: Callable[[], bool] | None = None
        self._in_wave: Callable[[], bool] | None = None
        self._due_s: float | None = None
        self._is_running = False
        """Whether the timer's thread is running and will wake the engine core."""

    def bind(
        self,
        wake: Callable[[], None] | None,
        has_input: Callable[[], bool] | None = None,
        in_wave: Callable[[], bool] | None = None,
    ) -> None:
        """Bind the timer to an engine's busy loop.

        Args:
            wake: wakes the engine core, or None to unbind the timer after the loop has ended.
            has_input: returns whether the engine core's input queue has messages.
            in_wave: returns whether all data-parallel replicas currently step together.
        """
        with self._changed:
            self._wake, self._has_input, self._in_wave = wake, has_input, in_wave
            self._due_s = None
            self._changed.notify()

    def schedule(self, seconds: float) -> bool:
        """Schedule a wake-up of the engine core after `seconds`. Returns False if the engine does not run its
        own busy loop. Such an engine does not sleep.

        A later call postpones the wake-up. All calls must pass the same delay.
        """
        with self._changed:
            if self._wake is None:
                return False
            self._due_s = time.monotonic() + seconds
            if not self._is_running:
                self._is_running = True
                threading.Thread(target=self._run, name="cornplug-alarm", daemon=True).start()
            return True

    def has_pending_input(self) -> bool:
        """Return whether the input queue contains messages, such as a new request or the abort of a
        request."""
        has_input = self._has_input
        return has_input is None or has_input()

    def has_waiting_replicas(self) -> bool:
        """Return whether other data-parallel replicas wait for this engine's steps. Replicas of a
        mixture-of-experts model compute in lockstep while any replica has a request."""
        in_wave = self._in_wave
        return in_wave is not None and in_wave()

    def _run(self) -> None:
        """Wake the engine core at the due time, then end the timer's thread.

        The thread checks whether the wake-up was postponed only when its original time has passed, because
        pauses are frequent.
        """
        with self._changed:
            while self._due_s is not None:
                left = self._due_s - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            wake = self._wake if self._due_s is not None else None
            self._due_s, self._is_running = None, False
        if wake is not None:
            wake()


WAKE_TIMER: Final = WakeTimer()


class IdleBackoff:
    """Makes an engine core sleep briefly in steps that compute nothing, so that polling does not occupy a
    CPU core."""

    def __init__(
        self, sleep: Callable[[float], None] = time.sleep, wake_timer: WakeTimer = WAKE_TIMER
    ) -> None:
        self._sleep, self._wake_timer = sleep, wake_timer
        self._was_empty = False
        """Whether the last step had nothing to compute."""

    def sleep_if_idle(self, *, is_empty: bool, has_pending_work: Callable[[], bool]) -> None:
        """Sleep for `BACKOFF_S` if this step and the previous step are empty, `has_pending_work()` is true,
        and no other data-parallel replica waits for this engine. `has_pending_work` returns whether the
        engine runs steps only because cornplug has unfinished operations.

        With asynchronous scheduling, vLLM schedules the step after a computing step before the output of the
        computing step arrives. Therefore a single empty step does not sleep.
        """
        if (
            is_empty
            and self._was_empty
            and has_pending_work()
            and not self._wake_timer.has_waiting_replicas()
        ):
            self._sleep(BACKOFF_S)
        self._was_empty = is_empty


class _StepActivity:
    """Activity of this worker process: whether its last step computed tokens, and when its last step with
    tokens began."""

    def __init__(self) -> None:
        self.computes = True
        self.last_compute_s = time.monotonic()
        """Time when the last step with tokens began."""


_activity: Final = _StepActivity()


def record_step_start(*, computes: bool) -> None:
    """Record that this worker process begins a step. `computes` is whether the step computes tokens."""
    _activity.computes = computes
    if computes:
        _activity.last_compute_s = time.monotonic()


def _run_busy_loop(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import DPEngineCoreProc

    WAKE_TIMER.bind(
        lambda: core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None)),
        lambda: not core.input_queue.empty(),
        lambda: isinstance(core, DPEngineCoreProc) and core.engines_running,
    )
    try:
        return original(core, *args, **kwargs)
    finally:
        WAKE_TIMER.bind(None)


def _spin_wait(
    original: Callable[..., None], condition: Any, timeout_ms: int | None = None, *args: Any, **kwargs: Any
) -> None:
    if not _activity.computes and condition.is_reader:
        condition.last_read = min(condition.last_read, _activity.last_compute_s)
        timeout_ms = _RECHECK_MS if timeout_ms is None else min(timeout_ms, _RECHECK_MS)
    original(condition, timeout_ms, *args, **kwargs)


def _reserve_cores_as_stock(
    original: Callable[..., None], manager: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == KV_CONNECTOR:
        config = copy.copy(config)
        config.kv_transfer_config = None
    original(manager, config, *args, **kwargs)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCoreProc.run_busy_loop", _run_busy_loop),
    ("vllm.v1.engine.core", "DPEngineCoreProc.run_busy_loop", _run_busy_loop),
    ("vllm.utils.ompmultiprocessing", "OMPProcessManager.__init__", _reserve_cores_as_stock),
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.wait", _spin_wait),
)
