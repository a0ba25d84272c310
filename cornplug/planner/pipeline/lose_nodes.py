"""Searches for a plan whose placed replicas survive the loss of any node (`rules.n_plus_one = "node"`).

The pool model limits a cell's replicas per node, but does not ensure that the replicas of all services can be
placed within these limits. Therefore the replicas of a solution are placed, and the loss of each node is
checked. If the other replicas cannot do the online work, this placement is excluded and the problem is solved
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, inf
from typing import Final

from pulp import lpSum

from cornplug.errors import PlanUnfinished
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import CrowdedNode, OptimizationProblem, PoolSolution
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.pipeline.confirm_capacities import Report, Watch, with_simulated_capacities
from cornplug.planner.pipeline.formulate import FormulatedProblem
from cornplug.planner.pipeline.place_replicas import placement

ROUNDS: Final = 12
HELD: Final = 1e-6
"""Relative tolerance of fixed rates, because of the solver's tolerances."""


def with_spare_nodes(
    problem: FormulatedProblem, report: Report, watch: Watch | None, *, near: PoolSolution | None = None
) -> tuple[FormulatedProblem, PoolSolution]:
    """Return the problem with simulated capacities, and its solution (`with_simulated_capacities`).

    If the rules require it, the solution survives the loss of any node. Raises the errors of
    `with_simulated_capacities`, and PlanUnfinished if `ROUNDS` solutions do not survive.
    """
    for _ in range(ROUNDS):
        problem, near = with_simulated_capacities(problem, report, watch, near=near)
        crowded = unsurvived(problem.pool, near)
        if not crowded:
            return problem, near
        problem = replace(problem, pool=excluding(problem.pool, crowded))
    raise PlanUnfinished(
        f"none of {ROUNDS} plans survives the loss of each node, and infeasibility was not proven. "
        "Set rules.n_plus_one = true, or use fewer node classes."
    )


def excluding(pool: OptimizationProblem, crowded: tuple[CrowdedNode, ...]) -> OptimizationProblem:
    return replace(pool, limits=replace(pool.limits, crowded=(*pool.limits.crowded, *crowded)))


def unsurvived(pool: OptimizationProblem, solution: PoolSolution) -> tuple[CrowdedNode, ...]:
    """Return the nodes whose loss the other replicas cannot compensate for online work.

    The result is empty if the loss of nodes is not limited (`limits.by_node`).
    """
    if not pool.limits.by_node:
        return ()
    different = {(name, tuple(sorted(lost.items()))): lost for name, lost in node_losses(pool, solution)}
    return tuple(
        CrowdedNode(name, solution.nodes[name], lost)
        for (name, _), lost in different.items()
        if not survives(pool, solution, lost)
    )


def node_losses(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[tuple[str, Counter[str]]]:
    """Yield (class, number of replicas by cell) for each node.

    A replica that spans several nodes counts on each of these nodes.
    """
    cells, slots = {c.name: c for c in pool.cells}, placement(pool, solution)
    for nodes in pool.nodes:
        on: dict[int, Counter[str]] = {}
        for name, placed in slots.items():
            if cells[name].nodes == nodes.name:
                span = ceil(cells[name].gpus / nodes.gpus)
                for first, _ in placed:
                    for node in range(first, first + span):
                        on.setdefault(node, Counter())[name] += 1
        for lost in on.values():
            yield nodes.name, lost


def survives(pool: OptimizationProblem, solution: PoolSolution, lost: Mapping[str, int]) -> bool:
    """Return whether the replicas that are not lost can do the online work, up to the maximum utilisation.

    The requests keep the solution's paths. Caches and network cards are assumed not to change.
    """
    online = {u.name for u in pool.demands if u.online}
    limits = replace(
        pool.limits,
        online_share=pool.limits.max_utilisation,
        spot_share=1.0,
        spare=frozenset(),
        by_node=False,
        crowded=(),
    )
    rest = replace(
        pool,
        nodes=tuple(replace(n, nic=inf) for n in pool.nodes),
        demands=tuple(replace(u, growth_per_s=0.0, slices=None) for u in pool.demands if u.name in online),
        variants=tuple(replace(v, levels=frozenset()) for v in pool.variants if v.demand in online),
        levels=(),
        limits=limits,
        objective="goodput",
        current=None,
    )
    model = milp.build(rest)
    for name, x in model.x.items():
        x.lowBound = x.upBound = solution.replicas.get(name, 0) - lost.get(name, 0)
    for name, z in model.z.items():
        z.lowBound = z.upBound = solution.nodes.get(name, 0)
    for name, phi in model.phi.items():
        rate = solution.served.get(name, 0.0)
        phi.lowBound, phi.upBound = rate * (1 - HELD), rate * (1 + HELD)
    model.problem.setObjective(lpSum(model.phi.values()))
    return run_solver(model.problem, SolverLimits(0.0, inf)).status in ("optimal", "feasible")
