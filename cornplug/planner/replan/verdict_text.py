"""Creates the output of `cornplug replan`: the decision and the observed values."""

from __future__ import annotations

from dataclasses import dataclass

from cornplug.planner.plan import Plan, TimesCorrection
from cornplug.planner.replan import learned_times
from cornplug.planner.replan.decision import ReplanDecision
from cornplug.planner.replan.plan_diff import PlanStep
from cornplug.planner.replan.workload_update import FigureDifference


@dataclass(frozen=True)
class WindowFindings:
    """Deviations from the plan in the metrics of a window."""

    differences: tuple[FigureDifference, ...]
    slow: tuple[str, ...]
    """Messages about engines that are slower than planned."""
    corrections: tuple[TimesCorrection, ...] = ()
    """Corrections of profiles' times that the running plan does not contain."""


def lines(old: Plan, new: Plan, told: WindowFindings, verdict: ReplanDecision, *, agreed: bool) -> list[str]:
    """Return the lines to print. This is a single line if no action is required and no time deviates."""
    times = [*told.slow, *map(learned_times.text, told.corrections)]
    if not verdict.act:
        return [f"{verdict.reason[0].upper()}{verdict.reason[1:]}.", *times]
    if not agreed:
        waiting = (
            f"This window calls for a change ({verdict.reason}). Waiting for the next window to confirm it."
        )
        return [waiting, *times]
    said = [f"Change: {verdict.reason}."]
    said += [f"  {d.demand}: {d.what} {_figure(d.planned)} → {_figure(d.observed)}" for d in told.differences]
    said += [f"{n}. {step.text}" for n, step in enumerate(verdict.steps, 1)]
    said.append(f"Cost: ${old.cost_per_hour:,.2f}/h → ${new.cost_per_hour:,.2f}/h")
    return [*said, *times]


def as_json(told: WindowFindings, verdict: ReplanDecision, *, agreed: bool) -> dict[str, object]:
    return {
        "act": agreed,
        "waiting": verdict.act and not agreed,
        "reason": verdict.reason,
        "saves_per_hour": verdict.saves_per_hour,
        "switching_cost": verdict.switching_cost,
        "observed": [vars(d) for d in told.differences],
        "slow": list(told.slow),
        "corrections": [c.model_dump() for c in told.corrections],
        "steps": [_step(s) for s in verdict.steps] if verdict.act else [],
    }


def _step(step: PlanStep) -> dict[str, str]:
    return {"kind": step.kind, "text": step.text}


def _figure(value: float) -> str:
    return f"{value:.3g}"
