"""Cost of a plan's SLOs: the plan's cost with looser and tighter bounds.

The input is planned again with other bounds, without simulation, until the solver work is used up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from cornplug.errors import PlanInfeasible, PlanUnfinished
from cornplug.planner.inputs.schema import Application, PlanInput
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.plan import BindingConstraint, CurvePoint
from cornplug.planner.report.counterfactual import ExplanationBudget

FACTORS: Final = (0.7, 1.5, 0.5, 2.0, 3.0)
"""Factors that multiply every bound, most important first. The plan itself has the factor 1."""
LOOSER_FACTOR: Final = 1.5
"""Factor that multiplies one application's bounds to find what the bounds cost."""
SOLVE_WORK: Final = 2.0
"""Solver work for one plan, in the unit of `SolverOptions.work`."""
FORMULATION_WORK: Final = 0.5
"""Solver work that is counted for computing a plan's cells again, in addition to its solve."""


@dataclass
class SloSweep:
    """Repeated planning of the same input with other bounds, until the budget is used up."""

    plan_input: PlanInput
    budget: ExplanationBudget
    skipped: list[str] = field(default_factory=list)
    """Names of the questions that were skipped because the solver work was used up."""
    timed_out: list[str] = field(default_factory=list)
    """Names of the questions whose search was ended by the time limit."""

    def cost(self, name: str, applications: list[Application]) -> SweepCost | None:
        """Plan these applications without simulation, and return the cost, or None if the remaining work does
        not suffice.
        """
        work = min(SOLVE_WORK, self.budget.remaining - FORMULATION_WORK)
        if work <= 0:
            self.skipped.append(name)
            return None
        self.budget.spend(FORMULATION_WORK)
        changed = self.plan_input.model_copy(
            update={
                "applications": applications,
                "rules": self.plan_input.rules.model_copy(update={"simulate": False}),
                "solver": self.plan_input.solver.model_copy(update={"work": work}),
            }
        )
        try:
            decision = decide(changed, digest="")
        except PlanInfeasible:
            return SweepCost(None)
        except PlanUnfinished:
            self.budget.spend(work)
            self.skipped.append(name)
            return None
        if decision.solution.timed_out:
            self.timed_out.append(name)
        self.budget.spend(decision.solution.work)
        return SweepCost(decision.plan.cost_per_hour)


@dataclass(frozen=True)
class SweepCost:
    per_hour: float | None
    """Dollars per hour, or None if no plan meets the bounds."""


def compute_curve(sweep: SloSweep, cost: float) -> list[CurvePoint]:
    """Return the cost for each factor on the bounds, in ascending order. `cost` is the cost of the plan, at
    factor 1."""
    found = {1.0: SweepCost(cost)}
    for factor in FACTORS:
        one = sweep.cost(f"SLO × {factor:g}", scale_bounds(sweep.plan_input.applications, factor))
        if one is not None:
            found[factor] = one
    return list(monotone_points(found))


def monotone_points(found: Mapping[float, SweepCost]) -> Iterator[CurvePoint]:
    """Yield the points of the curve, adjusted so that the cost does not rise with looser bounds.

    A plan that meets tighter bounds also meets looser bounds. It therefore replaces a more expensive plan
    from a solve that was stopped early. The point at factor 1 is always the plan itself.
    """
    least = inf
    for factor, one in sorted(found.items()):
        cost = inf if one.per_hour is None else one.per_hour
        least = cost if factor == 1 else min(cost, least)
        yield CurvePoint(slo_factor=factor, cost_per_hour=None if least == inf else least)


def slo_prices(sweep: SloSweep, cost: float, noise: float) -> Iterator[BindingConstraint]:
    """Yield a constraint for each application whose bounds increase the cost, with the saving that looser
    bounds would bring. Savings up to `noise` are ignored."""
    for app in (applications := sweep.plan_input.applications):
        if not has_bounds(applications, app.name):
            continue
        name = f"slo[{app.name}]"
        found = sweep.cost(name, scale_bounds(applications, LOOSER_FACTOR, app.name))
        if found is not None and found.per_hour is not None and cost - found.per_hour > noise:
            yield BindingConstraint(
                constraint=name,
                text=f"with its bounds {LOOSER_FACTOR:g} times as loose",
                slack=0.0,
                saves_per_hour=cost - found.per_hour,
            )


def scale_bounds(
    applications: Iterable[Application], factor: float, app: str | None = None
) -> list[Application]:
    """Return the applications with the bounds of `app`, or of every application if it is None, multiplied by
    `factor`."""
    return [_scale_app_bounds(a, factor) if app in (None, a.name) else a for a in applications]


def has_bounds(applications: Iterable[Application], app: str | None = None) -> bool:
    """Return whether `app`, or any application if it is None, has a bound."""
    apps = [a for a in applications if app in (None, a.name)]
    return any(slo.has_bounds for a in apps for slo in (a.slo, *(r.slo for r in a.requests if r.slo)))


def _scale_app_bounds(app: Application, factor: float) -> Application:
    requests = [r.model_copy(update={"slo": r.slo.scaled(factor)}) if r.slo else r for r in app.requests]
    return app.model_copy(update={"slo": app.slo.scaled(factor), "requests": requests})
