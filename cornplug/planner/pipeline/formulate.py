"""Formulation of the planner's input as a pool: services, request paths, tiers, cells and variants.

The current deployment is a part of the new pool: running cells, ages of replicas, and costs of changes.
Cells that differ only in their tier have the same processes, so switching between them is free. SGLang can
switch roles while it runs (prefill to decode and back, with a transfer backend that supports this). Any other
change is a restart.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from math import log
from typing import Final

from cornplug.planner.candidates import replica_configs
from cornplug.planner.candidates.cell_capacity import CellBuilder
from cornplug.planner.candidates.cells import CellSpec, loosest_variants, undominated_cells
from cornplug.planner.candidates.latency_tiers import LatencyTier, TierChain, tier_chain, tiers_per_service
from cornplug.planner.candidates.replica_configs import Service
from cornplug.planner.candidates.request_paths import (
    RequestPath,
    describe_infeasibility,
    find_unserved_demands,
    request_paths,
)
from cornplug.planner.candidates.samples import (
    CacheScenario,
    CacheSizeOption,
    IdleReplicas,
    Samples,
    cache_levels,
    cache_scenarios,
)
from cornplug.planner.candidates.timed_configs import corrections_by_key
from cornplug.planner.inputs import component_shapes, gpu_catalog
from cornplug.planner.inputs.request_sampling import RequestClass, request_classes
from cornplug.planner.inputs.schema import (
    ChangeRules,
    Component,
    GpuSpec,
    LaunchOptions,
    NodeClass,
    PlanInput,
    PlanRules,
    SolverOptions,
)
from cornplug.planner.optimizer.optimization_problem import (
    CurrentState,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    RateDemand,
    ServiceDemand,
)
from cornplug.planner.plan import Plan, PlannedGroup, TimesCorrection
from cornplug.settings import GIB

ProcessKey = tuple[str, str, str, int, int, int, int, int, bool, float, str, int]
"""Fields that identify the processes of a group or cell: service, engine, nodes, TP, PP, DP, DCP, PCP, EP,
share, quantisation, and tokens per iteration, which are a command-line flag (0 if not planned)."""
GB: Final = 1e9


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


@dataclass(frozen=True)
class FormulatedProblem:
    """Pool, the objects to which names in the pool refer, and the input tables that later steps need."""

    name: str
    components: tuple[Component, ...]
    """Components with resolved shapes and fingerprints."""
    rules: PlanRules
    solver: SolverOptions
    pool: OptimizationProblem
    classes: Mapping[str, RequestClass]
    cells: Mapping[str, CellSpec]
    request_paths: Mapping[str, RequestPath]
    levels: tuple[CacheSizeOption, ...]
    samples: Samples
    nodes: tuple[NodeClass, ...]
    cell_builder: CellBuilder
    launch: LaunchOptions

    @property
    def corrections(self) -> list[TimesCorrection]:
        """Corrections of the profiles' times, which `cornplug replan` derived from engine metrics."""
        return list(self.cell_builder.corrections.values())

    @property
    def dropped(self) -> Counter[str]:
        """Number of excluded cells by reason."""
        return self.cell_builder.dropped

    @property
    def infeasibility_notes(self) -> dict[str, str]:
        """Reasons why no cell in the pool can serve a request class, by class."""
        return {name: self._note(name) for name in find_unserved_demands(self.pool)}

    def _note(self, name: str) -> str:
        of, cell_builder = self.classes[name], self.cell_builder
        request_paths = [w for w in self.request_paths.values() if w.request_class.name == name]
        base = cell_builder.base_scenarios[name]
        samples = {
            s.name: self.samples.for_service(s, of, base) for w in request_paths for s in w.template.stages
        }
        return describe_infeasibility(
            of, request_paths, cell_builder.timed_configs, cell_builder.dropped, samples
        )

    def scenario(self, name: str, levels: Collection[str]) -> CacheScenario:
        """Return the chosen cache levels that affect a class, with the class's hit rates."""
        return next(
            path.scenario
            for path in self.request_paths.values()
            if path.request_class.name == name and path.scenario.level_names <= frozenset(levels)
        )

    def with_cells(self, changed: Mapping[str, CellSpec]) -> FormulatedProblem:
        """Return the problem with changed cells. Cells without capacity are removed."""
        cells = {name: changed.get(name, spec) for name, spec in self.cells.items()}
        cells = {name: spec for name, spec in cells.items() if spec.cell.capacity}
        runs = limit_to_cells(self.pool.current, cells)
        pool = replace(self.pool, cells=tuple(spec.cell for spec in cells.values()), current=runs)
        return replace(self, cells=cells, pool=pool)


def nic_bytes_s(nodes: NodeClass, gpu: GpuSpec) -> float:
    """Return a node's network bandwidth in bytes per second."""
    return (gpu.nic_gb_s * nodes.gpus if nodes.nic_gb_s is None else nodes.nic_gb_s) * GB


def formulate(
    plan_input: PlanInput, corrections: Iterable[TimesCorrection] | None = None
) -> FormulatedProblem:
    """Return the optimisation problem of an input.

    `corrections` are corrections of the profiles' times. None means the corrections of the running plan, if
    there is a running plan. Raises ConfigError if the input refers to a GPU, price, checkpoint or trace that
    does not exist.
    """
    rules = plan_input.rules
    components = component_shapes.resolve(plan_input.components)
    by_name, encoders = {c.name: c for c in components}, replica_configs.canonical_encoders(components)
    classes = request_classes(plan_input.applications)
    table = gpu_catalog.gpu_table(plan_input.gpus)
    nodes = gpu_catalog.node_classes(plan_input.pool, table, gpu_catalog.price_table(plan_input.prices))
    samples = Samples(encoders, rules.seed, IdleReplicas(by_name, encoders, table, rules))
    levels = cache_levels(plan_input.caches, classes, by_name, encoders)
    bases = {name: cache_scenarios(c, levels, encoders)[0] for name, c in classes.items()}
    slowest = min(nic_bytes_s(n, table[n.gpu]) for n in nodes)
    candidates = [
        request_path
        for name, paths in replica_configs.paths(classes, components).items()
        for path in paths
        for scenario in cache_scenarios(classes[name], levels, encoders)
        for request_path in request_paths(
            classes[name], by_name[classes[name].app.llm], path, scenario, samples, slowest
        )
    ]
    change = plan_input.change
    old = None if change is None else Plan.load(change.plan)
    if corrections is None:
        corrections = [] if old is None else old.corrections
    cell_builder = CellBuilder(rules, nodes, table, bases, samples, corrections_by_key(corrections))
    chains = _chains(candidates, len(nodes))
    every = [
        spec
        for service, users in _classes_by_service(candidates).items()
        for spec in cell_builder.build_cells(
            service, users, chains[service.name], _loosest_tiers(service, candidates, chains)
        )
    ]
    specs = undominated_cells(every) if old is None else keep_current(every, undominated_cells(every), old)
    pool = OptimizationProblem(
        nodes=tuple(_nodes(n, table[n.gpu]) for n in nodes),
        cells=tuple(spec.cell for spec in specs),
        demands=tuple(_demand(c, rules) for c in classes.values()),
        variants=loosest_variants(_variant(w, chains, cell_builder) for w in candidates),
        levels=tuple(level.cache_level for level in levels),
        limits=_limits(rules, candidates),
        objective=rules.objective,
    )
    cells = {spec.cell.name: spec for spec in specs}
    if change is not None and old is not None:
        pool, cells = adopt_current(pool, cells, change, old, time.time())
    return FormulatedProblem(
        name=plan_input.name,
        components=tuple(components),
        rules=rules,
        solver=plan_input.solver,
        pool=pool,
        classes=classes,
        cells=cells,
        request_paths={w.name: w for w in candidates},
        levels=levels,
        samples=samples,
        nodes=nodes,
        cell_builder=cell_builder,
        launch=plan_input.launch,
    )


def _classes_by_service(candidates: list[RequestPath]) -> dict[Service, dict[str, RequestClass]]:
    users: dict[Service, dict[str, RequestClass]] = {}
    for request_path in candidates:
        for service in request_path.template.stages:
            users.setdefault(service, {})[request_path.request_class.name] = request_path.request_class
    return users


def _chains(candidates: list[RequestPath], node_classes: int) -> dict[str, TierChain]:
    wanted: dict[str, set[tuple[float, float]]] = {}
    for request_path in candidates:
        for p in request_path.stage_budgets:
            wanted.setdefault(p.service.name, set()).add((p.seconds, p.tpot_s))
    most = tiers_per_service(len(wanted), node_classes)
    return {name: tier_chain(pairs, most) for name, pairs in wanted.items()}


def _loosest_tiers(
    service: Service, candidates: list[RequestPath], chains: Mapping[str, TierChain]
) -> dict[str, LatencyTier]:
    """Return the loosest tier of a service that the request paths of each class allow."""
    asked = [
        (w.request_class.name, p)
        for w in candidates
        for p in w.stage_budgets
        if p.service.name == service.name
    ]
    loosest: dict[str, LatencyTier] = {}
    for name, p in asked:
        tier = chains[service.name].loosest_within(p.seconds, p.tpot_s)
        loosest[name] = max(tier, loosest.get(name, tier), key=lambda t: t.rank)
    return loosest


def _nodes(nodes: NodeClass, gpu: GpuSpec) -> MachineClass:
    assert nodes.price_per_hour is not None, "node_classes fills prices in"
    return MachineClass(
        nodes.name,
        nodes.gpu,
        nodes.gpus,
        nodes.price_per_hour,
        nodes.stock,
        nic_bytes_s(nodes, gpu),
        nodes.dram_gib * GIB,
        spot=nodes.spot,
    )


def _demand(request_class: RequestClass, rules: PlanRules) -> RateDemand:
    slices = rules.slices if rules.split == "slices" else None
    growth_per_s = request_class.request.growth_per_minute / 60
    return RateDemand(
        request_class.name,
        request_class.rate,
        request_class.online,
        request_class.request.weight,
        growth_per_s,
        slices,
    )


def _variant(
    request_path: RequestPath, chains: Mapping[str, TierChain], cell_builder: CellBuilder
) -> PathVariant:
    needs = tuple(
        ServiceDemand(
            p.service.name,
            chains[p.service.name].loosest_within(p.seconds, p.tpot_s).value,
            cell_builder.relative_work(p.service, request_path.request_class, request_path.scenario),
        )
        for p in request_path.stage_budgets
    )
    needs = tuple(n for n in needs if n.work > 0)
    return PathVariant(
        request_path.name,
        request_path.request_class.name,
        request_path.template.structure,
        needs,
        request_path.scenario.level_names,
        request_path.network_bytes,
    )


def _limits(rules: PlanRules, candidates: list[RequestPath]) -> PoolLimits:
    online = {s.name for w in candidates if w.request_class.online for s in w.template.stages}
    return PoolLimits(
        rules.max_utilisation,
        rules.online_share,
        rules.network_utilisation,
        rules.spot_share,
        frozenset(online) if rules.n_plus_one else frozenset(),
        by_node=rules.n_plus_one == "node",
    )
