"""Conversion of a pool's solution to a plan, with routes and the costs of jobs.

The cost of a job is a share of the cost, until the job's deadline, of the machines that its requests use.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from math import isinf

from cornplug import __version__
from cornplug.planner.candidates.cell_capacity import WORKLOADS_BY_URGENCY
from cornplug.planner.candidates.cells import CellSpec
from cornplug.planner.candidates.replica_configs import PRIORITY, kv_geometry
from cornplug.planner.inputs import request_sampling
from cornplug.planner.inputs.request_sampling import RequestClass
from cornplug.planner.inputs.request_tables import QUANTITIES
from cornplug.planner.inputs.schema import LLMShape, Slo, Workload
from cornplug.planner.launch.vllm_flags import generator_command
from cornplug.planner.optimizer import solvers
from cornplug.planner.optimizer.optimization_problem import PathVariant, PoolSolution, ServiceDemand
from cornplug.planner.pipeline.formulate import FormulatedProblem
from cornplug.planner.pipeline.place_replicas import Slot, idle_gpus, placement
from cornplug.planner.plan import (
    CacheSize,
    JobForecast,
    KVGeometry,
    LatencyForecast,
    OptimalityProof,
    PercentileSlo,
    Plan,
    PlannedGroup,
    PlannedNodes,
    PlanRoute,
    QosReservation,
    RouteStage,
    SimulatedSlowdown,
)

MIN_FLOW_SHARE = 1e-6
"""Share of a class's rate below which a flow counts as 0, because of the solver's tolerance."""


def build_plan(problem: FormulatedProblem, solution: PoolSolution, *, digest: str) -> Plan:
    """Return the plan for a solution.

    The plan's latency forecasts contain no times until the plan is simulated (`validate.py`).
    """
    names = {cell: group_name(cell) for cell, n in solution.replicas.items() if n}
    plan_routes = _routes(problem, solution, names)
    nodes = _nodes(problem, solution)
    goodput = sum(problem.classes[r.class_name].request.weight * r.rate for r in plan_routes)
    return Plan(
        name=problem.name,
        objective=problem.pool.objective,
        cost_per_hour=sum(n.count * n.price_per_hour for n in nodes),
        goodput=None if problem.pool.objective == "cost" else goodput,
        nodes=nodes,
        groups=_groups(problem, solution, names),
        routes=plan_routes,
        latency_forecasts=[_forecast(problem, solution, c, plan_routes) for c in problem.classes.values()],
        caches=_caches(problem, solution),
        reservations=_reservations(problem, plan_routes),
        allow_anonymous=problem.launch.allow_anonymous,
        proof=_proof(problem, solution),
        corrections=problem.corrections,
        input_digest=digest,
        cornplug=__version__,
    )


def group_name(cell: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", cell)


def _nodes(problem: FormulatedProblem, solution: PoolSolution) -> list[PlannedNodes]:
    idle = idle_gpus(problem.pool, solution)
    return [
        PlannedNodes(
            name=n.name,
            gpu=n.gpu,
            gpus=n.gpus,
            count=solution.nodes[n.name],
            price_per_hour=n.price_per_hour or 0.0,
            spot=n.spot,
            idle_gpus=idle[n.name],
            hosts=[n.host] if n.host else [],
        )
        for n in problem.nodes
        if solution.nodes.get(n.name)
    ]


def _groups(
    problem: FormulatedProblem, solution: PoolSolution, names: Mapping[str, str]
) -> list[PlannedGroup]:
    slots = placement(problem.pool, solution)
    return [_group(problem, solution, problem.cells[cell], name, slots[cell]) for cell, name in names.items()]


def _group(
    problem: FormulatedProblem, solution: PoolSolution, spec: CellSpec, name: str, slots: list[Slot]
) -> PlannedGroup:
    cell, footprint = spec.cell, spec.footprint
    flows = [f for f in solution.flows if f.cell == cell.name and f.rate > MIN_FLOW_SHARE]
    users = [problem.classes[f.demand] for f in flows]
    replicas = solution.replicas[cell.name]
    main, *others = spec.service.components
    return PlannedGroup(
        name=name,
        service=spec.service.name,
        tasks=spec.service.tasks,
        components=[main.name, *(c.name for c in others)],
        model=main.model_argument,
        encoder_models=_encoder_models(problem, spec) if spec.service.tasks == "E" else [],
        engine=footprint.engine,  # type: ignore[arg-type]
        nodes=footprint.nodes.name,
        gpu=footprint.gpu.name,
        **asdict(footprint.parallelism),
        expert_parallel=footprint.expert_parallel,
        share=footprint.share,
        quantisation=footprint.quantisation,
        replicas=replicas,
        extra_replicas=solution.extra.get(cell.name, 0),
        placement=[list(slot) for slot in slots],
        utilisation=sum(f.rate / cell.capacity[f.demand] for f in flows) / replicas,
        capacity=dict(cell.capacity),
        tier_s=spec.tier.seconds if spec.has_times and not isinf(spec.tier.seconds) else None,
        settings=spec.settings,
        kv=_kv(problem, spec, users or [problem.classes[u] for u in cell.capacity]),
        workload=_most_urgent(users) if users else footprint.workload,
        router=problem.rules.router,
        apps=sorted({u.app.name for u in users}),
        profile=spec.source,
        tower=main.tower,
        command=generator_command(main.server, main.model_argument, tp=footprint.parallelism.tp),
    )


def _kv(problem: FormulatedProblem, spec: CellSpec, users: list[RequestClass]) -> KVGeometry | None:
    """Return the language model's KV geometry, which determines buffers, pages and the attention backend."""
    llm = spec.service.llm
    if llm is None or not isinstance(llm.shape, LLMShape):
        return None
    bases = problem.cell_builder.base_scenarios
    return kv_geometry(llm.shape, [d for u in users for d in problem.samples.for_class(u, bases[u.name])])


def _encoder_models(problem: FormulatedProblem, spec: CellSpec) -> list[str]:
    """Return all models that use this service's towers, for the encoder service's command line."""
    fingerprints = {t.fingerprint or t.name for t in spec.service.towers}
    components = {c.name: c for c in problem.components}
    models = []
    for tower in problem.components:
        if tower.kind == "encoder" and (tower.fingerprint or tower.name) in fingerprints:
            owner = components[tower.tower_of] if tower.tower_of and not tower.model else tower
            models.append(owner.model_argument)
    return list(dict.fromkeys(models))


def _most_urgent(users: list[RequestClass]) -> Workload:
    return min((u.app.workload for u in users), key=WORKLOADS_BY_URGENCY.index)


def _forecast(
    problem: FormulatedProblem,
    solution: PoolSolution,
    request_class: RequestClass,
    plan_routes: list[PlanRoute],
) -> LatencyForecast:
    slo = request_class.slo
    return LatencyForecast(
        app=request_class.app.name,
        request=request_class.request.name,
        rate=request_class.rate,
        served=min(
            request_class.rate,
            sum(
                r.rate
                for r in plan_routes
                if (r.app, r.request) == (request_class.app.name, request_class.request.name)
            ),
        ),
        priority=PRIORITY[request_class.app.workload],
        prefix_hit_rate=problem.scenario(request_class.name, solution.levels).hits.prefix
        if request_class.request.prefix
        else 0.0,
        slo_percentile=slo.percentile,
        slo_ttft_s=slo.ttft_s,
        slo_tpot_s=slo.tpot_s,
        slo_e2e_s=slo.e2e_s,
        slo_also=_other_bounds(slo),
        slowdown=_slowdown(slo),
        job=_job_forecast(problem, solution, request_class),
    )


def _other_bounds(slo: Slo) -> list[PercentileSlo]:
    """Return all bounds except the bounds in seconds of the first table."""
    first = PercentileSlo(
        percentile=slo.percentile,
        ttft_slowdown=slo.ttft_slowdown,
        tpot_slowdown=slo.tpot_slowdown,
        e2e_slowdown=slo.e2e_slowdown,
    )
    also = [PercentileSlo.model_validate(table.model_dump()) for table in slo.also]
    return [*([first] if any(bound.relative for q in QUANTITIES for bound in slo.bounds(q)) else []), *also]


def _slowdown(slo: Slo) -> SimulatedSlowdown | None:
    """Return the slowdown forecast without simulated values, or None if no slowdown is bounded."""
    if slo.idle is None or not slo.has_slowdowns:
        return None
    return SimulatedSlowdown(idle=f"{slo.idle.gpu} TP{slo.idle.tp}")


def _caches(problem: FormulatedProblem, solution: PoolSolution) -> list[CacheSize]:
    return [
        CacheSize(
            name=level.cache,
            kind=level.kind,
            component=level.component,
            gib=level.gib,
            hit_rate=dict(level.hit_rate),
        )
        for level in problem.levels
        if level.name in solution.levels and level.gib
    ]


def _reservations(problem: FormulatedProblem, plan_routes: list[PlanRoute]) -> list[QosReservation]:
    """Return the share of the encoder services for each class of service, in proportion to the class's media
    items."""
    users: dict[str, list[tuple[RequestClass, float]]] = {}
    for route in plan_routes:
        of = problem.classes[route.class_name]
        if any(stage.tasks == "E" for stage in route.stages):
            items = sum(request_sampling.mean_length(m.items) for m in of.request.media)
            users.setdefault(of.app.qos, []).append((of, route.rate * items))
    total = sum(load for loads in users.values() for _, load in loads)
    return [_reservation(qos, loads, total) for qos, loads in users.items()]


def _reservation(qos: str, loads: list[tuple[RequestClass, float]], total: float) -> QosReservation:
    deadlines = [ttft_s for of, _ in loads if (ttft_s := of.slo.first_bound_s("ttft")) is not None]
    return QosReservation(
        qos=qos,
        share=sum(load for _, load in loads) / total,
        priority=max(PRIORITY[of.app.workload] for of, _ in loads),
        deadline_s=min(deadlines, default=None),
        apps=sorted({of.app.name for of, _ in loads}),
    )


def _proof(problem: FormulatedProblem, solution: PoolSolution) -> OptimalityProof:
    return OptimalityProof(
        status=solution.status,
        solver=solvers.NAME,
        seconds=solution.seconds,
        first_s=solution.first_s,
        incumbent=solution.objective,
        bound=solution.bound,
        gap=solution.gap,
        unit=_unit(problem),
        timed_out=solution.timed_out,
    )


def _unit(problem: FormulatedProblem) -> str:
    if problem.pool.objective != "cost":
        return "weighted requests/s" if problem.pool.objective == "goodput" else "of each class"
    current = problem.pool.current
    return "$/h" if current is None else f"$ in {current.horizon_hours:g} h, including the cost of the change"


def _routes(
    problem: FormulatedProblem, solution: PoolSolution, group_of: Mapping[str, str]
) -> list[PlanRoute]:
    """Return a route for each variant that serves requests. `group_of` maps cells to names of groups."""
    rates = {d.name: d.rate for d in problem.pool.demands}
    served = [
        v
        for v in problem.pool.variants
        if solution.served.get(v.name, 0.0) > MIN_FLOW_SHARE * rates[v.demand]
    ]
    return [_route(problem, solution, variant, group_of) for variant in served]


def _route(
    problem: FormulatedProblem, solution: PoolSolution, variant: PathVariant, group_of: Mapping[str, str]
) -> PlanRoute:
    tasks = {s.name: s.tasks for s in problem.request_paths[variant.name].template.stages}
    app, request = variant.demand.split("/")
    stages = []
    for need in variant.needs:
        weights = _weights(solution, variant.demand, need)
        stages.append(
            RouteStage(tasks=tasks[need.service], groups={group_of[c]: w for c, w in weights.items()})
        )
    rate = solution.served[variant.name]
    return PlanRoute(app=app, request=request, structure=variant.structure, rate=rate, stages=stages)


def _weights(solution: PoolSolution, demand: str, need: ServiceDemand) -> dict[str, float]:
    """Return each cell's share of the demand's work at one service and in one tier."""
    rates: dict[str, float] = {}
    for f in solution.flows:
        if (f.demand, f.service, f.tier) == (demand, need.service, need.tier):
            rates[f.cell] = rates.get(f.cell, 0.0) + f.rate
    total = sum(rates.values())
    kept = {cell: rate for cell, rate in rates.items() if rate > MIN_FLOW_SHARE * total}
    return {cell: rate / sum(kept.values()) for cell, rate in kept.items()}


def _job_forecast(
    problem: FormulatedProblem, solution: PoolSolution, request_class: RequestClass
) -> JobForecast | None:
    """Return a job's forecast without the simulated completion time, or None if the class is not a job."""
    job = request_class.request.job
    if job is None:
        return None
    load: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for flow in solution.flows:
        used = flow.rate / problem.cells[flow.cell].cell.capacity[flow.demand]
        load[flow.cell][flow.demand] = load[flow.cell].get(flow.demand, 0.0) + used
    per_hour = sum(
        _cost_per_hour(problem, solution, cell) * used[request_class.name] / sum(used.values())
        for cell, used in load.items()
        if used.get(request_class.name)
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


def job_done_hours(job: JobForecast, served: float, last_response_s: float | None) -> float | None:
    """Return the time in hours from the job's first request to its last response.

    Returns None if the plan was not simulated.
    """
    if last_response_s is None or served <= 0:
        return None
    return (job.requests / served + last_response_s) / 3600
