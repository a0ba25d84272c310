"""Measures how long this engine's prefetches and steps take.

    from launch of a batch until its result is processed            duration and tokens of a step
    from queueing of a prefetch until SGLang notices its end        delay in addition to the copies
    in a storage thread, during copies into the host pool           duration and bytes of the copies

Copies between the host pool and the device are not measured. SGLang runs them in parallel with its forward
pass, and they are several times faster than copies from the store.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cornplug.engine_common.load_policy import LoadRule, LoadWhen

_MAX_QUEUED: Final = 1024
"""Maximum number of requests in the record of pending prefetches. SGLang does not report the end of a
prefetch if the client has disconnected."""


@dataclass(frozen=True, slots=True)
class _QueuedPrefetch:
    queued_s: float
    size_bytes: int
    copied_s: float
    was_alone: bool


class LoadPace:
    """Measures how long prefetches and steps take on one rank.

    Thread-safe, because SGLang's scheduler thread and its storage threads use it.

    Args:
        bytes_per_token: number of bytes that this rank copies per token.
    """

    def __init__(
        self, when: LoadWhen, bytes_per_token: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rule = LoadRule(when, clock)
        self._bytes_per_token = bytes_per_token
        self._clock = clock
        self._lock = threading.Lock()
        self._copied_s = 0.0
        self._queued: OrderedDict[Any, _QueuedPrefetch] = OrderedDict()
        self._step_ended_s = 0.0

    def record_step(self, tokens: int, launched_s: float) -> None:
        """Record that a step of `tokens` tokens, launched at `launched_s`, has just ended."""
        with self._lock:
            # A batch that is launched while the previous batch runs waits until that batch ends.
            now, began_s = self._clock(), max(launched_s, self._step_ended_s)
            self._step_ended_s = now
            self._rule.record_step(tokens, now - began_s)

    def record_copy(self, size_bytes: int, seconds: float) -> None:
        """Record that a storage thread has copied pages."""
        with self._lock:
            self._copied_s += seconds
            self._rule.record_transfer(size_bytes, seconds)

    def record_wait(self, seconds: float) -> None:
        """Record that a storage thread has waited for a disk or a far store (remote storage).

        This time does not count as cost of a load.
        """
        with self._lock:
            self._copied_s += seconds

    def far_wait_s(self, tokens: int) -> float:
        """Return the maximum seconds that a request waits for far stores (see `LoadRule.far_wait_s`)."""
        with self._lock:
            return self._rule.far_wait_s(tokens)

    def pays(self, tokens: int, *, first_s: float = 0.0) -> bool:
        """Return whether fetching `tokens` tokens is faster than computing them. The fetch starts after the
        queued loads and `first_s` seconds of disk reads."""
        with self._lock:
            waiting = sum(queued.size_bytes for queued in self._queued.values())
            size = int(tokens * self._bytes_per_token)
            return self._rule.should_load(
                tokens=tokens, size_bytes=size, queued_bytes=waiting, disk_s=first_s
            )

    def compute_s(self, tokens: int) -> float:
        """Return the estimated seconds for this rank to compute `tokens` tokens, or 0 if no step was
        measured."""
        with self._lock:
            return self._rule.compute_s(tokens) or 0.0

    def record_queued(self, request: Any, tokens: int) -> None:
        """Record that a request waits for a prefetch of `tokens` tokens."""
        with self._lock:
            size = int(tokens * self._bytes_per_token)
            self._queued[request] = _QueuedPrefetch(self._clock(), size, self._copied_s, not self._queued)
            while len(self._queued) > _MAX_QUEUED:
                self._queued.popitem(last=False)

    def record_prefetch_end(self, request: Any) -> None:
        """Record that a request no longer waits for its prefetch."""
        with self._lock:
            found = self._queued.pop(request, None)
            if found is not None and found.was_alone and not self._queued:
                moving_s = self._copied_s - found.copied_s
                self._rule.record_delay(self._clock() - found.queued_s - moving_s)

    def is_waiting(self, request: Any) -> bool:
        """Return whether a request waits for its prefetch."""
        return request in self._queued

    def next_log_message(self) -> str:
        """Return a log message about the measured speeds, or "" if there is nothing new to report."""
        with self._lock:
            return self._rule.speed_report(self._bytes_per_token)
