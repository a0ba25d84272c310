"""Computes the cost of a job: its share of the cost of the machines that its requests use, until its
deadline."""

from __future__ import annotations

from collections import defaultdict

from cornplug.planner.inputs.request_classes import RequestClass
from cornplug.planner.latency_forecast import JobForecast
from cornplug.planner.optimizer.optimization_problem import PoolSolution
from cornplug.planner.pipeline.formulate import FormulatedProblem


def job_forecast(problem: FormulatedProblem, solution: PoolSolution, of: RequestClass) -> JobForecast | None:
    """Return a job's forecast without the simulated completion time, or None if the class is not a job."""
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
    """Return the cost of a cell's replicas.

    The cost of all machines of the class is divided among the cells in proportion to the GPUs that they use.
    """
    cells = {c.name: c for c in problem.pool.cells}
    nodes = next(n for n in problem.pool.nodes if n.name == cells[name].nodes)
    gpus = {c: cells[c].gpus * n for c, n in solution.replicas.items() if n and cells[c].nodes == nodes.name}
    return solution.nodes.get(nodes.name, 0) * nodes.price * gpus[name] / sum(gpus.values())


def done_hours(job: JobForecast, served: float, last_answer_s: float | None) -> float | None:
    """Return the time in hours from the job's first request to its last response.

    Returns None if the plan was not simulated.
    """
    if last_answer_s is None or served <= 0:
        return None
    return (job.requests / served + last_answer_s) / 3600
