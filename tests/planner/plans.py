"""Plans for tests of what is emitted: every structure, engine and workload, with the options that
change a command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from cornplug.planner.plan import (
    CacheSize,
    EngineSettings,
    KVGeometry,
    LatencyForecast,
    OptimalityProof,
    Plan,
    PlannedGroup,
    PlannedNodes,
    PlanRoute,
    QosReservation,
    RouteStage,
)

STRUCTURES = ("monolith", "E+PD", "P+D", "E+P+D")
ENGINES = ("vllm", "sglang")
WORKLOADS = ("online", "semi-online", "offline")

MHA = KVGeometry(layers=28, kv_heads=4, head_dim=128, element_bytes=2, max_prompt_tokens=8192)
MLA = KVGeometry(layers=61, kv_heads=1, head_dim=576, element_bytes=2, mla=True, max_prompt_tokens=8192)
SETTINGS = EngineSettings(
    max_model_len=8192, max_batch=128, chunk_tokens=4096, kv_tokens=200_000, kv_bytes=12 << 30,
    memory_share=0.92, weights_bytes=15 << 30, prefill_tokens_s=20_000.0,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One plan of the matrix."""

    structure: str = "monolith"
    engine: Literal["vllm", "sglang"] = "vllm"
    workload: Literal["online", "semi-online", "offline"] = "online"
    gpu: str = "H100"
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    pcp: int = 1
    expert_parallel: bool = False
    share: float = 1.0
    quantisation: str = "none"
    speculative: Literal["none", "mtp", "eagle3"] = "none"
    mla: bool = False
    fp8_kv: bool = False
    caches: bool = False
    classes: bool = False
    """Of service; requests of a second, of lower priority, come to the same engines."""
    tower: Literal["engine", "service"] = "engine"
    replicas: int = 1
    hosts: int = 1
    decode_tp: int | None = None
    decode_gpu: str | None = None
    """Of nodes of its own."""
    model: str = "Qwen/Qwen2-VL-7B-Instruct"

    @property
    def id(self) -> str:
        plain = Case()
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)]
        return " ".join(changed) or "plain"


def matrix() -> list[Case]:
    """Every structure with every engine and workload, and each option once with every role it changes."""
    cases = [Case(s, e, w) for s in STRUCTURES for e in ENGINES for w in WORKLOADS]  # type: ignore[arg-type]
    return list(dict.fromkeys([*cases, *_options()]))


def _options() -> Iterator[Case]:
    for engine in ENGINES:
        for structure in ("monolith", "E+P+D"):
            one = Case(structure, engine)  # type: ignore[arg-type]
            for tp, pp in ((2, 1), (4, 2), (8, 2)):
                yield replace(one, tp=tp, pp=pp, replicas=2)
            for quantisation in ("fp8", "awq", "gptq"):
                yield replace(one, quantisation=quantisation, fp8_kv=quantisation == "fp8")
            for gpu in ("H100", "B200", "L4", "A100-80"):
                yield replace(one, mla=True, gpu=gpu)
            yield replace(one, share=0.5, replicas=2)
            yield replace(one, caches=True, classes=True, replicas=2)
            yield replace(one, gpu="cpu-core")
            yield replace(one, gpu="cpu-core", tp=2, caches=True)
            yield replace(one, workload="offline", tp=2)
        for dp, expert_parallel in ((4, False), (8, True)):
            yield replace(Case(engine=engine), dp=dp, expert_parallel=expert_parallel, mla=True)  # type: ignore[arg-type]
        yield replace(Case(engine=engine), tp=2, dp=4, expert_parallel=True, replicas=2, classes=True)  # type: ignore[arg-type]
        if engine == "vllm":
            yield Case(tp=8, dcp=8, mla=True, caches=True)
            yield Case(tp=8, dcp=2)
            yield Case(tp=2, pcp=4, mla=True)
        yield replace(Case("P+D", engine), decode_tp=4)  # type: ignore[arg-type]
        yield replace(Case("P+D", engine), decode_gpu="B200")  # type: ignore[arg-type]
        yield replace(Case("P+D", engine), decode_gpu="B200", mla=True)  # type: ignore[arg-type]
        yield replace(Case("E+P+D", engine), hosts=2, replicas=2)  # type: ignore[arg-type]
        yield replace(Case(engine=engine), speculative="mtp")  # type: ignore[arg-type]
        yield replace(Case(engine=engine), speculative="eagle3", caches=True)  # type: ignore[arg-type]
        for structure in ("E+PD", "E+P+D"):
            yield replace(Case(structure, engine), tower="service")  # type: ignore[arg-type]
        yield replace(Case("E+PD", engine), hosts=2, caches=True)  # type: ignore[arg-type]


def plan(case: Case = Case()) -> Plan:
    """A plan of one application, "chat", with one request class, "short"."""
    stages = {"monolith": ["EPD"], "E+PD": ["E", "PD"], "P+D": ["EP", "D"], "E+P+D": ["E", "P", "D"]}
    groups = [_group(case, tasks) for tasks in stages[case.structure]]
    placed, nodes = _placed(case, groups)
    return Plan(
        name="a plan",
        objective="cost",
        cost_per_hour=10.0,
        nodes=nodes,
        groups=placed,
        routes=[_route(case, placed, name) for name in _requests(case)],
        latency_forecasts=[_forecast(case, name) for name in _requests(case)],
        caches=_caches() if case.caches else [],
        reservations=_reservations() if case.classes else [],
        proof=OptimalityProof(
            status="optimal", solver="highs", seconds=1.0, incumbent=10.0, bound=10.0, gap=0.0
        ),
        input_digest="0" * 64,
        cornplug="0",
    )


def _requests(case: Case) -> list[str]:
    return ["short", "nightly"] if case.classes else ["short"]


def _route(case: Case, groups: list[PlannedGroup], request: str) -> PlanRoute:
    stages = [RouteStage(tasks=g.tasks, groups={g.name: 1.0}) for g in groups]
    return PlanRoute(app="chat", request=request, structure=case.structure, rate=2.0, stages=stages)


def _forecast(case: Case, request: str) -> LatencyForecast:
    first = request == "short"
    return LatencyForecast(
        app="chat",
        request=request,
        rate=2.0,
        served=2.0,
        priority=2 if first else 0,
        slo_percentile="p95",
        slo_ttft_s=0.5 if first and case.workload == "online" else None,
        slo_e2e_s=40.0,
    )


def _group(case: Case, tasks: str) -> PlannedGroup:
    tp = (case.decode_tp or case.tp) if tasks == "D" else case.tp
    apart = tasks == "D" and case.decode_gpu is not None
    common: dict[str, Any] = {
        "gpu": case.decode_gpu if apart else case.gpu,
        "nodes": "decode-nodes" if apart else "nodes",
        "replicas": case.replicas,
        "utilisation": 0.6,
        "capacity": {"chat/short": 3.0},
        "workload": case.workload,
        "apps": ["chat"],
        "profile": "roofline",
        "share": case.share,
    }
    if tasks == "E":
        return PlannedGroup(
            name="vit/E@nodes", service="vit/E", tasks="E", components=["vit"], model=case.model,
            encoder_models=[case.model], engine="cornplug", tp=1, pp=1, quantisation="none", **common,
        )  # fmt: skip
    kv = MLA if case.mla else MHA
    speculates = case.speculative != "none"
    settings = SETTINGS.model_copy(
        update={
            "speculative": case.speculative,
            "speculative_tokens": 3 if speculates else 0,
            "speculative_model": "org/draft" if case.speculative == "eagle3" else None,
            "memory_share": SETTINGS.memory_share * case.share,
        }
    )
    return PlannedGroup(
        name=f"llm7+vit/{tasks}@nodes", service=f"llm7+vit/{tasks}", tasks=tasks,
        components=["llm7", "vit"] if "E" in tasks else ["llm7"], model=case.model, engine=case.engine,
        tp=tp, pp=case.pp, dp=case.dp, dcp=case.dcp, pcp=case.pcp, expert_parallel=case.expert_parallel,
        quantisation=case.quantisation, settings=settings, tower=case.tower,
        kv=kv.model_copy(update={"element_bytes": 1}) if case.fp8_kv else kv, **common,
    )  # fmt: skip


def _placed(case: Case, groups: list[PlannedGroup]) -> tuple[list[PlannedGroup], list[PlannedNodes]]:
    """One replica after the other over nodes of eight GPUs; with `hosts` 2 each group has its own."""
    placed, node, first = [], 0, 0
    for number, group in enumerate(groups):
        if group.nodes != "nodes":
            placed.append(group.model_copy(update={"placement": [[0, r] for r in range(group.replicas)]}))
            continue
        if case.hosts > 1 and number:
            node, first = node + 1, 0
        places = []
        needed = group.ranks
        for replica in range(group.replicas):
            if needed > 8:
                node, first = (node + 1, 0) if first else (node, 0)
                places.append([node, 0])
                node += needed // 8
                continue
            beside = group.share < 1 and replica % round(1 / group.share)
            if beside:
                places.append(list(places[-1]))
                continue
            if first + needed > 8:
                node, first = node + 1, 0
            places.append([node, first])
            first += needed
        placed.append(group.model_copy(update={"placement": places}))
    used = max(
        place[0] + max(group.ranks // 8, 1)
        for group in placed
        for place in group.placement
        if group.nodes == "nodes"
    )
    nodes = [PlannedNodes(name="nodes", gpu=case.gpu, gpus=8, count=used, price_per_hour=10.0)]
    if case.decode_gpu is not None:
        gpu = case.decode_gpu
        nodes.append(PlannedNodes(name="decode-nodes", gpu=gpu, gpus=8, count=1, price_per_hour=20.0))
    return placed, nodes


def _caches() -> list[CacheSize]:
    hits = {"chat/short": 0.4}
    return [
        CacheSize(name="embeddings of vit", kind="embedding", component="vit", gib=4, hit_rate=hits),
        CacheSize(name="prefixes of llm7", kind="prefix", component="llm7", gib=16, hit_rate=hits),
    ]


def _reservations() -> list[QosReservation]:
    return [
        QosReservation(qos="premium", share=0.5, priority=10, deadline_s=2.0, apps=["chat"]),
        QosReservation(qos="nightly", share=0.1, priority=-1),
    ]
