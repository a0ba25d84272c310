"""The time that an engine's own tower takes, as its device sees it."""

from __future__ import annotations

import time
from typing import Any

import torch


class TowerClock:
    """How long the tower takes in a step, as its device sees it: a GPU has not begun when Python has
    gone on. Used by the engine's thread."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._ended: Any = None
        self._rows = 0
        self._open: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        """Begin a step: the next work of this thread is the tower, if it runs at all."""
        self._began, self._ended, self._rows = self._now(), None, 0

    def ran(self, rows: int) -> None:
        """The tower has made these too."""
        self._ended = self._now()
        self._rows += rows

    def measured(self) -> list[tuple[int, float]]:
        """(rows, seconds) of steps whose end the device has reached."""
        if self._rows and self._began is not None:
            self._open.append((self._rows, self._began, self._ended))
            self._began, self._rows = None, 0
        done = [one for one in self._open if not self._cuda or one[2].query()]
        self._open = [one for one in self._open if one not in done]
        return [(rows, self._between(began, ended)) for rows, began, ended in done]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1e3 if self._cuda else float(ended - began)
