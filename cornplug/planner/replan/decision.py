"""Is a new plan worth the change? Only when the running one cannot carry the load, or is clearly dearer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from cornplug.planner.inputs.schema import ChangeRules
from cornplug.planner.pipeline.build_plan import group_name
from cornplug.planner.pipeline.decide import PlanDecision
from cornplug.planner.plan import Plan, ReplicaGroup
from cornplug.planner.replan import plan_diff
from cornplug.planner.replan.plan_diff import PlanStep
from cornplug.planner.report import formatting


@dataclass(frozen=True)
class ReplanDecision:
    act: bool
    reason: str
    steps: tuple[PlanStep, ...]
    saves_per_hour: float
    """Negative where the load has grown."""
    switching_cost: float
    """Dollars, once."""

    @property
    def signature(self) -> tuple[str, ...]:
        """The part on which two windows must agree: the steps and their groups, not numbers of replicas."""
        return tuple(sorted(f"{s.kind} {s.what}" for s in self.steps)) if self.act else ()


def judge(
    old: Plan, decision: PlanDecision, change: ChangeRules, *, same_work: bool = False
) -> ReplanDecision:
    """Whether to change from `old`, the running plan, to `decision`, planned for the observed load.

    `same_work`: only rates differ from those that `old` was made for, so that each replica keeps its
    capacity: it is not simulated anew, which would add chance to the verdict.
    """
    switched = _switched(decision)
    steps = tuple(plan_diff.between(old, decision.plan, switched))
    saves = old.cost_per_hour - decision.plan.cost_per_hour
    cost = _switching_cost(decision)
    over = overloaded(old, decision, same_work=same_work)
    if over:
        name, load = max(over.items(), key=lambda item: item[1])
        limit = formatting.percent(decision.pool.limits.max_utilisation)
        reason = f"{name} would be filled to {formatting.percent(load)}; {limit} is allowed"
        return ReplanDecision(
            bool(steps), reason if steps else f"{reason}, and no step helps", steps, saves, cost
        )
    horizon = change.horizon_hours
    noise = decision.solution.gap * old.cost_per_hour + 1e-6
    gain = f"{_dollars(saves * horizon)} in {horizon:g} h"
    if not any(s.replicas or s.kind == "nodes" for s in steps) or saves <= noise:
        return ReplanDecision(
            False, "nothing worth changing: the running plan carries the load", steps, saves, cost
        )
    if saves * horizon <= change.gain * cost:
        against = f"{change.gain:g} × the {_dollars(cost)} that the change costs"
        return ReplanDecision(
            False, f"nothing worth changing: it would save {gain}, under {against}", steps, saves, cost
        )
    return ReplanDecision(True, f"saves {gain}; the change costs {_dollars(cost)}", steps, saves, cost)


def overloaded(old: Plan, decision: PlanDecision, *, same_work: bool = False) -> dict[str, float]:
    """Group -> its utilisation under the old routes and the new rates and capacities, where too high.

    Infinite where its cell can no longer keep a class's bounds at all.
    """
    loads = {
        g.name: _load(g, old, decision, g.capacity if same_work else _capacity(g, decision))
        for g in old.groups
    }
    limit = decision.pool.limits.max_utilisation
    return {name: load for name, load in loads.items() if load > limit + 1e-6}


def _load(g: ReplicaGroup, old: Plan, decision: PlanDecision, capacity: Mapping[str, float]) -> float:
    """The group's planned utilisation, scaled to the observed rates and capacities."""
    rates = {d.name: d.rate for d in decision.pool.demands}
    planned: dict[str, float] = defaultdict(float)
    totals: dict[str, float] = defaultdict(float)
    for r in old.routes:
        name = f"{r.app}/{r.request}"
        totals[name] += r.rate
        planned[name] += r.rate * max((s.groups.get(g.name, 0.0) for s in r.stages), default=0.0)
    before = after = 0.0
    for name, rate in planned.items():
        if rate <= 0 or name not in g.capacity or name not in rates:
            continue
        before += rate / g.capacity[name]
        if not capacity.get(name):
            return float("inf")
        after += rate * rates[name] / totals[name] / capacity[name]
    return g.utilisation * after / before if before else 0.0


def _capacity(g: ReplicaGroup, decision: PlanDecision) -> Mapping[str, float]:
    """Capacity of one replica: the running plan's, or less where new lengths and hit rates leave less.

    Not more: the derating of the old capacity is not known, and that of the new one belongs to the
    new plan's mixture. Closed forms' capacities are no ground to act on.
    """
    for spec in decision.problem.cells.values():
        if group_name(spec.cell.name) == g.name and (spec.simulated_replicas or not spec.timed):
            now = {name: rate / spec.derating for name, rate in spec.cell.capacity.items()}
            return {name: min(rate, now.get(name, 0.0)) for name, rate in g.capacity.items()}
    return g.capacity


def _switched(decision: PlanDecision) -> dict[tuple[str, str], int]:
    """Role switches by group; another tier of the same processes is none."""
    current = decision.pool.current
    free = current.free if current else frozenset()
    found: dict[tuple[str, str], int] = defaultdict(int)
    for (one, other), n in decision.solution.switched.items():
        if n and (one, other) not in free:
            found[group_name(one), group_name(other)] += n
    return dict(found)


def _switching_cost(decision: PlanDecision) -> float:
    current = decision.pool.current
    if current is None:
        return 0.0
    starts = sum(n * current.start_cost.get(name, 0.0) for name, n in decision.solution.started.items())
    return starts + current.switch_cost * sum(_switched(decision).values())


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}"
