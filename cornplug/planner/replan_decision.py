"""Decision whether to change to a new plan or to correct profiles, with the steps of the change.

The steps are starts, stops, role switches, nodes and routing. A change is recommended only if the running
plan is overloaded, or clearly more expensive than the new plan.

Observed times are compared with the plan's times, to decide whether to correct profiles. If the plan's
times differ from the times of the running engines, another plan does not help, because it would be computed
from the same wrong times. Times are corrected if two consecutive windows agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cornplug.planner import observed_load
from cornplug.planner.inputs.schema import ChangeRules
from cornplug.planner.observed_load import HistogramCounts, ObservedWindow
from cornplug.planner.pipeline.build_plan import group_name
from cornplug.planner.pipeline.decide import PlanDecision
from cornplug.planner.pipeline.formulate import group_key
from cornplug.planner.plan import Plan, PlannedGroup, TimesCorrection
from cornplug.planner.report import formatting

SLOW_RATIO: Final = 1.5
"""Ratio of observed to planned mean time above which engines are slow. With `MIN_REQUESTS` requests and
good profiles, means deviate less."""
MIN_REQUESTS: Final = 100
"""Minimum number of requests in a window, to exclude cold starts."""
MAX_LOAD_RATIO: Final = 1.1
"""Ratio of observed to planned rate above which the load explains slow tokens."""

Phase = Literal["prefill", "decode"]
TASK_OF_PHASE: Final[dict[Phase, str]] = {"prefill": "P", "decode": "D"}
DEVIATION_RATIO: Final = 1.2
"""Ratio of observed to planned time, or its inverse, at which times are corrected."""
NEUTRAL_TOLERANCE: Final = 0.05
MIN_WEIGHT_CHANGE = 0.05
"""Minimum change of a routing weight that is reported."""
Kind = Literal["start", "stop", "switch", "nodes", "route"]


@dataclass(frozen=True)
class SlowEngines:
    """Engines of one scope whose mean TTFT is longer than planned."""

    scope: str
    observed_s: float
    planned_s: float

    @property
    def text(self) -> str:
        engines = self.scope or "the plan's engines"
        planned = formatting.format_seconds(self.planned_s)
        times = f"{formatting.format_seconds(self.observed_s)}, but {planned} was planned"
        return (
            f"The mean TTFT of {engines} is {times}. The load is not above the planned load. The profiles "
            "do not match these engines. Measure them with `cornplug profile` and plan again."
        )


@dataclass(frozen=True)
class ObservedTime:
    """Mean time of one group's requests in a window, and in the plan's simulation."""

    group: str
    scope: str
    """Scope of the metrics. It covers all requests of the group, or the group's requests of some classes."""
    phase: Phase
    seconds: float
    """Mean TTFT (prefill) or TPOT (decode) in seconds."""
    planned_s: float
    requests: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.planned_s


def slow_engines(plan: Plan, windows: Mapping[str, ObservedWindow]) -> Iterator[SlowEngines]:
    """Yield the scopes whose mean TTFT exceeds the simulated TTFT by more than the factor `SLOW_RATIO`.

    The plan's TTFT also includes encoding in another service, so the comparison may miss slow engines.
    """
    for scope, window in windows.items():
        planned_s = (
            _planned_s(plan, scope, "prefill") if observed_load.scope_does_task(plan, scope, "P") else None
        )
        if planned_s is None or window.ttft is None or not _comparable(plan, scope, window, window.ttft):
            continue
        if window.ttft.mean > SLOW_RATIO * planned_s:
            yield SlowEngines(scope, window.ttft.mean, planned_s)


def times_of_groups(
    plan: Plan, windows: Mapping[str, ObservedWindow], *, now: float, min_age_s: float
) -> list[ObservedTime]:
    """Return the observed times of groups whose load does not exceed the planned load.

    If several scopes have times of a group, the scope with the most requests is used. Times are omitted for
    groups younger than `min_age_s` at `now` (Unix time), for engines that started in the window, and for
    engines with few requests. TTFT is also omitted if requests wait for encoding in another service.
    """
    groups = {g.name: g for g in plan.groups}
    found: dict[tuple[str, Phase], ObservedTime] = {}
    for scope, window in windows.items():
        for phase, counts in (("prefill", window.ttft), ("decode", window.tpot)):
            one = _group_time(plan, scope, window, phase, counts)  # type: ignore[arg-type]
            if one is None or _young(groups[one.group], now, min_age_s):
                continue
            if (best := found.get((one.group, one.phase))) is None or best.requests < one.requests:
                found[one.group, one.phase] = one
    return list(found.values())


def _group_time(
    plan: Plan, scope: str, window: ObservedWindow, phase: Phase, counts: HistogramCounts | None
) -> ObservedTime | None:
    group = observed_load.sole_group(plan, scope, TASK_OF_PHASE[phase])
    if group is None or counts is None or window.restarted:
        return None
    if phase == "prefill" and _encoded_elsewhere(plan, scope):
        return None
    planned_s = _planned_s(plan, scope, phase)
    if planned_s is None or not _comparable(plan, scope, window, counts):
        return None
    return ObservedTime(group, scope, phase, counts.mean, planned_s, counts.value_count)


def _comparable(plan: Plan, scope: str, window: ObservedWindow, counts: HistogramCounts) -> bool:
    """Return whether a window can be compared with the plan: it has enough requests, and its rate does not
    exceed the planned rate."""
    planned = sum(observed_load.planned_rates(plan, scope).values())
    return counts.value_count >= MIN_REQUESTS and window.rate <= MAX_LOAD_RATIO * planned


def _planned_s(plan: Plan, scope: str, phase: Phase) -> float | None:
    """Return a scope's mean time in the plan's simulation, or None if a class has no simulated time."""
    rates = observed_load.planned_rates(plan, scope)
    forecasts = {f.class_name: f for f in plan.latency_forecasts}
    total = 0.0
    for name, rate in rates.items():
        times = forecasts[name].ttft if phase == "prefill" else forecasts[name].tpot
        if times.mean is None:
            return None
        total += times.mean * rate
    return total / sum(rates.values()) if total else None


def _encoded_elsewhere(plan: Plan, scope: str) -> bool:
    inside = observed_load.scopes(plan)[scope]
    routes = [r for r in plan.routes if r.class_name in inside]
    return any(stage.tasks == "E" for r in routes for stage in r.stages)


def _young(group: PlannedGroup, now: float, min_age_s: float) -> bool:
    return group.since is not None and now - group.since < min_age_s


def ratios(observed: Sequence[ObservedTime]) -> dict[str, float]:
    """Return a window's ratios of observed to planned times, which the next window needs."""
    return {_time_key(one): one.ratio for one in observed}


def times_to_correct(
    observed: Sequence[ObservedTime], last: Mapping[str, float], explained: Mapping[str, float]
) -> list[ObservedTime]:
    """Return all measured times of a window if at least one predicted time has to be corrected, otherwise
    [].

    A predicted time has to be corrected if the ratio of measured to predicted time has changed by at least
    `DEVIATION_RATIO` since the current corrections were determined, in the same direction in this window and
    in the last one. All times are returned, because a correction of prefill also changes decode. `last`
    contains the ratios of the last window. `explained` contains the ratios that led to the current
    corrections.
    """
    for one in observed:
        name, usual = _time_key(one), explained.get(_time_key(one), 1.0)
        side = _deviation_sign(one.ratio / usual)
        if side and side == _deviation_sign(last.get(name, usual) / usual):
            return list(observed)
    return []


def drop_neutral_corrections(corrections: Sequence[TimesCorrection]) -> list[TimesCorrection]:
    """Return the corrections that have an effect.

    If an engine matches its profile again, its factors return to about 1.
    """
    return [c for c in corrections if max(abs(c.prefill - 1), abs(c.decode - 1)) > NEUTRAL_TOLERANCE]


def _deviation_sign(ratio: float) -> int:
    return (ratio >= DEVIATION_RATIO) - (ratio <= 1 / DEVIATION_RATIO)


def _time_key(observed: ObservedTime) -> str:
    return f"{observed.group} {observed.phase}"


def correction_text(correction: TimesCorrection) -> str:
    weights = "" if correction.quantisation == "none" else f", {correction.quantisation}"
    shape = formatting.format_shape(correction.parallelism, correction.share)
    where = f"{correction.service} ({correction.engine} {shape}{weights}) on {correction.gpu}"
    return (
        f"Corrected from metrics: {where} takes {correction.prefill:.2g} x the profile's time for prefill "
        f"and {correction.decode:.2g} x for decode."
    )


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
        limit = formatting.format_percent(decision.pool.limits.max_utilisation)
        utilisation = formatting.format_percent(load)
        reason = f"the utilisation of {name} would be {utilisation}, but at most {limit} is allowed"
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
        name = r.class_name
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
    shape = formatting.format_shape(g.parallelism, g.share)
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
        name = r.class_name
        rates[name] += r.rate
        for stage in r.stages:
            for group, weight in stage.groups.items():
                found[name][services.get(group, group)] += r.rate * weight
    return {name: {k: v / rates[name] for k, v in w.items()} for name, w in found.items() if rates[name]}
