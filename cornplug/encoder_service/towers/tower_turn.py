"""Schedules tower passes on one device. One pass runs at a time. A pass can be paused or ended between two
layers.

Without pauses, a pass for one huge image, which may take minutes, would block all other passes.

    pass of a worse class   layer layer ┆ ─ paused ─ ┆ layer layer          abandoned by all its callers: ends
    pass of a better class              ┆layer…layer ┆

A paused pass continues before the next urgent pass if it has run for less than its class's share of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

_thread: Final = threading.local()


class PassAbandoned(Exception):
    """Raised to end a pass for which no caller waits any more."""


def between_layers(*_: Any) -> None:
    """Allow this thread's pass to be paused or ended. Registered as a forward pre-hook of a tower's layers.

    Raises PassAbandoned if no caller waits for the pass any more.
    """
    current: TowerPass | None = getattr(_thread, "current", None)
    if current is not None:
        current.between_layers()


class TowerPass:
    """Running or paused pass of a tower."""

    def __init__(
        self, scheduler: PassScheduler, *, urgent: bool, share: float, is_abandoned: Callable[[], bool]
    ) -> None:
        self._scheduler = scheduler
        self._share = share
        self._is_abandoned = is_abandoned
        self._began_s = scheduler.clock()
        self.urgent: Final = urgent
        self.waited_s = 0.0
        """Seconds for which the pass waited for the device before it began."""
        self.paused_s = 0.0
        """Seconds for which the pass was paused while urgent passes ran."""

    def between_layers(self) -> None:
        """Pause while urgent passes run. Raises PassAbandoned if no caller waits for this pass any more."""
        if self._is_abandoned():
            raise PassAbandoned("no request waits for this pass")
        if not self.urgent:
            self._scheduler.yield_to_urgent(self)

    @property
    def is_below_share(self) -> bool:
        """Whether the pass has run for less than its share of the time since it began."""
        whole_s = self._scheduler.clock() - self._began_s
        return whole_s - self.paused_s < self._share * whole_s


class PassScheduler:
    """Schedules the passes on one device. Thread-safe. At most one urgent pass at a time may wait or run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock: Final = clock
        self._changed = threading.Condition()
        self._busy = False
        self._paused = False
        self._granted = False
        """Whether a pass has paused for an urgent pass that has not begun yet."""
        self._urgent = 0
        """Number of urgent passes that wait for the device."""

    @contextmanager
    def acquire(self, *, urgent: bool, share: float, is_abandoned: Callable[[], bool]) -> Iterator[TowerPass]:
        """Wait for the device, and occupy the device for this thread's pass for the duration of the context.

        Args:
            urgent: Whether this pass overtakes waiting passes, and pauses the running pass between two
                layers.
            share: Fraction of the time that this pass gets while urgent passes run.
            is_abandoned: Function that returns whether no caller waits for this pass any more.
        """
        asked_s = self.clock()
        with self._changed:
            self._urgent += urgent
            self._changed.wait_for(self._can_start_urgent if urgent else self._can_start)
            self._urgent -= urgent
            self._granted = False
            self._busy = True
        _thread.current = current = TowerPass(self, urgent=urgent, share=share, is_abandoned=is_abandoned)
        current.waited_s = self.clock() - asked_s
        try:
            yield current
        finally:
            _thread.current = None
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def yield_to_urgent(self, current: TowerPass) -> None:
        """Let waiting urgent passes run on their threads, and return when this pass may continue."""
        with self._changed:
            while self._urgent and not current.is_below_share:
                began_s = self.clock()
                self._busy, self._paused, self._granted = False, True, True
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._busy and not self._granted)
                self._busy, self._paused = True, False
                current.paused_s += self.clock() - began_s

    def _can_start(self) -> bool:
        return not (self._busy or self._paused or self._urgent)

    def _can_start_urgent(self) -> bool:
        return not self._busy and (self._granted or not self._paused)
