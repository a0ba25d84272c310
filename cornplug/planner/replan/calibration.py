"""Calibration: factors for profiles' times, with which the simulation of the running plan matches the
observed times.

If the first token takes twice as long, prefill does not necessarily take twice as long, because waits grow
faster than the work. Therefore the plan is simulated with the observed load, and the factors of all groups
are fitted together. The logarithm of a time is nearly linear in the logarithm of its factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log
from typing import Final

from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.candidates.replica_configs import PRIORITY
from cornplug.planner.candidates.timed_configs import (
    Place,
    corrected_times,
    corrections_by_place,
    no_correction,
    place,
    place_of,
)
from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.pipeline.current_deployment import home
from cornplug.planner.pipeline.formulate import FormulatedProblem
from cornplug.planner.pipeline.validate import delays
from cornplug.planner.plan import Plan, PlanRoute, TimesCorrection
from cornplug.planner.replan import observed_load
from cornplug.planner.replan.observed_load import class_of
from cornplug.planner.replan.observed_times import ObservedTime, Phase
from cornplug.planner.simulator import end_to_end
from cornplug.planner.simulator.end_to_end import Delays, SimulatedTimes, TrafficClass
from cornplug.planner.simulator.simulator import Station

ROUNDS: Final = 6
CLOSE: Final = 0.03
"""Maximum difference of logarithms at which the simulated time matches the observed time."""
EXPLAINED: Final = 0.1
"""Difference of logarithms, after all rounds, above which no factor explains the observed time. The time is
then not corrected."""
SERVED: Final = 0.93
"""Share of requests that must finish while requests arrive. If fewer finish, the simulated plan is
overloaded."""
NOTICEABLE: Final = 0.05
"""Logarithm of a factor below which the factor is not used."""
FLATTEST, STEEPEST = 0.5, 8.0
"""Limits of a time's slope over its factor, in logarithms. The slope is small if other work dominates, and
large near saturation."""
MOST: Final = log(5.0)
REQUESTS: Final = 4000
"""Number of requests in one simulation."""


@dataclass
class _Unknown:
    """Factor to determine, as its logarithm, and the results of simulations with this factor."""

    of: ObservedTime
    log_factor: float = 0.0
    left: float = inf
    """Logarithm of observed time / simulated time."""
    slope: float = 1.0
    overloaded: bool = False
    """Whether queues grow throughout the simulation with this factor, so that the simulated times are not
    usable."""
    _last: tuple[float, float] | None = None
    """(logarithm of the previous factor, `left` with this factor)."""

    def learn(self, simulated_s: float) -> None:
        if simulated_s <= 0:
            return
        self.left = log(self.of.seconds / simulated_s)
        if self._last is not None and abs(self.log_factor - self._last[0]) > 1e-6:
            slope = (self._last[1] - self.left) / (self.log_factor - self._last[0])
            self.slope = min(max(slope, FLATTEST), STEEPEST)
        self._last = (self.log_factor, self.left)

    def step(self) -> None:
        if self.left == inf:
            return
        self.log_factor = min(max(self.log_factor + self.left / self.slope, -MOST), MOST)


def calibrated(
    problem: FormulatedProblem, running: Plan, observed: Sequence[ObservedTime]
) -> list[TimesCorrection]:
    """Return corrections of the observed groups' profiles.

    Observed times that no factor explains have no correction. `problem` contains the observed load, and the
    corrections that currently apply.
    """
    simulation = _Simulation.of(problem, running)
    unknowns = [_Unknown(one) for one in observed if simulation.includes(one)]
    for i in range(ROUNDS if unknowns else 0):
        if i:
            for one in unknowns:
                one.step()
        simulation.update(unknowns)
        if all(abs(one.left) <= CLOSE for one in unknowns):
            break
    return _corrections(problem, running, unknowns)


def _corrections(
    problem: FormulatedProblem, running: Plan, unknowns: Sequence[_Unknown]
) -> list[TimesCorrection]:
    groups = {g.name: g for g in running.groups}
    earlier, found = corrections_by_place(problem.corrections), dict[Place, dict[str, float]]()
    for one in sorted(unknowns, key=lambda one: -one.of.requests):
        if one.overloaded or abs(one.left) > EXPLAINED or abs(one.log_factor) < NOTICEABLE:
            continue
        at = place_of(groups[one.of.group])
        before = getattr(earlier[at], one.of.phase) if at in earlier else 1.0
        # If two groups share a profile, the group with more requests determines the factor.
        found.setdefault(at, {}).setdefault(one.of.phase, round(before * exp(one.log_factor), 3))
    return [earlier.get(at, no_correction(at)).model_copy(update=factors) for at, factors in found.items()]


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
    def of(cls, problem: FormulatedProblem, running: Plan) -> _Simulation:
        specs = {g.name: home(g, problem.cells.values()) for g in running.groups}
        cells = {name: spec for name, spec in specs.items() if spec is not None and spec.timed}
        routes_of: dict[str, list[PlanRoute]] = {}
        for r in running.routes:
            routes_of.setdefault(class_of(r), []).append(r)
        routes = [
            r
            for name, mine in routes_of.items()
            if name in problem.classes and all(g in cells for r in mine for s in r.stages for g in s.groups)
            for r in mine
        ]
        names = dict.fromkeys(map(class_of, routes))
        classes = {name: _traffic(problem, running, problem.classes[name]) for name in names}
        return cls(running, cells, routes, classes, delays(problem), problem.rules.seed + 3)

    def includes(self, one: ObservedTime) -> bool:
        """Return whether the simulation includes an observed time's group and all classes of its scope."""
        inside = observed_load.scopes(self.running)[one.scope]
        return one.group in self.cells and inside <= self.classes.keys()

    def update(self, unknowns: Sequence[_Unknown]) -> None:
        """Simulate the plan with the current factors, and record each factor's simulated time."""
        factors: dict[str, dict[str, float]] = {name: {} for name in self.cells}
        for one in unknowns:
            factors[one.of.group][one.of.phase] = exp(one.log_factor)
        replicas = {g.name: g.replicas for g in self.running.groups}
        stations = {name: _station(spec, replicas[name], factors[name]) for name, spec in self.cells.items()}
        times = end_to_end.simulate_plan(
            stations, self.routes, self.classes, self.delays, requests=REQUESTS, seed=self.seed, most_runs=1
        ).times
        rates = {name: of.rate for name, of in self.classes.items()}
        for one in unknowns:
            parts = observed_load.rates_at(self.running, one.of.scope, rates)
            total = sum(rate * _mean(times[name], one.of.phase) for name, rate in parts.items())
            one.overloaded = any(times[name].finished < SERVED * rates[name] for name in parts)
            one.learn(total / sum(parts.values()))


def _station(spec: CellSpec, replicas: int, factors: Mapping[str, float]) -> Station:
    assert spec.hardware is not None
    correction = no_correction(place(spec.service, spec.footprint)).model_copy(update=factors)
    return replace(spec, hardware=corrected_times(spec.hardware, correction)).station(replicas)


def _traffic(problem: FormulatedProblem, running: Plan, of: RequestClass) -> TrafficClass:
    """Return the observed load of a class, with the hit rates of the running plan's caches."""
    gib = {c.name: c.gib or 0.0 for c in running.caches}
    levels = {level.name for level in problem.levels if level.gib == gib.get(level.cache, 0.0)}
    base = problem.cell_builder.bases[of.name]
    known = [w.scenario for w in problem.request_paths.values() if w.of.name == of.name]
    scenario = next((one for one in known if one.names <= levels), base)
    samples = problem.samples.of(of, scenario)
    priority = PRIORITY[of.app.workload]
    return TrafficClass(of.name, of.request.rate, of.request.burst, samples, priority)


def _mean(times: SimulatedTimes, phase: Phase) -> float:
    found = times.ttft.mean if phase == "prefill" else times.tpot.mean
    return found or 0.0
