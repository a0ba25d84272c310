"""Measures the run time of an engine's own tower."""

from __future__ import annotations

import time
from typing import Any

import torch


class TowerClock:
    """Run time of the tower in each step, measured on its device, because a GPU runs asynchronously. Used by
    the engine's thread."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._began: Any = None
        self._ended: Any = None
        self._rows = 0
        self._open: list[tuple[int, Any, Any]] = []

    def begin(self) -> None:
        """Begin a step. The next work of this thread is the tower, if it runs."""
        self._began, self._ended, self._rows = self._now(), None, 0

    def ran(self, rows: int) -> None:
        """Record that the tower computed `rows` more rows."""
        self._ended = self._now()
        self._rows += rows

    def measured(self) -> list[tuple[int, float]]:
        """Return (rows, seconds) of steps that the device has finished."""
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
