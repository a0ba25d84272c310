"""Progress line on a terminal while a plan is computed. It shows the phase, and the solver's best plan and
bound."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cornplug.planner.optimizer import optimization_problem
from cornplug.planner.report import formatting

PHASES: Final = {
    "cells": "computing capacities",
    "solve": "solving",
    "confirm": "confirming capacities by simulation",
    "validate": "simulating the whole plan",
    "reasons": "comparing alternatives",
}


class ProgressLine:
    """Line that shows the progress. `decide` and `explain` call `phase` and `watch`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=1.0)
        self._phase = ""

    def phase(self, name: str, share: float) -> None:
        if name != self._phase:
            self._phase = name
            self._progress.reset(self._task, total=1.0, description=PHASES.get(name, name))
        self._progress.update(self._task, completed=min(share, 1.0))

    def watch(self, at: optimization_problem.SolveProgress) -> None:
        self._progress.update(self._task, description=found(at))


def found(at: optimization_problem.SolveProgress) -> str:
    """Describe the solver's progress, as in "solving: 58.2 found, bound 57.9, gap 0.52 %"."""
    bound = "no bound yet" if at.bound is None else f"bound {at.bound:.4g}"
    if at.incumbent is None:
        return f"solving: no plan yet, {bound}"
    said = f"solving: {at.incumbent:.4g} found, {bound}"
    if at.bound is None:
        return said
    gap = abs(at.incumbent - at.bound) / max(abs(at.incumbent), 1e-9)
    return f"{said}, gap {formatting.percent(gap)}"


@contextmanager
def shown(console: Console, *, quiet: bool) -> Iterator[ProgressLine]:
    """Show a progress line for the block, and remove it at the end. Without a terminal, show nothing."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
    )
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        yield ProgressLine(progress)
