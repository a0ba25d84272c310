"""Validation of a plan by simulation, which determines the latencies of each request class and missed
bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from cornplug.planner.candidates import cache_sizes
from cornplug.planner.candidates.replica_configs import PRIORITY
from cornplug.planner.candidates.request_paths import EMBEDDING_EDGE_S
from cornplug.planner.inputs.request_classes import RequestClass, SampledRequest
from cornplug.planner.inputs.schema import LLMShape
from cornplug.planner.latency_forecast import LatencyForecast
from cornplug.planner.optimizer.optimization_problem import PoolSolution
from cornplug.planner.pipeline.build_plan import group_name, job_done_hours
from cornplug.planner.pipeline.formulate import FormulatedProblem, nic_bytes_s
from cornplug.planner.plan import Plan, PlannedGroup, PlanRoute, QueueForecast
from cornplug.planner.simulator import end_to_end
from cornplug.planner.simulator.simulator import Station
from cornplug.planner.simulator.stations import QueuePeak

SIMULATED_REQUESTS: Final = 4000
"""Number of requests of one class in a simulation. The 99th percentile then depends on 40 requests."""
NOISE: Final = 0.02
"""Relative noise of a percentile with this number of requests. Smaller misses are ignored."""


@dataclass(frozen=True)
class SloMiss:
    """Bound that a class misses in simulation."""

    demand: str
    quantity: str
    """"ttft", "tpot" or "e2e"."""
    percentile: str
    bound: float
    """Bound in seconds or as a slowdown."""
    simulated: float
    slowdown: bool = False

    @property
    def excess_ratio(self) -> float:
        return self.simulated / self.bound


@dataclass(frozen=True)
class ValidationRun:
    plan: Plan
    """Plan with simulated times in its latency forecasts."""
    misses: tuple[SloMiss, ...]


def validate(problem: FormulatedProblem, solution: PoolSolution, plan: Plan) -> ValidationRun:
    """Return the plan with simulated times, and the bounds that these times miss.

    Classes that visit a service for which only the throughput is known have no times.
    """
    stations = _stations(problem, solution)
    timed = [r for r in plan.routes if all(g in stations for s in r.stages for g in s.groups)]
    whole = {_name(r) for r in timed} - {_name(r) for r in plan.routes if r not in timed}
    routes = [r for r in timed if _name(r) in whole]
    if not routes:
        return ValidationRun(plan, ())
    rates = {n: sum(r.rate for r in routes if _name(r) == n) for n in problem.classes if n in whole}
    classes = {
        name: _traffic_class(problem, solution, problem.classes[name], rate) for name, rate in rates.items()
    }
    found = end_to_end.simulate_plan(
        stations, routes, classes, delays(problem), requests=SIMULATED_REQUESTS, seed=problem.rules.seed + 2
    )
    forecasts = [_with_times(f, found.times) for f in plan.latency_forecasts]
    groups = [_with_queue(g, found.queues.get(g.name)) for g in plan.groups]
    misses = tuple(m for f in forecasts for m in _misses(f))
    return ValidationRun(plan.model_copy(update={"latency_forecasts": forecasts, "groups": groups}), misses)


def _name(route: PlanRoute) -> str:
    return f"{route.app}/{route.request}"


def _stations(problem: FormulatedProblem, solution: PoolSolution) -> dict[str, Station]:
    """Return the simulator's stations for the groups whose times are known."""
    return {
        group_name(cell): problem.cells[cell].station(replicas)
        for cell, replicas in solution.replicas.items()
        if replicas and problem.cells[cell].has_times
    }


def _traffic_class(
    problem: FormulatedProblem, solution: PoolSolution, request_class: RequestClass, rate: float
) -> end_to_end.TrafficClass:
    samples = problem.samples.for_class(request_class, problem.scenario(request_class.name, solution.levels))
    priority = PRIORITY[request_class.app.workload]
    return end_to_end.TrafficClass(request_class.name, rate, request_class.request.burst, samples, priority)


def delays(problem: FormulatedProblem) -> Callable[[str, str, SampledRequest], float]:
    """Return a function that returns the seconds between two stages of a request.

    This is the time to fetch an embedding or to transfer KV.
    """
    table = problem.cell_builder.gpus
    slowest = min(nic_bytes_s(n, table[n.gpu]) for n in problem.nodes)
    per_token = max(
        (cache_sizes.kv_bytes_per_token(c) for c in problem.components if c.kind == "llm"), default=0
    )

    hidden = max((c.shape.hidden for c in problem.components if isinstance(c.shape, LLMShape)), default=0)

    def seconds(before: str, after: str, request: SampledRequest) -> float:
        if before == "E":
            # A token consists of at least one patch.
            moved = sum(request.patches) * hidden * cache_sizes.ELEMENT_BYTES
            return EMBEDDING_EDGE_S + moved / slowest if request.patches else 0.0
        return request.prompt_tokens * per_token / slowest if after == "D" else 0.0

    return seconds


def _with_queue(group: PlannedGroup, peak: QueuePeak | None) -> PlannedGroup:
    if peak is None or not peak.requests:
        return group
    queue = QueueForecast(requests=peak.requests, prompt_tokens=peak.prompt_tokens)
    return group.model_copy(update={"queue": queue})


def _with_times(forecast: LatencyForecast, found: Mapping[str, end_to_end.SimulatedTimes]) -> LatencyForecast:
    times = found.get(f"{forecast.app}/{forecast.request}")
    if times is None:
        return forecast
    slowdown = forecast.slowdown
    if slowdown is not None:
        known = dict(zip(("ttft", "tpot", "e2e"), times.slowdowns, strict=True))
        slowdown = slowdown.model_copy(update=known)
    job = forecast.job
    if job is not None:
        done = job_done_hours(job, forecast.served, times.e2e.p99)
        job = job.model_copy(update={"done_hours": done})
    update = {"ttft": times.ttft, "tpot": times.tpot, "e2e": times.e2e, "slowdown": slowdown, "job": job}
    return forecast.model_copy(update=update)


def _misses(forecast: LatencyForecast) -> list[SloMiss]:
    name = f"{forecast.app}/{forecast.request}"
    return [
        SloMiss(name, of.quantity, of.percentile, of.bound, of.simulated, of.slowdown)
        for of in forecast.bounds
        if of.bound is not None and of.simulated is not None and of.simulated > of.bound * (1 + NOISE)
    ]
