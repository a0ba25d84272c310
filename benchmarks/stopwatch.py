"""Durations of the engine's thread, on the clock and on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeVar

T = TypeVar("T")
STEP_S: Final = 0.010


class Row(NamedTuple):
    what: str
    ms: float
    """Median or mean, of the engine's thread; `cpu_ms` is without its waits for the store."""
    cpu_ms: float
    note: str = ""


class Stopwatch:
    """Durations of a repeated call, on the clock and on the CPU."""

    def __init__(self) -> None:
        self.took: list[tuple[float, float]] = []

    def __call__(self, run: Callable[[], T]) -> T:
        began, cpu = time.perf_counter(), time.thread_time()
        result = run()
        self.took.append((time.perf_counter() - began, time.thread_time() - cpu))
        return result

    def row(self, what: str, note: str = "") -> Row:
        """The medians. `note` may hold the place `{step}` for the share of a step."""
        return self._row(what, note, statistics.median)

    def mean_row(self, what: str, note: str = "") -> Row:
        """As `row`, with the means: of steps that differ, as one of several does the work of all."""
        return self._row(what, note, statistics.fmean)

    def _row(self, what: str, note: str, average: Callable[[Sequence[float]], float]) -> Row:
        ms, cpu_ms = (1e3 * average(each) for each in zip(*self.took, strict=True))
        return Row(what, ms, cpu_ms, note.format(step=f"{ms / STEP_S / 10:.1f}"))
