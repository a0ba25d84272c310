"""Calibration of profiles' times, and replacement of assumed values in a plan's input by observed values.

The simulation of the running plan matches the observed times if profiles' times are multiplied by factors.
If the first token takes twice as long, prefill does not necessarily take twice as long, because waits grow
faster than the work. Therefore the plan is simulated with the observed load, and the factors of all groups
are fitted together. The logarithm of a time is nearly linear in the logarithm of its factor.

Assumed values in a plan's input (rates, lengths and hit rates) are replaced by observed values. Engines do
not report request classes. If several classes use the same engines, the load is divided among the classes
by the running plan's routes. Their rates change by one factor, and their lengths by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, log, sqrt
from typing import Final

from cornplug.planner import observed_load
from cornplug.planner.candidates.cells import (
    CellSpec,
    ProfileKey,
    corrected_times,
    corrections_by_key,
    neutral_correction,
    profile_key,
    profile_key_of,
)
from cornplug.planner.candidates.replica_configs import PRIORITY
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_sampling import RequestClass
from cornplug.planner.inputs.schema import Application, Histogram, Length, LogNormal, RequestSpec
from cornplug.planner.observed_load import ClassShare, HistogramCounts, ObservedWindow, class_of
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


TOLERANCE: Final = 0.05
"""Relative difference above which a value is changed. The difference must also exceed twice its standard
error."""
LENGTH_TOLERANCE: Final = 0.1
EXPECTED_RATE: Final = "expected rate"


@dataclass(frozen=True)
class FigureDifference:
    """Value of the input that differs from the metrics."""

    demand: str
    what: str
    """"rate", "prompt", "output", "prefix", "embedding", or "expected rate" for a rate that is expected
    soon."""
    planned: float
    observed: float


def update_applications(
    applications: Sequence[Application], plan: Plan, windows: Mapping[str, ObservedWindow]
) -> tuple[list[Application], tuple[FigureDifference, ...]]:
    """Return the applications with observed values, and the values that changed.

    `windows` contains the observed load of each scope. Raises ConfigError if a scope is not in the plan, or
    if the scope's engines count requests twice.
    """
    for scope in windows:
        observed_load.check_scope(plan, scope)
    differences: list[FigureDifference] = []
    known = {f"{a.name}/{r.name}": r for a in applications for r in a.requests}
    rates = {name: r.rate for name, r in known.items()}
    apps = []
    for app in applications:
        requests = []
        for request in app.requests:
            name = f"{app.name}/{request.name}"
            shares = list(observed_load.class_shares(name, plan, rates, windows))
            changes = _changes(app.name, name, known, shares, differences) if shares else {}
            requests.append(request.model_copy(update=changes))
        apps.append(app.model_copy(update={"requests": requests}))
    return apps, tuple(differences)


def observed_rates(
    applications: Sequence[Application], plan: Plan, windows: Mapping[str, ObservedWindow]
) -> dict[str, float]:
    """Return the observed requests per second of the classes whose engines have metrics."""
    known = {f"{a.name}/{r.name}": r for a in applications for r in a.requests}
    rates = {name: r.rate for name, r in known.items()}
    found = {}
    for name, rate in rates.items():
        shares = [s for s in observed_load.class_shares(name, plan, rates, windows) if s.counts_outputs]
        if shares:
            found[name] = rate * _growth(shares)
    return found


def apply_expected_rates(
    applications: Sequence[Application], expected_rates: Mapping[str, float]
) -> tuple[list[Application], tuple[FigureDifference, ...]]:
    """Return the applications with the rates that are expected soon if they are higher, and the changed
    rates."""
    differences, apps = list[FigureDifference](), []
    for app in applications:
        requests = []
        for request in app.requests:
            name = f"{app.name}/{request.name}"
            rate = expected_rates.get(name, 0.0)
            if rate > request.rate * (1 + TOLERANCE):
                differences.append(FigureDifference(name, EXPECTED_RATE, request.rate, rate))
                request = request.model_copy(update={"rate": rate})
            requests.append(request)
        apps.append(app.model_copy(update={"requests": requests}))
    return apps, tuple(differences)


def _growth(shares: Sequence[ClassShare]) -> float:
    """Return the ratio of a class's observed rate to the input's rate."""
    return sum(s.window.rate * s.share for s in shares) / sum(s.rate for s in shares)


def _changes(
    app: str,
    name: str,
    known: Mapping[str, RequestSpec],
    shares: Sequence[ClassShare],
    differences: list[FigureDifference],
) -> dict[str, object]:
    """Return the fields of a request class that differ from the metrics, with their observed values."""
    request = known[name]
    changes: dict[str, object] = {}
    answering = [s for s in shares if s.counts_outputs]
    if answering:
        changes |= _rate(name, request, answering, differences)
        if request.trace is None:
            changes |= _lengths(name, known, answering, differences)
    changes |= _prefix(name, request, [s for s in shares if s.prefills], differences)
    changes |= _media(app, name, request, shares, differences)
    return changes


def _rate(
    name: str, request: RequestSpec, shares: Sequence[ClassShare], differences: list[FigureDifference]
) -> dict[str, object]:
    # The relative standard error of a Poisson-like count is the inverse root of the count.
    number = max(sum(s.window.requests * s.share for s in shares), 1.0)
    rate = request.rate * _growth(shares)
    if rate <= 0 or abs(rate / request.rate - 1) <= max(TOLERANCE, 2 * sqrt(request.burst / number)):
        return {}
    differences.append(FigureDifference(name, "rate", request.rate, rate))
    return {"rate": rate}


def _lengths(
    name: str,
    requests: Mapping[str, RequestSpec],
    shares: Sequence[ClassShare],
    differences: list[FigureDifference],
) -> dict[str, object]:
    """Return the changed lengths of a class.

    If several classes use the same engines, their lengths are scaled by the ratio of the observed to the
    planned joint mean. If only one class uses the engines, it gets the observed histogram.
    """
    changes: dict[str, object] = {}
    for what in ("prompt", "output"):
        seen = [(counts, s) for s in shares if (counts := getattr(s.window, what)) is not None]
        if not seen:
            continue
        number = sum(counts.value_count for counts, _ in seen)
        ratio = sum(counts.total for counts, _ in seen) / sum(
            counts.value_count * part * _tokens(requests[other], what)
            for counts, s in seen
            for other, part in s.shares.items()
        )
        if abs(ratio - 1) <= max(LENGTH_TOLERANCE, 2 / sqrt(number)):
            continue
        request = requests[name]
        planned: Length = getattr(request, what)
        expected = request_sampling.mean_length(planned)
        beside = _tokens(request, what) - expected
        mean = max((expected + beside) * ratio - beside, 1.0)
        differences.append(FigureDifference(name, what, expected, mean))
        exclusive = all(s.exclusive for _, s in seen) and not beside
        changes[what] = _histogram([c for c, _ in seen]) if exclusive else _scaled(planned, mean / expected)
    return changes


def _tokens(request: RequestSpec, what: str) -> float:
    """Return the mean number of tokens as the engine counts them. A prompt includes its media tokens."""
    if what == "output":
        return request_sampling.mean_length(request.output)
    media = sum(
        request_sampling.mean_length(m.items) * request_sampling.mean_length(m.tokens) for m in request.media
    )
    return request_sampling.mean_length(request.prompt) + media


def _histogram(seen: Sequence[HistogramCounts]) -> Histogram:
    """Return a histogram whose values are the centres of the buckets, scaled to the observed mean."""
    weights: dict[float, float] = {}
    for counts in seen:
        low = 0.0
        for bound, count in zip(counts.bounds, counts.counts, strict=True):
            high = bound if bound != float("inf") else 2 * low
            if count:
                weights[(low + high) / 2] = weights.get((low + high) / 2, 0.0) + count
            low = high
    number = sum(weights.values())
    mean = sum(c.total for c in seen) / number
    factor = mean / (sum(v * w for v, w in weights.items()) / number)
    values = {max(round(v * factor), 1): 0.0 for v in weights}
    for v, w in weights.items():
        values[max(round(v * factor), 1)] += w
    return Histogram(values=list(values), weights=list(values.values()))


def _scaled(length: Length, factor: float) -> Length:
    if isinstance(length, int):
        return max(round(length * factor), 1)
    if isinstance(length, LogNormal):
        most = max(length.max, round(length.mean * factor) + 1)
        return length.model_copy(update={"mean": length.mean * factor, "max": most})
    return length.model_copy(update={"values": [max(round(v * factor), 1) for v in length.values]})


def _prefix(
    name: str, request: RequestSpec, shares: Sequence[ClassShare], differences: list[FigureDifference]
) -> dict[str, object]:
    """Return the changed hit rate of a class's prefix, from the cached tokens of its engines.

    Hit rates that are computed from a catalogue are not changed, because they depend on the cache sizes that
    a plan chooses.
    """
    seen = [(s.window.cached_share, s.window.requests) for s in shares if s.window.cached_share is not None]
    if not seen or request.prefix is None or request.prefix.hit_rate is None:
        return {}
    tokens = _tokens(request, "prompt")
    share = sum(c * n for c, n in seen) / max(sum(n for _, n in seen), 1e-9)
    hit = min(share * tokens / min(request.prefix.tokens, tokens), 1.0)
    if abs(hit - request.prefix.hit_rate) <= TOLERANCE:
        return {}
    differences.append(FigureDifference(name, "prefix", request.prefix.hit_rate, hit))
    return {"prefix": request.prefix.model_copy(update={"hit_rate": hit})}


def _media(
    app: str,
    name: str,
    request: RequestSpec,
    shares: Sequence[ClassShare],
    differences: list[FigureDifference],
) -> dict[str, object]:
    hits = [h[app] for s in shares if (h := s.window.embedding_hits) and app in h]
    if not hits:
        return {}
    hit = sum(hits) / len(hits)
    media = []
    for item in request.media:
        if item.hit_rate is None or abs(hit - item.hit_rate) <= TOLERANCE:
            media.append(item)
            continue
        differences.append(FigureDifference(name, "embedding", item.hit_rate, hit))
        media.append(item.model_copy(update={"hit_rate": hit}))
    return {"media": media}
