"""Placement of replicas on GPUs of nodes, such that online work survives the loss of a node if required.

Placement is exact, because the replicas' footprints divide each other. A footprint is the number of GPUs of a
replica: 1/4, 1/2, 1, 2, 4 or 8 GPUs of a node with 1, 2, 4 or 8 GPUs, or complete nodes. Each size divides
the next larger size. If replicas are placed in decreasing order of size, there is always a node whose free
GPUs are a multiple of the replica's size (Coffman, Garey, Johnson 1987, "Bin packing with divisible item
sizes"). So every solution of the pool model (sum of footprints <= GPUs of all nodes) can be placed on any
nodes with enough free GPUs. A replica is placed on the node with the fewest replicas of its service, and then
with the most free GPUs, so that the loss of a node costs each service few replicas.

With `rules.n_plus_one = "node"`, the pool model limits a cell's replicas per node, but does not ensure that
the replicas of all services can be placed within these limits. So the loss of each node is checked after
placement. If the other replicas cannot do the online work, this placement is excluded and the problem is
solved again.

Nodes are billed as a whole, and the model uses the minimum number of replicas. `use_idle_gpus` adds replicas
of the most heavily loaded groups on idle GPUs. They cost nothing, reduce waits and add headroom.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import ceil, inf
from typing import Final

from pulp import lpSum

from cornplug.errors import PlanUnfinished
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import milp
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    CrowdedNode,
    CurrentState,
    OptimizationProblem,
    PoolSolution,
)
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.pipeline.confirm_capacities import (
    PhaseCallback,
    ProgressCallback,
    balance_load,
    with_simulated_capacities,
)
from cornplug.planner.pipeline.formulate import FormulatedProblem

Slot = tuple[int, int]
"""(index of the node in its class, first GPU)."""
MAX_ROUNDS: Final = 12
_RATE_TOLERANCE: Final = 1e-6
"""Relative tolerance for rates that are fixed, because of the solver's tolerances."""


def placement(pool: OptimizationProblem, solution: PoolSolution) -> dict[str, list[Slot]]:
    slots: dict[str, list[Slot]] = {}
    for nodes in pool.nodes:
        here = [c for c in pool.cells if c.nodes == nodes.name and solution.replicas.get(c.name)]
        footprints = {c.name: (c.gpus, solution.replicas[c.name]) for c in here}
        services = {c.name: c.service for c in here}
        slots |= place_on_nodes(footprints, nodes.gpus, solution.nodes.get(nodes.name, 0), services)
    return slots


def idle_gpus(pool: OptimizationProblem, solution: PoolSolution) -> dict[str, float]:
    """Return the number of GPUs without replicas on the solution's nodes, by node class."""
    idle = {n.name: float(n.gpus * solution.nodes.get(n.name, 0)) for n in pool.nodes}
    for cell in pool.cells:
        idle[cell.nodes] -= cell.gpus * solution.replicas.get(cell.name, 0)
    return idle


def place_on_nodes(
    footprints: Mapping[str, tuple[float, int]],
    gpus: int,
    nodes: int,
    services: Mapping[str, str] | None = None,
) -> dict[str, list[Slot]]:
    """Assign a node and a first GPU to each replica.

    A replica on several nodes gets the slot of its first node.

    Args:
        footprints: (GPUs per replica, number of replicas) by group.
        gpus: Number of GPUs per node.
        nodes: Number of nodes.
        services: Service by group. By default, each group is a service.

    Raises ValueError if there are too few nodes, or if a footprint does not divide a node.
    """
    order = sorted(footprints, key=lambda group: -footprints[group][0])
    free = [Fraction(gpus)] * nodes
    slots: dict[str, list[Slot]] = {group: [] for group in footprints}
    beside: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for group in order:
        same = beside[(services or {}).get(group, group)]
        size, replicas = Fraction(footprints[group][0]), footprints[group][1]
        _check(size, gpus, group)
        for _ in range(replicas):
            slot = _fit(free, size, gpus, group, same)
            same[slot[0]] += 1
            slots[group].append(slot)
    return slots


def _fit(free: list[Fraction], size: Fraction, gpus: int, group: str, same: Mapping[int, int]) -> Slot:
    """Return a slot for a replica, and remove the slot's GPUs from `free`. `same` is the number of replicas
    of the same service by node.
    """
    if size > gpus:
        whole_nodes = int(size / gpus)
        for node in range(len(free)):
            if _empty(free[node : node + whole_nodes], whole_nodes, gpus):
                free[node : node + whole_nodes] = [Fraction(0)] * whole_nodes
                return node, 0
    elif fitting := [node for node, left in enumerate(free) if left >= size]:
        node = min(fitting, key=lambda node: (same.get(node, 0), -free[node]))
        first = gpus - free[node]
        free[node] -= size
        return node, int(first)
    raise ValueError(
        f"{group}: {float(size):g} GPUs do not fit into the free GPUs of {len(free)} nodes of {gpus}"
    )


def _empty(nodes: Sequence[Fraction], count: int, gpus: int) -> bool:
    return len(nodes) == count and all(f == gpus for f in nodes)


def _check(size: Fraction, gpus: int, group: str) -> None:
    fits = (Fraction(gpus) / size).denominator == 1 if size <= gpus else (size / gpus).denominator == 1
    if size <= 0 or not fits:
        raise ValueError(
            f"{group}: {float(size):g} GPUs neither divide a node of {gpus} GPUs nor fill complete nodes"
        )


def with_spare_nodes(
    problem: FormulatedProblem,
    report: PhaseCallback,
    on_progress: ProgressCallback | None,
    *,
    similar_solution: PoolSolution | None = None,
) -> tuple[FormulatedProblem, PoolSolution]:
    """Return the problem with simulated capacities, and its solution (`with_simulated_capacities`).

    If the rules require it, spare nodes are added until the solution survives the loss of any node. Raises
    the errors of `with_simulated_capacities`, and PlanUnfinished if no solution survives the loss of a node
    within `MAX_ROUNDS` rounds.
    """
    for _ in range(MAX_ROUNDS):
        problem, similar_solution = with_simulated_capacities(
            problem, report, on_progress, similar_solution=similar_solution
        )
        crowded = find_unsurvivable_losses(problem.pool, similar_solution)
        if not crowded:
            return problem, similar_solution
        problem = replace(problem, pool=exclude_crowded_nodes(problem.pool, crowded))
    raise PlanUnfinished(
        f"none of {MAX_ROUNDS} plans survives the loss of each node, and infeasibility was not proven. "
        "Set rules.n_plus_one = true, or use fewer node classes."
    )


def exclude_crowded_nodes(pool: OptimizationProblem, crowded: tuple[CrowdedNode, ...]) -> OptimizationProblem:
    return replace(pool, limits=replace(pool.limits, crowded=(*pool.limits.crowded, *crowded)))


def find_unsurvivable_losses(pool: OptimizationProblem, solution: PoolSolution) -> tuple[CrowdedNode, ...]:
    """Return the nodes after whose loss the other replicas cannot do the online work.

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
        phi.lowBound, phi.upBound = rate * (1 - _RATE_TOLERANCE), rate * (1 + _RATE_TOLERANCE)
    model.problem.setObjective(lpSum(model.phi.values()))
    return run_solver(model.problem, SolverLimits(0.0, inf)).status in ("optimal", "feasible")


def use_idle_gpus(pool: OptimizationProblem, solution: PoolSolution, settings: SolverOptions) -> PoolSolution:
    """Add replicas to a solution on GPUs that are paid for but not used (`PoolSolution.extra`). Returns the
    solution unchanged if no replica fits.

    When re-planning, only running replicas that the solution would stop are added, because starting a replica
    has a cost.
    """
    extra = _extra_replicas(pool, solution)
    if not extra:
        return solution
    filled = balance_load(
        pool, replace(solution, replicas=Counter(solution.replicas) + extra, extra=extra), settings
    )
    if filled is None or find_unsurvivable_losses(pool, filled):
        return solution
    # Keep the slack of the model's own rows, because extra replicas are not a reason for a plan.
    return replace(filled, slack=solution.slack)


def _extra_replicas(pool: OptimizationProblem, solution: PoolSolution) -> Counter[str]:
    """Return the number of extra replicas by cell.

    Each extra replica is added to the cell with the highest load per replica for which GPUs are idle.
    """
    idle, replicas, extra = idle_gpus(pool, solution), Counter(solution.replicas), Counter[str]()
    load, stopped = _loads(pool, solution), _stopped(pool.current, solution)
    while True:
        fitting = [
            (c, source)
            for c in pool.cells
            if load[c.name] > 0 and c.gpus <= idle[c.nodes] + 1e-9
            for source in _sources(c, pool.current, stopped)[:1]
        ]
        if not fitting:
            return extra
        fullest, source = max(fitting, key=lambda it: load[it[0].name] / replicas[it[0].name])
        stopped[source] -= 1
        idle[fullest.nodes] -= fullest.gpus
        replicas[fullest.name] += 1
        extra[fullest.name] += 1


def _loads(pool: OptimizationProblem, solution: PoolSolution) -> defaultdict[str, float]:
    """Return the load of each cell, as the number of replicas that would be fully utilised."""
    cells, load = {c.name: c for c in pool.cells}, defaultdict[str, float](float)
    for f in solution.flows:
        load[f.cell] += f.rate / cells[f.cell].capacity[f.demand]
    return load


def _stopped(current: CurrentState | None, solution: PoolSolution) -> Counter[str]:
    """Return the number of running replicas that the solution stops, by cell."""
    if current is None:
        return Counter()
    left = Counter(current.replicas) + Counter(solution.started)
    for (source, to), n in solution.switched.items():
        left[source] -= n
        left[to] += n
    left.subtract(solution.replicas)
    return left


def _sources(cell: Cell, current: CurrentState | None, stopped: Counter[str]) -> list[str]:
    """Return the cells whose replicas can become replicas of `cell` at no cost.

    For a new plan, this is only the cell itself. When re-planning, these are cells with replicas that would
    otherwise be stopped.
    """
    if current is None:
        return [cell.name]
    same = [cell.name, *sorted(one for one, other in current.free_switches if other == cell.name)]
    return [name for name in same if stopped[name] > 0]
