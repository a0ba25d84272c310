"""Compares times from engines' metrics with the times in the plan.

If the plan's times differ from the times of the running engines, another plan does not help, because it would
be computed from the same wrong times.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from cornplug.planner.plan import Plan, ReplicaGroup
from cornplug.planner.replan import attribution
from cornplug.planner.replan.observed_load import HistogramCounts, ObservedWindow
from cornplug.planner.report import formatting

SLOWER: Final = 1.5
"""Ratio of observed to planned mean time above which engines are slow. With `LEAST_REQUESTS` requests and
good profiles, means deviate less."""
LEAST_REQUESTS: Final = 100
"""Minimum number of requests in a window, to exclude cold starts."""
MORE_LOAD: Final = 1.1
"""Ratio of observed to planned rate above which the load explains slow tokens."""

Phase = Literal["prefill", "decode"]
TASK: Final[dict[Phase, str]] = {"prefill": "P", "decode": "D"}


@dataclass(frozen=True)
class SlowEngines:
    """Engines of one scope whose mean TTFT is longer than planned."""

    scope: str
    observed_s: float
    planned_s: float

    @property
    def text(self) -> str:
        engines = self.scope or "the plan's engines"
        times = f"{formatting.seconds(self.observed_s)}, but {formatting.seconds(self.planned_s)} was planned"
        return (
            f"The mean TTFT of {engines} is {times}, and the load does not exceed the plan's. The profiles "
            "do not match these engines. Measure them with `cornplug profile` and plan again."
        )


@dataclass(frozen=True)
class ObservedTime:
    """Mean time of one group's requests in a window, and in the plan's simulation."""

    group: str
    scope: str
    """Scope of the metrics, which covers all of the group's requests, or the requests of some classes."""
    phase: Phase
    seconds: float
    """Mean TTFT (prefill) or TPOT (decode) in seconds."""
    planned_s: float
    requests: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.planned_s


def slow_engines(plan: Plan, windows: Mapping[str, ObservedWindow]) -> Iterator[SlowEngines]:
    """Yield the scopes whose engines are `SLOWER` than in the plan's simulation.

    The plan's TTFT also includes encoding in another service, so the comparison may miss slow engines.
    """
    for scope, window in windows.items():
        planned_s = _planned_s(plan, scope, "prefill") if attribution.does(plan, scope, "P") else None
        if planned_s is None or window.ttft is None or not _comparable(plan, scope, window, window.ttft):
            continue
        if window.ttft.mean > SLOWER * planned_s:
            yield SlowEngines(scope, window.ttft.mean, planned_s)


def of_groups(
    plan: Plan, windows: Mapping[str, ObservedWindow], *, now: float, least_age_s: float
) -> list[ObservedTime]:
    """Return the observed times of groups whose load does not exceed the plan's.

    If several scopes have times of a group, the scope with the most requests is used. Cold engines are
    excluded: groups younger than `least_age_s` at `now` (Unix time), engines that started in the window, and
    engines with few requests. TTFT is also excluded if requests wait for encoding in another service.
    """
    groups = {g.name: g for g in plan.groups}
    found: dict[tuple[str, Phase], ObservedTime] = {}
    for scope, window in windows.items():
        for phase, counts in (("prefill", window.ttft), ("decode", window.tpot)):
            one = _of_group(plan, scope, window, phase, counts)  # type: ignore[arg-type]
            if one is None or _young(groups[one.group], now, least_age_s):
                continue
            if (best := found.get((one.group, one.phase))) is None or best.requests < one.requests:
                found[one.group, one.phase] = one
    return list(found.values())


def _of_group(
    plan: Plan, scope: str, window: ObservedWindow, phase: Phase, counts: HistogramCounts | None
) -> ObservedTime | None:
    group = attribution.sole_group(plan, scope, TASK[phase])
    if group is None or counts is None or window.restarted:
        return None
    if phase == "prefill" and _encoded_elsewhere(plan, scope):
        return None
    planned_s = _planned_s(plan, scope, phase)
    if planned_s is None or not _comparable(plan, scope, window, counts):
        return None
    return ObservedTime(group, scope, phase, counts.mean, planned_s, counts.number)


def _comparable(plan: Plan, scope: str, window: ObservedWindow, counts: HistogramCounts) -> bool:
    """Return whether a window has enough requests, and a rate that does not exceed the planned rate."""
    planned = sum(attribution.planned_rates(plan, scope).values())
    return counts.number >= LEAST_REQUESTS and window.rate <= MORE_LOAD * planned


def _planned_s(plan: Plan, scope: str, phase: Phase) -> float | None:
    """Return a scope's mean time in the plan's simulation, or None if a class has no simulated time."""
    rates = attribution.planned_rates(plan, scope)
    forecasts = {f"{f.app}/{f.request}": f for f in plan.latency_forecasts}
    total = 0.0
    for name, rate in rates.items():
        times = forecasts[name].ttft if phase == "prefill" else forecasts[name].tpot
        if times.mean is None:
            return None
        total += times.mean * rate
    return total / sum(rates.values()) if total else None


def _encoded_elsewhere(plan: Plan, scope: str) -> bool:
    inside = attribution.scopes(plan)[scope]
    routes = [r for r in plan.routes if attribution.class_of(r) in inside]
    return any(stage.tasks == "E" for r in routes for stage in r.stages)


def _young(group: ReplicaGroup, now: float, least_age_s: float) -> bool:
    return group.since is not None and now - group.since < least_age_s
