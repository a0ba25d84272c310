"""Determines the steps from a running plan to another plan: starts, stops, role switches, nodes and
routing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cornplug.planner.pipeline.current_deployment import of_group
from cornplug.planner.plan import Plan, ReplicaGroup
from cornplug.planner.report import formatting

LEAST_WEIGHT = 0.05
"""Change of a routing weight above which it is reported."""

Kind = Literal["start", "stop", "switch", "nodes", "route"]


@dataclass(frozen=True)
class PlanStep:
    kind: Kind
    what: str
    """Key for deduplicating steps with the same kind and subject."""
    text: str

    @property
    def replicas(self) -> bool:
        """Whether the step starts, stops or switches replicas. A change of only the routing costs nothing."""
        return self.kind in ("start", "stop", "switch")


def between(old: Plan, new: Plan, switched: Mapping[tuple[str, str], int]) -> list[PlanStep]:
    """Return the steps from one plan to another, in order.

    `switched` contains the number of replicas that change their role, by (from group, to group).
    """
    delta: dict[str, int] = defaultdict(int)
    groups = {_place(g): g for plan in (old, new) for g in plan.groups}
    for sign, plan in ((-1, old), (1, new)):
        for g in plan.groups:
            delta[_place(g)] += sign * g.replicas
    by_name = {g.name: g for plan in (old, new) for g in plan.groups}
    steps = []
    for (source, to), n in switched.items():
        one, other = by_name[source], by_name[to]
        delta[_place(one)] += n
        delta[_place(other)] -= n
        how = "drain, then POST /pd_role_switch"
        text = f"switch {n} × {one.service} to {other.service} on {_on(one)} ({how})"
        steps.append(PlanStep("switch", f"{_place(one)} > {_place(other)}", text))
    steps += [PlanStep("start", p, f"start {n} × {_each(groups[p])}") for p, n in delta.items() if n > 0]
    steps += _routing(old, new)
    steps += [PlanStep("stop", p, f"stop {-n} × {_each(groups[p])}") for p, n in delta.items() if n < 0]
    return _nodes(old, new, more=True) + steps + _nodes(old, new, more=False)


def _place(g: ReplicaGroup) -> str:
    return " ".join(map(str, of_group(g)))


def _each(g: ReplicaGroup) -> str:
    weights = "" if g.quantisation == "none" else f", {g.quantisation}"
    shape = formatting.shape(g.parallelism, g.share)
    return f"{g.service} ({g.engine} {shape}{weights}) on {_on(g)}"


def _on(g: ReplicaGroup) -> str:
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
            if abs((weight := after[name].get(key, 0.0)) - before.get(name, {}).get(key, 0.0)) > LEAST_WEIGHT
        }
        if moved:
            said = ", ".join(f"{key} {a:.0%} → {b:.0%}" for key, (a, b) in moved.items())
            steps.append(PlanStep("route", name, f"route {name}: {said}"))
    return steps


def _weights(plan: Plan) -> dict[str, dict[str, float]]:
    """Return the share of each class's requests on each "service on nodes"."""
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
