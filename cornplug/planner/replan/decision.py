"""Decision whether to change to a new plan, with the steps: starts, stops, role switches, nodes, routing.

A change is recommended only if the running plan is overloaded, or clearly more expensive than the new plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cornplug.planner.inputs.schema import ChangeRules
from cornplug.planner.pipeline.build_plan import group_name
from cornplug.planner.pipeline.current_deployment import group_key
from cornplug.planner.pipeline.decide import PlanDecision
from cornplug.planner.plan import Plan, PlannedGroup
from cornplug.planner.report import formatting

MIN_WEIGHT_CHANGE = 0.05
"""Change of a routing weight above which it is reported."""
Kind = Literal["start", "stop", "switch", "nodes", "route"]


@dataclass(frozen=True)
class ReplanDecision:
    change_recommended: bool
    reason: str
    steps: tuple[PlanStep, ...]
    saves_per_hour: float
    """Savings in dollars per hour. Negative if the new plan is more expensive."""
    switching_cost: float
    """One-time cost of the change in dollars."""

    @property
    def signature(self) -> tuple[str, ...]:
        """Steps and their groups, without numbers of replicas. A change is recommended only if two
        consecutive windows have equal signatures."""
        return tuple(sorted(f"{s.kind} {s.subject}" for s in self.steps)) if self.change_recommended else ()


def decide_change(
    old: Plan, decision: PlanDecision, change: ChangeRules, *, only_rates_differ: bool = False
) -> ReplanDecision:
    """Decide whether to change from the running plan `old` to `decision`, which was planned for the observed
    load.

    `only_rates_differ` is True if only rates differ from the input of `old`. In this case, the replicas'
    capacities from `old` are used, because new simulations would add noise to the decision.
    """
    switched = _role_switches(decision)
    steps = tuple(_plan_steps(old, decision.plan, switched))
    saves = old.cost_per_hour - decision.plan.cost_per_hour
    cost = _switching_cost(decision)
    over = overloaded_groups(old, decision, only_rates_differ=only_rates_differ)
    if over:
        name, load = max(over.items(), key=lambda item: item[1])
        limit = formatting.percent(decision.pool.limits.max_utilisation)
        reason = (
            f"the utilisation of {name} would be {formatting.percent(load)}, but at most {limit} is allowed"
        )
        return ReplanDecision(
            bool(steps), reason if steps else f"{reason}, and no step reduces it", steps, saves, cost
        )
    horizon = change.horizon_hours
    noise = decision.solution.gap * old.cost_per_hour + 1e-6
    gain = f"{_dollars(saves * horizon)} in {horizon:g} h"
    if not any(s.changes_replicas or s.kind == "nodes" for s in steps) or saves <= noise:
        return ReplanDecision(
            False, "no change pays off: the running plan can serve the load", steps, saves, cost
        )
    if saves * horizon <= change.gain * cost:
        against = f"{change.gain:g} × the cost of the change ({_dollars(cost)})"
        return ReplanDecision(
            False,
            f"no change pays off: the new plan would save {gain}, which is not more than {against}",
            steps,
            saves,
            cost,
        )
    return ReplanDecision(True, f"saves {gain}; the change costs {_dollars(cost)}", steps, saves, cost)


def overloaded_groups(
    old: Plan, decision: PlanDecision, *, only_rates_differ: bool = False
) -> dict[str, float]:
    """Return the utilisation of the overloaded groups, with the old routes and the new rates and capacities.

    The utilisation is infinite if a group can no longer meet a class's bounds.
    """
    loads = {
        g.name: _load(g, old, decision, g.capacity if only_rates_differ else _capacity(g, decision))
        for g in old.groups
    }
    limit = decision.pool.limits.max_utilisation
    return {name: load for name, load in loads.items() if load > limit + 1e-6}


def _load(g: PlannedGroup, old: Plan, decision: PlanDecision, capacity: Mapping[str, float]) -> float:
    """Return the group's planned utilisation, scaled to the observed rates and capacities."""
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


def _capacity(g: PlannedGroup, decision: PlanDecision) -> Mapping[str, float]:
    """Return the capacity of one replica: the minimum of the capacity in the running plan and the simulated
    capacity with the observed lengths and hit rates.

    The capacity does not increase, because the factor by which the old capacity was reduced is not known.
    Capacities from closed forms are not used.
    """
    for spec in decision.problem.cells.values():
        if group_name(spec.cell.name) == g.name and (spec.simulated_replicas or not spec.has_times):
            now = {name: rate / spec.derating for name, rate in spec.cell.capacity.items()}
            return {name: min(rate, now.get(name, 0.0)) for name, rate in g.capacity.items()}
    return g.capacity


def _role_switches(decision: PlanDecision) -> dict[tuple[str, str], int]:
    """Return the number of role switches by (from group, to group), without switches that change only the
    tier."""
    current = decision.pool.current
    free = current.free_switches if current else frozenset()
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
    return starts + current.switch_cost * sum(_role_switches(decision).values())


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}"


@dataclass(frozen=True)
class PlanStep:
    kind: Kind
    subject: str
    """Key for deduplicating steps with the same kind and subject."""
    text: str

    @property
    def changes_replicas(self) -> bool:
        """Whether the step starts, stops or switches replicas. A change of only the routing has no cost."""
        return self.kind in ("start", "stop", "switch")


def _plan_steps(old: Plan, new: Plan, switched: Mapping[tuple[str, str], int]) -> list[PlanStep]:
    """Return the steps from one plan to another, in order.

    `switched` contains the number of replicas that change their role, by (from group, to group).
    """
    delta: dict[str, int] = defaultdict(int)
    groups = {_group_key_text(g): g for plan in (old, new) for g in plan.groups}
    for sign, plan in ((-1, old), (1, new)):
        for g in plan.groups:
            delta[_group_key_text(g)] += sign * g.replicas
    by_name = {g.name: g for plan in (old, new) for g in plan.groups}
    steps = []
    for (source, to), n in switched.items():
        one, other = by_name[source], by_name[to]
        delta[_group_key_text(one)] += n
        delta[_group_key_text(other)] -= n
        how = "drain, then POST /pd_role_switch"
        text = f"switch {n} × {one.service} to {other.service} on {_describe_gpu(one)} ({how})"
        steps.append(PlanStep("switch", f"{_group_key_text(one)} > {_group_key_text(other)}", text))
    steps += [
        PlanStep("start", p, f"start {n} × {_describe_replica(groups[p])}") for p, n in delta.items() if n > 0
    ]
    steps += _routing(old, new)
    steps += [
        PlanStep("stop", p, f"stop {-n} × {_describe_replica(groups[p])}") for p, n in delta.items() if n < 0
    ]
    return _nodes(old, new, more=True) + steps + _nodes(old, new, more=False)


def _group_key_text(g: PlannedGroup) -> str:
    return " ".join(map(str, group_key(g)))


def _describe_replica(g: PlannedGroup) -> str:
    weights = "" if g.quantisation == "none" else f", {g.quantisation}"
    shape = formatting.shape(g.parallelism, g.share)
    return f"{g.service} ({g.engine} {shape}{weights}) on {_describe_gpu(g)}"


def _describe_gpu(g: PlannedGroup) -> str:
    return f"{g.gpu} ({g.nodes})"


def _nodes(old: Plan, new: Plan, *, more: bool) -> list[PlanStep]:
    """Return the steps that add nodes (with `more`) or release nodes."""
    delta: dict[str, int] = defaultdict(int)
    for sign, plan in ((-1, old), (1, new)):
        for n in plan.nodes:
            delta[n.name] += sign * n.count
    verb = "add" if more else "release"
    return [
        PlanStep("nodes", name, f"{verb} {abs(n)} × {name}")
        for name, n in delta.items()
        if (n > 0 if more else n < 0)
    ]


def _routing(old: Plan, new: Plan) -> list[PlanStep]:
    before, after = _weights(old), _weights(new)
    steps = []
    for name in sorted(after):
        moved = {
            key: (before.get(name, {}).get(key, 0.0), weight)
            for key in sorted({*before.get(name, {}), *after[name]})
            if abs((weight := after[name].get(key, 0.0)) - before.get(name, {}).get(key, 0.0))
            > MIN_WEIGHT_CHANGE
        }
        if moved:
            said = ", ".join(f"{key} {a:.0%} → {b:.0%}" for key, (a, b) in moved.items())
            steps.append(PlanStep("route", name, f"route {name}: {said}"))
    return steps


def _weights(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the share of each class's requests by service and node class, with keys "SERVICE on NODES"."""
    services = {g.name: f"{g.service} on {g.nodes}" for g in plan.groups}
    rates: dict[str, float] = defaultdict(float)
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for r in plan.routes:
        name = f"{r.app}/{r.request}"
        rates[name] += r.rate
        for stage in r.stages:
            for group, weight in stage.groups.items():
                found[name][services.get(group, group)] += r.rate * weight
    return {name: {k: v / rates[name] for k, v in w.items()} for name, w in found.items() if rates[name]}
