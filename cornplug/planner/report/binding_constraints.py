"""Constraints that determine the plan's cost. The pool is solved again with one kind relaxed at a time.

A constraint of an integer program may have slack and still increase the cost, because half a node cannot be
rented. Slacks alone therefore do not show which constraints bind, and each is tested with a solve.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PoolSolution
from cornplug.planner.report import formatting
from cornplug.planner.report.counterfactual import CounterfactualQuestion

FEWER = 0.1
"""Fraction of a class's requests that is removed to compute what these requests cost."""


@dataclass(frozen=True)
class RelaxedConstraint:
    question: CounterfactualQuestion
    slack: float
    """Smallest slack among the program's rows for this constraint."""
    price: bool = False
    """Whether the saving is the price of some requests, which is reported even if no constraint binds."""


def questions(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    """Yield the pool's constraints, each with the pool in which it is relaxed."""
    yield from _stock(pool, solution)
    yield from _limits(pool, solution)
    yield from _growth(pool, solution)
    yield from _spot(pool, solution)
    yield from _network(pool, solution)
    yield from _changes(pool, solution)
    yield from _demand(pool)


def _stock(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    for node in pool.nodes:
        left = node.stock - solution.nodes.get(node.name, 0)
        if left == 0 and node.stock:
            more = tuple(replace(n, stock=2 * n.stock) if n == node else n for n in pool.nodes)
            text = f"all {node.stock} machines of {node.name} are used"
            yield RelaxedConstraint(
                CounterfactualQuestion(f"stock[{node.name}]", text, replace(pool, nodes=more)), 0.0
            )


def _limits(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    limits = pool.limits
    online = any(d.online for d in pool.demands)
    if limits.spare:
        relaxed = replace(pool, limits=replace(limits, spare=frozenset(), by_node=False, crowded=()))
        lost = "node" if limits.by_node else "replica"
        text = f"each online service survives the loss of a {lost} (rules.n_plus_one)"
        yield RelaxedConstraint(
            CounterfactualQuestion("spare", text, relaxed), _least_slack(solution, "spare[")
        )
    if online and limits.online_share < limits.max_utilisation:
        relaxed = replace(pool, limits=replace(limits, online_share=limits.max_utilisation))
        most = formatting.percent(limits.online_share)
        text = f"online requests use at most {most} of a replica (rules.online_share)"
        yield RelaxedConstraint(
            CounterfactualQuestion("online", text, relaxed), _least_slack(solution, "online[")
        )
    elif limits.max_utilisation < 1:
        relaxed = replace(pool, limits=replace(limits, max_utilisation=1.0, online_share=1.0))
        most = formatting.percent(limits.max_utilisation)
        text = f"replicas are used to at most {most} (rules.max_utilisation)"
        yield RelaxedConstraint(
            CounterfactualQuestion("capacity", text, relaxed), _least_slack(solution, "capacity[")
        )


def _growth(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    if any(d.online and d.growth_per_s for d in pool.demands):
        relaxed = replace(pool, demands=tuple(replace(d, growth_per_s=0.0) for d in pool.demands))
        text = "running replicas carry the growth of online requests until more replicas have started"
        slack = _least_slack(solution, "growth[")
        yield RelaxedConstraint(CounterfactualQuestion("growth", text, relaxed), slack)


def _spot(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    slacks = [slack for row, slack in solution.slack.items() if row.startswith("spot[")]
    if slacks:
        relaxed = replace(pool, limits=replace(pool.limits, spot_share=1.0))
        most = formatting.percent(pool.limits.spot_share)
        text = f"spot machines serve at most {most} of each online request class (rules.spot_share)"
        yield RelaxedConstraint(CounterfactualQuestion("spot", text, relaxed), min(slacks))


def _network(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    if "network" in solution.slack:
        relaxed = replace(pool, nodes=tuple(replace(n, nic=inf) for n in pool.nodes))
        most = formatting.percent(pool.limits.network_utilisation)
        text = f"traffic between nodes uses at most {most} of their network bandwidth"
        yield RelaxedConstraint(CounterfactualQuestion("network", text, relaxed), solution.slack["network"])


def _changes(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    current = pool.current
    if current is not None and current.max_changes is not None:
        relaxed = replace(pool, current=replace(current, max_changes=None))
        text = f"at most {current.max_changes} starts and role switches (change.max_changes)"
        yield RelaxedConstraint(
            CounterfactualQuestion("change_budget", text, relaxed), solution.slack.get("change_budget", 0.0)
        )


def _demand(pool: OptimizationProblem) -> Iterator[RelaxedConstraint]:
    if pool.objective != "cost":
        return
    for demand in sorted(pool.demands, key=lambda d: -d.rate):
        fewer = tuple(replace(d, rate=d.rate * (1 - FEWER)) if d == demand else d for d in pool.demands)
        text = f"with {formatting.percent(FEWER)} fewer of these requests"
        yield RelaxedConstraint(
            CounterfactualQuestion(f"demand[{demand.name}]", text, replace(pool, demands=fewer)),
            0.0,
            price=True,
        )


def _least_slack(solution: PoolSolution, prefix: str) -> float:
    """Return the smallest slack in the rows, named `prefix` and a cell, of cells with replicas. Rows of other
    cells are 0 <= 0."""
    rows = (f"{prefix}{cell}]" for cell, n in solution.replicas.items() if n)
    return min((solution.slack[row] for row in rows if row in solution.slack), default=0.0)
