"""The cost of a job: its part of the machines that its requests visit, until its deadline."""

from __future__ import annotations

from collections import defaultdict

from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.latency_forecast import JobForecast
from cornplug.planner.optimizer.optimization_problem import PoolSolution
from cornplug.planner.pipeline.formulate import FormulatedProblem


def job_forecast(problem: FormulatedProblem, solution: PoolSolution, of: RequestClass) -> JobForecast | None:
    """Without the time at which it is done, which is simulated; None: the class is no job."""
    job = of.request.job
    if job is None:
        return None
    load: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for flow in solution.flows:
        used = flow.rate / problem.cells[flow.cell].cell.capacity[flow.demand]
        load[flow.cell][flow.demand] = load[flow.cell].get(flow.demand, 0.0) + used
    per_hour = sum(
        _cost_per_hour(problem, solution, cell) * used[of.name] / sum(used.values())
        for cell, used in load.items()
        if used.get(of.name)
    )
    return JobForecast(
        requests=job.requests, deadline_hours=job.deadline_hours, dollars=per_hour * job.deadline_hours
    )


def _cost_per_hour(problem: FormulatedProblem, solution: PoolSolution, name: str) -> float:
    """Of all replicas of a cell: their GPUs' part of those that are used on the cell's machines."""
    cells = {c.name: c for c in problem.pool.cells}
    nodes = next(n for n in problem.pool.nodes if n.name == cells[name].nodes)
    gpus = {c: cells[c].gpus * n for c, n in solution.replicas.items() if n and cells[c].nodes == nodes.name}
    return solution.nodes.get(nodes.name, 0) * nodes.price * gpus[name] / sum(gpus.values())


def done_hours(job: JobForecast, served: float, last_answer_s: float | None) -> float | None:
    """From the first request to the last answer; None: no time is known."""
    if last_answer_s is None or served <= 0:
        return None
    return (job.requests / served + last_answer_s) / 3600
