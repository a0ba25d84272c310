"""Calibration of profiles' times with the times that engines report.

The simulation of the running plan matches the observed times if profiles' times are multiplied by factors.
If the first token takes twice as long, prefill does not necessarily take twice as long, because waits grow
faster than the work. Therefore the plan is simulated with the observed load, and the factors of all groups
are fitted together. The logarithm of a time is nearly linear in the logarithm of its factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import Final

from cornplug.planner import observed_load
from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.candidates.replica_configs import PRIORITY
from cornplug.planner.candidates.timed_configs import (
    ProfileKey,
    corrected_times,
    corrections_by_key,
    neutral_correction,
    profile_key,
    profile_key_of,
)
from cornplug.planner.inputs.request_sampling import RequestClass
from cornplug.planner.perf_model.simulator import Delays, TrafficClass
from cornplug.planner.perf_model.stations import Station
from cornplug.planner.pipeline import validate
from cornplug.planner.pipeline.formulate import FormulatedProblem, find_cell
from cornplug.planner.pipeline.validate import SimulatedTimes, delays
from cornplug.planner.plan import Plan, PlanRoute, TimesCorrection
from cornplug.planner.replan_decision import ObservedTime, Phase

MAX_ROUNDS: Final = 6
MATCH_TOLERANCE: Final = 0.03
"""Maximum difference of logarithms at which the simulated time matches the observed time."""
EXPLAINED_TOLERANCE: Final = 0.1
"""Difference of logarithms, after all rounds, above which no factor explains the observed time. The time is
then not corrected."""
MIN_FINISHED_SHARE: Final = 0.93
"""Share of requests that must finish while requests arrive. If fewer finish, the simulated plan is
overloaded."""
MIN_LOG_FACTOR: Final = 0.05
"""Logarithm of a factor below which the factor is not used."""
MIN_SLOPE, MAX_SLOPE = 0.5, 8.0
"""Limits of a time's slope over its factor, in logarithms. The slope is small if other work dominates, and
large near saturation."""
MAX_LOG_FACTOR: Final = log(5.0)
REQUESTS: Final = 4000
"""Number of requests in one simulation."""


@dataclass
class _FactorEstimate:
    """Factor to determine, as its logarithm, and the results of simulations with this factor."""

    observed: ObservedTime
    log_factor: float = 0.0
    log_error: float = inf
    """Logarithm of observed time / simulated time."""
    slope: float = 1.0
    overloaded: bool = False
    """Whether queues grow throughout the simulation with this factor, so that the simulated times are not
    usable."""
    _last: tuple[float, float] | None = None
    """(logarithm of the previous factor, `log_error` with this factor)."""

    def record_simulation(self, simulated_s: float) -> None:
        if simulated_s <= 0:
            return
        self.log_error = log(self.observed.seconds / simulated_s)
        if self._last is not None and abs(self.log_factor - self._last[0]) > 1e-6:
            slope = (self._last[1] - self.log_error) / (self.log_factor - self._last[0])
            self.slope = min(max(slope, MIN_SLOPE), MAX_SLOPE)
        self._last = (self.log_factor, self.log_error)

    def update_factor(self) -> None:
        if self.log_error == inf:
            return
        self.log_factor = min(
            max(self.log_factor + self.log_error / self.slope, -MAX_LOG_FACTOR), MAX_LOG_FACTOR
        )


def calibrate(
    problem: FormulatedProblem, running: Plan, observed: Sequence[ObservedTime]
) -> list[TimesCorrection]:
    """Return corrections of the observed groups' profiles.

    Observed times that no factor explains have no correction. `problem` contains the observed load, and the
    corrections that currently apply.
    """
    simulation = _Simulation.create(problem, running)
    unknowns = [_FactorEstimate(one) for one in observed if simulation.includes(one)]
    for i in range(MAX_ROUNDS if unknowns else 0):
        if i:
            for one in unknowns:
                one.update_factor()
        simulation.update(unknowns)
        if all(abs(one.log_error) <= MATCH_TOLERANCE for one in unknowns):
            break
    return _corrections(problem, running, unknowns)


def _corrections(
    problem: FormulatedProblem, running: Plan, unknowns: Sequence[_FactorEstimate]
) -> list[TimesCorrection]:
    groups = {g.name: g for g in running.groups}
    earlier, found = corrections_by_key(problem.corrections), dict[ProfileKey, dict[str, float]]()
    for one in sorted(unknowns, key=lambda one: -one.observed.requests):
        if one.overloaded or abs(one.log_error) > EXPLAINED_TOLERANCE or abs(one.log_factor) < MIN_LOG_FACTOR:
            continue
        at = profile_key_of(groups[one.observed.group])
        before = getattr(earlier[at], one.observed.phase) if at in earlier else 1.0
        # If two groups share a profile, the group with more requests determines the factor.
        found.setdefault(at, {}).setdefault(one.observed.phase, round(before * exp(one.log_factor), 3))
    return [
        earlier.get(at, neutral_correction(at)).model_copy(update=factors) for at, factors in found.items()
    ]


@dataclass(frozen=True)
class _Simulation:
    """Simulation of the running plan with the observed load."""

    running: Plan
    cells: Mapping[str, CellSpec]
    """Cell by group, for groups whose times are known."""
    routes: Sequence[PlanRoute]
    """Routes of the classes that visit only groups in `cells`."""
    classes: Mapping[str, TrafficClass]
    delays: Delays
    seed: int

    @classmethod
    def create(cls, problem: FormulatedProblem, running: Plan) -> _Simulation:
        specs = {g.name: find_cell(g, problem.cells.values()) for g in running.groups}
        cells = {name: spec for name, spec in specs.items() if spec is not None and spec.has_times}
        routes_of: dict[str, list[PlanRoute]] = {}
        for r in running.routes:
            routes_of.setdefault(r.class_name, []).append(r)
        routes = [
            r
            for name, mine in routes_of.items()
            if name in problem.classes and all(g in cells for r in mine for s in r.stages for g in s.groups)
            for r in mine
        ]
        names = dict.fromkeys(r.class_name for r in routes)
        classes = {name: _traffic(problem, running, problem.classes[name]) for name in names}
        return cls(running, cells, routes, classes, delays(problem), problem.rules.seed + 3)

    def includes(self, observed: ObservedTime) -> bool:
        """Return whether the simulation includes an observed time's group and all classes of its scope."""
        inside = observed_load.scopes(self.running)[observed.scope]
        return observed.group in self.cells and inside <= self.classes.keys()

    def update(self, unknowns: Sequence[_FactorEstimate]) -> None:
        """Simulate the plan with the current factors, and record each factor's simulated time."""
        factors: dict[str, dict[str, float]] = {name: {} for name in self.cells}
        for one in unknowns:
            factors[one.observed.group][one.observed.phase] = exp(one.log_factor)
        replicas = {g.name: g.replicas for g in self.running.groups}
        stations = {name: _station(spec, replicas[name], factors[name]) for name, spec in self.cells.items()}
        times = validate.simulate_plan(
            stations, self.routes, self.classes, self.delays, requests=REQUESTS, seed=self.seed, max_runs=1
        ).times
        rates = {name: of.rate for name, of in self.classes.items()}
        for one in unknowns:
            parts = observed_load.scope_rates(self.running, one.observed.scope, rates)
            total = sum(rate * _mean(times[name], one.observed.phase) for name, rate in parts.items())
            one.overloaded = any(times[name].finished < MIN_FINISHED_SHARE * rates[name] for name in parts)
            one.record_simulation(total / sum(parts.values()))


def _station(spec: CellSpec, replicas: int, factors: Mapping[str, float]) -> Station:
    assert spec.hardware is not None
    correction = neutral_correction(profile_key(spec.service, spec.footprint)).model_copy(update=factors)
    return replace(spec, hardware=corrected_times(spec.hardware, correction)).station(replicas)


def _traffic(problem: FormulatedProblem, running: Plan, request_class: RequestClass) -> TrafficClass:
    """Return the observed load of a class, with the hit rates of the running plan's caches."""
    gib = {c.name: c.gib or 0.0 for c in running.caches}
    levels = {level.name for level in problem.levels if level.gib == gib.get(level.cache, 0.0)}
    base = problem.cell_builder.base_scenarios[request_class.name]
    known = [w.scenario for w in problem.request_paths.values() if w.request_class.name == request_class.name]
    scenario = next((one for one in known if one.level_names <= levels), base)
    samples = problem.samples.for_class(request_class, scenario)
    priority = PRIORITY[request_class.app.workload]
    return TrafficClass(
        request_class.name, request_class.request.rate, request_class.request.burst, samples, priority
    )


def _mean(times: SimulatedTimes, phase: Phase) -> float:
    found = times.ttft.mean if phase == "prefill" else times.tpot.mean
    return found or 0.0
