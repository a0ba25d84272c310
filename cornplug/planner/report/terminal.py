"""Output on a terminal: progress while a plan is computed, and then the plan, its SLO checks and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cornplug.planner.optimizer import optimization_problem
from cornplug.planner.plan import Plan, PlanExplanation
from cornplug.planner.report import formatting

_STYLES = {"good": "green", "bad": "bold red", "soft": "dim"}
PHASES: Final = {
    "cells": "computing capacities",
    "solve": "solving",
    "confirm": "confirming capacities by simulation",
    "validate": "simulating the whole plan",
    "reasons": "comparing alternatives",
}


def show(plan: Plan, console: Console) -> None:
    """Print the plan. Names in the plan are printed as plain text, never parsed as rich's markup."""
    console.print(_head(plan))
    for title, body in _sections(plan):
        console.print()
        console.print(Text(title, style="bold"))
        console.print(Padding(body, (0, 0, 0, 2)))


def _head(plan: Plan) -> Text:
    head = Text.assemble((plan.name, "bold"), "  ", formatting.headline(plan))
    found = f"{formatting.proof(plan.proof)} · {plan.proof.solver}, {plan.proof.seconds:.1f} s"
    return head.append(f"\n{plan.objective}: {found}", style="dim")


def _sections(plan: Plan) -> Iterator[tuple[str, RenderableType]]:
    yield "Replicas", _groups(plan)
    yield "Routes", _routes(plan)
    yield "Latency forecast", _forecast(plan)
    if any(f.job for f in plan.latency_forecasts):
        yield "Jobs", _jobs(plan)
    if plan.hours:
        yield "Hours of the day", _hours(plan)
    if plan.caches:
        yield "Caches", _caches(plan)
    if plan.reservations:
        yield "Classes of service", _reservations(plan)
    yield from _explanation(plan.explanation)


def _table(*columns: str, right: frozenset[str] = frozenset()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return table


def _groups(plan: Plan) -> Group:
    table = _table(
        "replicas", "service", "engine", "GPU", "size", "weights", "load", "times", right=frozenset({"load"})
    )
    for g in plan.groups:
        mark = formatting.profile_origin(g.profile)
        table.add_row(
            Text(f"{formatting.replicas(g)} ×"),
            Text(g.service),
            Text(g.engine),
            Text(f"{g.gpu} ({g.nodes})"),
            formatting.shape(g.parallelism, g.share),
            Text("bf16" if g.quantisation == "none" else g.quantisation),
            formatting.percent(g.utilisation),
            Text(mark, style="yellow" if mark == "ESTIMATE" else "green"),
        )
    return Group(table, *(Text(said, style="dim") for said in formatting.unneeded_gpu_notes(plan)))


def _routes(plan: Plan) -> Table:
    services = {g.name: f"{g.service} on {g.nodes}" for g in plan.groups}
    table = _table("requests", "rate", "structure", "through", right=frozenset({"rate"}))
    for r in plan.routes:
        through = " → ".join(
            ", ".join(
                services.get(g, g) + (f" {formatting.percent(w)}" if len(stage.groups) > 1 else "")
                for g, w in stage.groups.items()
            )
            for stage in r.stages
        )
        table.add_row(Text(f"{r.app}/{r.request}"), formatting.rate(r.rate), Text(r.structure), Text(through))
    return table


def _forecast(plan: Plan) -> Table:
    table = _table("requests", "", "bound", "simulated", "", right=frozenset({"bound"}))
    for c in formatting.slo_checks(plan):
        said, how = formatting.verdict(c)
        table.add_row(
            Text(c.demand),
            c.name,
            c.bound_text,
            c.simulated_text,
            Text(said, style=_STYLES[how]),
        )
    for o in plan.latency_forecasts:
        if o.served < o.rate * (1 - 1e-6):
            short = f"{formatting.rate(o.served)} of {formatting.rate(o.rate)}"
            table.add_row(Text(f"{o.app}/{o.request}"), "served", short, style="yellow")
    return table


def _jobs(plan: Plan) -> Table:
    table = _table("requests", "", "")
    for f in plan.latency_forecasts:
        if f.job is not None:
            done = f.job.done_hours
            said = "unknown" if done is None else "kept" if done <= f.job.deadline_hours else "MISSED"
            style = {"kept": "good", "MISSED": "bad"}.get(said, "soft")
            job = Text(formatting.job(f.job))
            table.add_row(Text(f"{f.app}/{f.request}"), job, Text(said, style=_STYLES[style]))
    return table


def _hours(plan: Plan) -> Group:
    table = _table("hours", "needed", "can be returned", "cost", right=frozenset({"cost"}))
    for part in formatting.day_parts(plan):
        table.add_row(
            part.hours, Text(part.needed), Text(part.releasable), formatting.dollars(part.cost_per_hour)
        )
    return Group(table, Text(formatting.day_cost(plan), style="dim"))


def _caches(plan: Plan) -> Table:
    table = _table("cache", "of", "GiB", "hits", right=frozenset({"GiB"}))
    for c in plan.caches:
        hits = ", ".join(f"{name} {formatting.percent(h)}" for name, h in c.hit_rate.items())
        table.add_row(
            Text(f"{c.name} ({c.kind})"), Text(c.component), "" if c.gib is None else f"{c.gib:g}", Text(hits)
        )
    return table


def _reservations(plan: Plan) -> Table:
    table = _table("class", "share", "priority", "deadline")
    for r in plan.reservations:
        table.add_row(
            Text(r.qos), formatting.percent(r.share), str(r.priority), formatting.seconds(r.deadline_s)
        )
    return table


def _explanation(explanation: PlanExplanation) -> Iterator[tuple[str, RenderableType]]:
    if explanation.binding:
        table = _table("constraint", "", "without it")
        for b in explanation.binding:
            saves = "" if b.saves_per_hour is None else f"saves {formatting.dollars(b.saves_per_hour)}"
            table.add_row(Text(b.constraint, style="bold"), Text(b.text), saves)
        yield "Constraints that determine the cost", table
    if explanation.alternatives:
        table = _table("instead", "", "cost", right=frozenset({"cost"}))
        for a in explanation.alternatives:
            cost = formatting.dollars(a.cost_per_hour) if a.cost_per_hour is not None else "impossible"
            table.add_row(Text(a.name, style="bold"), Text(a.reason_against or a.text), cost)
        yield "Alternatives", table
    if explanation.curve:
        table = _table("every bound ×", "cost", right=frozenset({"every bound ×", "cost"}))
        for p in explanation.curve:
            cost = formatting.dollars(p.cost_per_hour) if p.cost_per_hour is not None else "impossible"
            table.add_row(f"{p.slo_factor:g}", cost)
        yield "Cost by SLO", table
    if explanation.monolith:
        yield "Monolith", Text(explanation.monolith)
    if explanation.notes:
        yield "Notes", Group(*(Text(f"· {note}") for note in explanation.notes))


class ProgressLine:
    """Line that shows the progress. `decide` and `explain` call `set_phase` and `set_solver_progress`."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("reading", total=1.0)
        self._phase = ""

    def set_phase(self, name: str, share: float) -> None:
        if name != self._phase:
            self._phase = name
            self._progress.reset(self._task, total=1.0, description=PHASES.get(name, name))
        self._progress.update(self._task, completed=min(share, 1.0))

    def set_solver_progress(self, progress: optimization_problem.SolveProgress) -> None:
        self._progress.update(self._task, description=solver_progress(progress))


def solver_progress(progress: optimization_problem.SolveProgress) -> str:
    """Describe the solver's progress, as in "solving: 58.2 found, bound 57.9, gap 0.52 %"."""
    bound = "no bound yet" if progress.bound is None else f"bound {progress.bound:.4g}"
    if progress.incumbent is None:
        return f"solving: no plan yet, {bound}"
    said = f"solving: {progress.incumbent:.4g} found, {bound}"
    if progress.bound is None:
        return said
    gap = abs(progress.incumbent - progress.bound) / max(abs(progress.incumbent), 1e-9)
    return f"{said}, gap {formatting.percent(gap)}"


@contextmanager
def show_progress(console: Console, *, quiet: bool) -> Iterator[ProgressLine]:
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
