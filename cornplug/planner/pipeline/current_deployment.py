"""Current deployment as a part of a new pool: running cells, ages of replicas, and costs of changes.

Cells that differ only in their tier have the same processes, so switching between them is free. SGLang can
switch roles while it runs (prefill to decode and back, with a transfer backend that supports this). Any other
change is a restart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from math import log

from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.inputs.schema import ChangeRules
from cornplug.planner.optimizer.optimization_problem import CurrentState, MachineClass, OptimizationProblem
from cornplug.planner.plan import Plan, PlannedGroup

ProcessKey = tuple[str, str, str, int, int, int, int, int, bool, float, str, int]
"""Fields that identify the processes of a group or cell: service, engine, nodes, TP, PP, DP, DCP, PCP, EP,
share, quantisation, and tokens per iteration, which are a command-line flag (0 if not planned)."""


def group_key(g: PlannedGroup) -> ProcessKey:
    chunk = 0 if g.settings is None else g.settings.chunk_tokens
    place = (g.service, g.engine, g.nodes)
    return (*place, *astuple(g.parallelism), g.expert_parallel, g.share, g.quantisation, chunk)


def cell_key(spec: CellSpec) -> ProcessKey:
    f = spec.footprint
    chunk = 0 if spec.settings is None else spec.settings.chunk_tokens
    place = (spec.service.name, f.engine, f.nodes.name)
    return (*place, *astuple(f.parallelism), f.expert_parallel, f.share, f.quantisation, chunk)


def keep_current(specs: Sequence[CellSpec], pruned: Sequence[CellSpec], plan: Plan) -> list[CellSpec]:
    """Return the pruned cells and the cells with running replicas.

    A cell with running replicas is kept even if it is dominated, because its replicas have no start cost.
    """
    runs = {group_key(g) for g in plan.groups}
    names = {spec.cell.name for spec in pruned}
    return [spec for spec in specs if spec.cell.name in names or cell_key(spec) in runs]


def adopt_current(
    pool: OptimizationProblem, cells: Mapping[str, CellSpec], change: ChangeRules, plan: Plan, now: float
) -> tuple[OptimizationProblem, dict[str, CellSpec]]:
    """Return the pool with `current` set, and its cells with the possible switches.

    `plan` is the plan of the current deployment, and `now` is the Unix time.
    """
    switches, free = _switches(cells.values(), change)
    known = {
        name: replace(spec, cell=replace(spec.cell, switches_with=switches.get(name, ())))
        for name, spec in cells.items()
    }
    nodes = {n.name: n for n in pool.nodes}
    replicas: dict[str, int] = defaultdict(int)
    below_min_dwell: dict[str, int] = defaultdict(int)
    for g in plan.groups:
        spec = find_cell(g, cells.values())
        if spec is not None:
            replicas[spec.cell.name] += g.replicas
            if g.since is not None and now - g.since < change.min_dwell_s:
                below_min_dwell[spec.cell.name] += g.replicas
    switch_cost = max((_dollars(cells[name], nodes, change.role_switch_s) for name in replicas), default=0.0)
    current = CurrentState(
        replicas=dict(replicas),
        below_min_dwell=dict(below_min_dwell),
        start_cost={name: _dollars(spec, nodes, change.start_s) for name, spec in cells.items()},
        switch_cost=switch_cost,
        horizon_hours=change.horizon_hours,
        max_changes=change.max_changes,
        free_switches=free,
    )
    return replace(pool, cells=tuple(known[c.name].cell for c in pool.cells), current=current), known


def limit_to_cells(current: CurrentState | None, cells: Iterable[str]) -> CurrentState | None:
    """Return the current deployment with only the replicas of these cells.

    Other cells are not in the pool, so their replicas are stopped.
    """
    if current is None:
        return None
    names = set(cells)
    return replace(
        current,
        replicas={name: n for name, n in current.replicas.items() if name in names},
        below_min_dwell={name: n for name, n in current.below_min_dwell.items() if name in names},
    )


def find_cell(g: PlannedGroup, specs: Iterable[CellSpec]) -> CellSpec | None:
    """Return the cell with the group's processes whose tier is closest to the group's tier, or None."""
    same = [spec for spec in specs if cell_key(spec) == group_key(g)]
    return min(same, key=lambda spec: _distance(spec, g)) if same else None


def _distance(spec: CellSpec, g: PlannedGroup) -> float:
    if g.tier_s is None or not spec.has_times:
        return spec.tier.seconds
    return abs(log(min(spec.tier.seconds, 1e9)) - log(g.tier_s))


def _switches(
    specs: Iterable[CellSpec], change: ChangeRules
) -> tuple[dict[str, tuple[str, ...]], frozenset[tuple[str, str]]]:
    found: dict[str, list[str]] = defaultdict(list)
    free = set()
    by_place: dict[ProcessKey, list[CellSpec]] = defaultdict(list)
    for spec in specs:
        by_place["/".join(_switch_key(spec)), *cell_key(spec)[1:]].append(spec)
    for same_place in by_place.values():
        for one in same_place:
            for other in same_place:
                if one is other:
                    continue
                if cell_key(one) == cell_key(other):
                    free.add((one.cell.name, other.cell.name))
                    found[one.cell.name].append(other.cell.name)
                elif change.role_switch and _switchable(one) and _switchable(other):
                    found[one.cell.name].append(other.cell.name)
    return {name: tuple(others) for name, others in found.items()}, frozenset(free)


def _switch_key(spec: CellSpec) -> tuple[str, ...]:
    """Return the key of cells between which replicas may switch. P and D of one model have the same key."""
    return tuple(c.name for c in spec.service.components) if _switchable(spec) else (spec.service.name,)


def _switchable(spec: CellSpec) -> bool:
    return (
        spec.footprint.engine == "sglang"
        and spec.footprint.parallelism.pp == 1
        and spec.service.tasks in ("P", "D")
    )


def _dollars(spec: CellSpec, nodes: Mapping[str, MachineClass], seconds: float) -> float:
    """Return the cost of a replica's GPUs during `seconds` in which they do not serve requests."""
    node = nodes[spec.cell.nodes]
    return spec.cell.gpus * node.price / node.gpus * seconds / 3600
