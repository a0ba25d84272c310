"""The pool model as a mixed-integer linear program.

Sets        demands u, variants v, services s, cells j, node classes n, cache levels l
Variables   phi_v  rate of a variant                 x_j  replicas of a cell (integer)
            f_uj   work of a demand on a cell        z_n  nodes of a class (integer)
            w_l    cache level chosen (binary)       e_j  cell used (binary)
            a_j, d_j, m_jk  starts, stops, role switches (integer; `solution.py`)
Objectives  `solution.py`: dollars; or goodput, then dollars; or the least share, then goodput, then dollars
Constraints one function per kind. Every row is named, and a plan's reasons refer to these names

Work may always use a cell of a tighter tier than it requires. Tiers are nested (a cell that stays under 0.2 s
also stays under 0.5 s), so f needs no index for tiers. Instead, the cells of a tier and of all tighter tiers
must be sufficient for all work that requires this tier or a tighter tier. By Gale's theorem for nested sets,
this is necessary and sufficient for the existence of a flow. `solution.py` then splits f by tier.

For the loss of a node, the model limits the number of a cell's replicas on each node. Nodes are counted, not
indexed, so the model chooses the limit k (a binary b_jk for each k): x_j <= sum of k s_jk, with s_jk <= z_n
if b_jk = 1 and s_jk = 0 otherwise. Whether the replicas of all services can be placed within these limits is
checked at placement, and a failed placement is excluded as a `CrowdedNode`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

from pulp import lpSum

from cornplug.errors import PlanUnfinished
from cornplug.planner.inputs.schema import SolverOptions
from cornplug.planner.optimizer import decomposition, infeasibility, optimization_problem, solution
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    CrowdedNode,
    OptimizationProblem,
    PoolSolution,
    SolveProgress,
)
from cornplug.planner.optimizer.pool_model import PoolModel
from cornplug.planner.optimizer.solution import (
    SolveGoal,
    Values,
    goals,
    has_integer_values,
    polish,
    read_solution,
    trim,
    with_sign,
)
from cornplug.planner.optimizer.solvers import SolverLimits, SolverRun, with_objective
from cornplug.planner.optimizer.solvers import solve as run_solver

TIE_BREAK_GAP: Final = 1e-5
"""Gap at which the tie-break stops. It is smaller than the effect of one cell's preference (its tier or
engine) among a hundred cells."""
TIE_BREAK_WORK: Final = 0.25
"""Share of a solve's work that the tie-break gets."""

# Constraints ----------------------------------------------------------------------------------


def add_constraints(model: PoolModel) -> None:
    add_demand_rows(model)
    add_flow_rows(model)
    add_slice_rows(model)
    add_capacity_rows(model)
    add_growth_rows(model)
    add_spot_rows(model)
    add_packing_rows(model)
    add_stock_rows(model)
    add_network_rows(model)
    add_cache_rows(model)
    _add_spare_rows(model)
    if model.pool.current is not None:
        solution.add_transition_rows(model, model.pool.current)


def add_demand_rows(model: PoolModel) -> None:
    """Require that all requests are served (cost), or limit the served requests to all (goodput, max-min)."""
    for u in model.demands.values():
        served = lpSum(model.phi[v.name] for v in model.variants if v.demand == u.name)
        cost = model.pool.objective == "cost"
        model.add(f"demand[{u.name}]", served == u.rate if cost else served <= u.rate)
        if model.pool.objective == "max-min":
            model.add(f"share[{u.name}]", served >= u.rate * model.min_served)


def add_flow_rows(model: PoolModel) -> None:
    """Require that a service's cells do all work of the variants, in the tier that the work requires or in a
    tighter tier."""
    for (u, service), needs in model.needs.items():
        tiers = sorted({need.tier for _, need in needs})
        for tier in tiers:
            asked = lpSum(need.work * model.phi[v.name] for v, need in needs if need.tier <= tier)
            done = lpSum(
                model.f[u, c.name]
                for c in model.cells_of[service]
                if c.tier <= tier and (u, c.name) in model.f
            )
            within = "" if tier == inf else f",{tier:.12g}s"
            model.add(f"flow[{u},{service}{within}]", done == asked if tier == tiers[-1] else done >= asked)


def add_slice_rows(model: PoolModel) -> None:
    """For demands that are divided into slices, route each slice along one variant, to one cell of each
    service."""
    for v in model.variants:
        u = model.demands[v.demand]
        if u.slices is None:
            continue
        size = u.rate / u.slices
        for i, need in enumerate(v.needs):
            for cell in model.eligible_cells(v, need):
                model.y[v.name, i, cell.name] = model.add_integer(f"y_{len(model.y)}", u.slices)
            parts = lpSum(model.y[v.name, i, cell.name] for cell in model.eligible_cells(v, need))
            model.add(f"slices[{v.name},{need.service},{i}]", size * parts == model.phi[v.name])
    for (name, cell_name), amount in model.f.items():
        u = model.demands[name]
        if u.slices is not None:
            parts = lpSum(
                u.rate / u.slices * need.work * model.y[v.name, i, cell_name]
                for v in model.variants
                if v.demand == name
                for i, need in enumerate(v.needs)
                if (v.name, i, cell_name) in model.y
            )
            model.add(f"slices[{name},{cell_name}]", amount == parts)


def add_capacity_rows(model: PoolModel) -> None:
    """Limit the work to the replicas' capacity, and keep a share of the capacity free for online peaks."""
    limits = model.pool.limits
    for cell in model.pool.cells:
        everyone, online = model.demands_of(cell), model.online_demands_of(cell)
        if online and limits.online_share < limits.max_utilisation:
            capacity = limits.online_share * model.x[cell.name]
            model.add(f"online[{cell.name}]", model.load(cell, online) <= capacity)
        if len(online) < len(everyone) or limits.online_share >= limits.max_utilisation:
            capacity = limits.max_utilisation * model.x[cell.name]
            model.add(f"capacity[{cell.name}]", model.load(cell, everyone) <= capacity)


def add_growth_rows(model: PoolModel) -> None:
    """Require that running replicas can serve growing online demands until additional replicas have
    started."""
    for cell in model.pool.cells:
        grown = {u: 1 + model.demands[u].growth_per_s * cell.start_s for u in model.online_demands_of(cell)}
        if any(times > 1 for times in grown.values()):
            load = lpSum(model.f[u, cell.name] * (times / cell.capacity[u]) for u, times in grown.items())
            capacity = model.pool.limits.max_utilisation * model.x[cell.name]
            model.add(f"growth[{cell.name}]", load <= capacity)


def add_spot_rows(model: PoolModel) -> None:
    """Limit the share of an online demand's work at a service that is done on spot machines."""
    limit = model.pool.limits.spot_share
    for u, service in model.needs:
        work = {c.name: model.f[u, c.name] for c in model.cells_of[service] if (u, c.name) in model.f}
        lost = [f for name, f in work.items() if model.nodes[model.cells[name].nodes].spot]
        if lost and limit < 1 and model.demands[u].online:
            model.add(f"spot[{u},{service}]", lpSum(lost) <= limit * lpSum(work.values()))


def add_packing_rows(model: PoolModel) -> None:
    """Limit the used GPUs to the GPUs of the nodes.

    Counting nodes is exact, because cells use GPU counts that divide one another.
    """
    for name, node in model.nodes.items():
        used = lpSum(c.gpus * model.x[c.name] for c in model.pool.cells if c.nodes == name)
        model.add(f"packing[{name}]", used <= node.gpus * model.z[name])


def add_stock_rows(model: PoolModel) -> None:
    for name, node in model.nodes.items():
        model.add(f"stock[{name}]", model.z[name] <= node.stock)


def add_network_rows(model: PoolModel) -> None:
    """Limit the traffic between nodes to the bandwidth of their network cards."""
    traffic = {v.name: v.network for v in model.variants if v.network > 0}
    if not traffic:
        return
    share = model.pool.limits.network_utilisation
    # Upper bound on the traffic. A card without a limit counts as a card with this bandwidth.
    most = sum(
        u.rate * max((v.network for v in model.variants if v.demand == u.name), default=0.0)
        for u in model.demands.values()
    )
    capacity = lpSum(min(share * node.nic, most) * model.z[name] for name, node in model.nodes.items())
    model.add("network", lpSum(size * model.phi[v] for v, size in traffic.items()) <= capacity)


def add_cache_rows(model: PoolModel) -> None:
    """Choose one level of each cache, so that all caches fit into the nodes' memory.

    A variant can be used only if its levels are chosen.
    """
    levels = model.pool.levels
    for name in dict.fromkeys(level.cache for level in levels):
        chosen = lpSum(model.w[level.name] for level in levels if level.cache == name)
        model.add(f"cache[{name}]", chosen == 1)
    for level in levels:
        for u in model.demands.values():
            users = [v for v in model.variants if v.demand == u.name and level.name in v.levels]
            if users:
                rate = lpSum(model.phi[v.name] for v in users)
                model.add(f"level[{level.name},{u.name}]", rate <= u.rate * model.w[level.name])
    if levels:
        most = sum(level.bytes for level in levels)
        capacity = lpSum(min(node.dram, most) * model.z[name] for name, node in model.nodes.items())
        model.add("memory[caches]", lpSum(level.bytes * model.w[level.name] for level in levels) <= capacity)


# Solving --------------------------------------------------------------------------------------


def build(pool: OptimizationProblem) -> PoolModel:
    """Create the model with its variables and all constraints, without an objective."""
    model = PoolModel(pool)
    if pool.current is not None:
        solution._add_transition_variables(model, pool.current)
    add_constraints(model)
    return model


def solve(
    pool: OptimizationProblem,
    settings: SolverOptions,
    progress: Callable[[SolveProgress], None] | None = None,
    *,
    notes: Mapping[str, str] | None = None,
    near_cells: Collection[str] = (),
) -> PoolSolution:
    """Return the best plan for the pool's objective.

    Among equally good plans, the plan with the lowest cost is chosen, and then the plan with the best
    tie-break. The same pool and settings have the same plan, unless `settings.time_limit_s` is reached.

    Args:
        progress: Called when the best plan or the bound improves.
        notes: Reasons why no cell can serve a demand, by demand, for the error message.
        near_cells: Names of cells in the plan of a similar pool, with which the least-cost search begins.

    Raises PlanInfeasible with the constraint and the shortage, PlanUnfinished if a limit is reached before
    any plan is found, and ConfigError if the pool itself is invalid.
    """
    began = time.monotonic()
    optimization_problem.check(pool)
    model = build(pool)
    infeasibility.refuse_unserved(model, notes or {})
    wanted = goals(model)
    limits = _limits(wanted, 0, settings, began, 0.0)
    if pool.objective == "cost":
        cost_objective = wanted[0].expression
        first, values = decomposition.least_cost(model, cost_objective, limits, progress, build, near_cells)
    else:
        first, values = _minimise(model, wanted[0], limits, progress)
    if first.status == "infeasible":
        raise infeasibility.explain(pool, settings, build)
    if values is None:
        raise PlanUnfinished(
            f"no plan was found in {first.seconds:.3g} s, and infeasibility was not proven. "
            "Raise solver.work and solver.time_limit_s, or plan with fewer node classes."
        )
    spent = first.work
    for i, goal in enumerate(wanted[1:], 1):
        _hold_goal(model, wanted[i - 1], values, last=i == len(wanted) - 1)
        limits = _limits(wanted, i, settings, began, spent)
        run, better = _minimise(model, goal, limits, None, values)
        values, spent = better or values, spent + run.work
        first = replace(first, work=spent, timed_out=first.timed_out or run.timed_out)
    values = trim(model, values)
    if not has_integer_values(model, values):
        fresh = build(pool)
        # Omit the tie-break goal, which has only integer variables.
        values = polish(model, fresh, [(goal.expression, goal.sign) for goal in goals(fresh)[:-1]], values)
    reached = wanted[0].evaluate(values)
    if reached < first.objective - 1e-6:
        first = with_objective(first, reached, settings.gap)
    return read_solution(model, values, first, wanted[0].sign, time.monotonic() - began)


def _minimise(
    model: PoolModel,
    goal: SolveGoal,
    limits: SolverLimits,
    progress: Callable[[SolveProgress], None] | None,
    start_values: Values | None = None,
) -> tuple[SolverRun, Values | None]:
    """Call the solver once, and return the run and the values of the plan that it found, if any."""
    model.problem.setObjective(goal.sign * goal.expression)
    for variable, value in (start_values or {}).items():
        variable.varValue = value
    watch = None if progress is None else _with_sign(progress, goal.sign)
    run = run_solver(model.problem, limits, watch, start=start_values is not None)
    if run.status in ("infeasible", "none"):
        return run, None
    return run, {v: v.varValue or 0.0 for v in model.problem.variables()}


def _with_sign(progress: Callable[[SolveProgress], None], sign: int) -> Callable[[SolveProgress], None]:
    def tell(at: SolveProgress) -> None:
        progress(with_sign(at, sign))

    return tell


def _limits(
    all_goals: list[SolveGoal], i: int, settings: SolverOptions, began: float, spent: float
) -> SolverLimits:
    """Return the limits for goal `i`: most of the remaining work and time.

    The tie-break has its own share of the work (`TIE_BREAK_WORK`).
    """
    share = 0.6 if i < len(all_goals) - 2 else 0.95
    left_s = settings.time_limit_s - (time.monotonic() - began)
    seconds = max(share * left_s, 0.02 * settings.time_limit_s)
    if i == len(all_goals) - 1:
        return SolverLimits(TIE_BREAK_GAP, seconds, settings.threads, TIE_BREAK_WORK * settings.work)
    work = max(share * (settings.work - spent), 0.02 * settings.work)
    return SolverLimits(settings.gap, seconds, settings.threads, work)


def _hold_goal(model: PoolModel, goal: SolveGoal, values: Values, *, last: bool) -> None:
    """Add a constraint that keeps the value of an earlier goal. Before the tie-break, also fix the numbers of
    nodes (`tie_break`)."""
    reached = goal.evaluate(values)
    allowed = reached + 1e-7 * max(1.0, abs(reached))
    # Do not add this as a named row, because it is not a constraint of the pool and must not be reported as a
    # reason for a plan.
    model.problem.addConstraint(goal.sign * goal.expression <= allowed, f"keep:{goal.name}")
    if last:
        for z in model.z.values():
            z.lowBound = z.upBound = round(values[z])


def _add_spare_rows(model: PoolModel) -> None:
    """Add rows for every used cell of the services that must survive the loss of replicas.

    The free capacity of cells that can replace the lost replicas must be sufficient for the lost replicas'
    maximum load. After a loss, the share of the capacity for peaks may be used. Capacities are converted to
    lost replicas with the minimum rate over all demands. This is exact if the cells' capacities are multiples
    of one another, and conservative otherwise.
    """
    limit = model.pool.limits.max_utilisation
    for name, used in model.e.items():
        cell = model.cells[name]
        model.add(f"used[{name}]", model.x[name] <= model.max_replicas(cell) * used)
        left = [
            rate * (limit * model.x[other.name] - model.load(other, model.online_demands_of(other)))
            for other in model.cells_of[cell.service]
            if (rate := _replacement_ratio(model, other, cell)) > 0
        ]
        if not model.pool.limits.by_node:
            model.add(f"spare[{name}]", lpSum(left) >= limit * used)
            continue
        beside = _cells_lost_together(model, cell)
        needed = lpSum(worth * model.max_lost_replicas(other) for other, worth in beside)
        most = sum(worth * model.replicas_per_node(other) for other, worth in beside)
        # The row has no effect for a cell that is not used.
        model.add(f"spare[{name}]", lpSum(left) + limit * most * (1 - used) >= limit * needed)
    for name, choices in model.spread.items():
        _add_spread_rows(model, model.cells[name], choices)
    for i, crowded in enumerate(model.pool.limits.crowded):
        _exclude_crowded_node(model, i, crowded)


def _replacement_ratio(model: PoolModel, cell: Cell, lost: Cell) -> float:
    """Return how many replicas of `lost` one replica of `cell` can replace.

    Returns 0 if `cell` cannot do all of the work of `lost`.
    """
    if cell.tier > lost.tier:
        return 0.0
    return min(cell.capacity.get(u, 0.0) / lost.capacity[u] for u in model.online_demands_of(lost))


def _cells_lost_together(model: PoolModel, lost: Cell) -> list[tuple[Cell, float]]:
    """Return the cells whose replicas may be lost together with a node of `lost`.

    Each cell is returned with the maximum number of replicas of `lost` to which one replica of the cell
    corresponds.
    """
    found = []
    for cell in model.cells_of[lost.service]:
        common = [u for u in model.online_demands_of(lost) if u in cell.capacity]
        if cell.name in model.e and cell.nodes == lost.nodes and cell.tier <= lost.tier and common:
            found.append((cell, max(cell.capacity[u] / lost.capacity[u] for u in common)))
    return found


def _add_spread_rows(model: PoolModel, cell: Cell, choices: list[tuple[int, Any, Any]]) -> None:
    """Limit the number of a cell's replicas on each node to k, for exactly one k."""
    name, z = cell.name, model.z[cell.nodes]
    most = min(model.nodes[cell.nodes].stock, model.max_replicas(cell))
    model.add(f"spread[{name}]", model.x[name] <= lpSum(k * s for k, _, s in choices))
    model.add(f"spread[{name},one]", lpSum(b for _, b, _ in choices) == model.e[name])
    model.add(f"spread[{name},nodes]", lpSum(s for _, _, s in choices) <= z)
    for k, b, s in choices:
        model.add(f"spread[{name},{k}]", s <= most * b)


def _exclude_crowded_node(model: PoolModel, i: int, crowded: CrowdedNode) -> None:
    """Exclude the placement of a crowded node.

    The plan must have more nodes of this class than before, or survive the loss of all replicas of that node.
    """
    if crowded.nodes not in model.z:
        return
    more = model.add_integer(f"q_{i}", 1)
    model.add(f"crowded[{i}]", model.z[crowded.nodes] >= (crowded.count + 1) * more)
    for name, replicas in crowded.replicas.items():
        if name in model.spread:
            lost = model.max_lost_replicas(model.cells[name])
            model.add(f"crowded[{i},{name}]", lost >= replicas * (model.e[name] - more))
