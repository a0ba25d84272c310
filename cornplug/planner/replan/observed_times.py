"""Comparison of times in engines' metrics with the times in the plan, to decide whether to correct profiles.

If the plan's times differ from the times of the running engines, another plan does not help, because it would
be computed from the same wrong times. Times are corrected if two consecutive windows agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cornplug.planner.plan import Plan, PlannedGroup, TimesCorrection
from cornplug.planner.replan import observed_load
from cornplug.planner.replan.observed_load import HistogramCounts, ObservedWindow
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
    """Yield the scopes whose engines are `SLOW_RATIO` than in the plan's simulation.

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
    """Return whether a window has enough requests, and a rate that does not exceed the planned rate."""
    planned = sum(observed_load.planned_rates(plan, scope).values())
    return counts.value_count >= MIN_REQUESTS and window.rate <= MAX_LOAD_RATIO * planned


def _planned_s(plan: Plan, scope: str, phase: Phase) -> float | None:
    """Return a scope's mean time in the plan's simulation, or None if a class has no simulated time."""
    rates = observed_load.planned_rates(plan, scope)
    forecasts = {f"{f.app}/{f.request}": f for f in plan.latency_forecasts}
    total = 0.0
    for name, rate in rates.items():
        times = forecasts[name].ttft if phase == "prefill" else forecasts[name].tpot
        if times.mean is None:
            return None
        total += times.mean * rate
    return total / sum(rates.values()) if total else None


def _encoded_elsewhere(plan: Plan, scope: str) -> bool:
    inside = observed_load.scopes(plan)[scope]
    routes = [r for r in plan.routes if observed_load.class_of(r) in inside]
    return any(stage.tasks == "E" for r in routes for stage in r.stages)


def _young(group: PlannedGroup, now: float, min_age_s: float) -> bool:
    return group.since is not None and now - group.since < min_age_s


def ratios(observed: Sequence[ObservedTime]) -> dict[str, float]:
    """Return a window's ratios of observed to planned times, which the next window needs."""
    return {_name(one): one.ratio for one in observed}


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
        name, usual = _name(one), explained.get(_name(one), 1.0)
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


def _name(observed: ObservedTime) -> str:
    return f"{observed.group} {observed.phase}"


def correction_text(correction: TimesCorrection) -> str:
    weights = "" if correction.quantisation == "none" else f", {correction.quantisation}"
    shape = formatting.shape(correction.parallelism, correction.share)
    where = f"{correction.service} ({correction.engine} {shape}{weights}) on {correction.gpu}"
    return (
        f"Corrected from metrics: {where} takes {correction.prefill:.2g} x the profile's time for prefill "
        f"and {correction.decode:.2g} x for decode."
    )
