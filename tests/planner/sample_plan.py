"""A plan with everything that a plan can hold, small enough to read."""

from __future__ import annotations

from typing import Any

from cornplug.planner.plan import (
    BindingConstraint,
    CacheSize,
    CurvePoint,
    LatencyForecast,
    OptimalityProof,
    Plan,
    PlanAlternative,
    PlanExplanation,
    PlannedGroup,
    PlannedNodes,
    PlanRoute,
    QosReservation,
    RequestTimes,
    RouteStage,
)


def group(name: str, tasks: str, **changes: Any) -> PlannedGroup:
    given: dict[str, Any] = {
        "name": name,
        "service": name.partition("@")[0],
        "tasks": tasks,
        "components": ["llm7"],
        "model": "org/llm7",
        "engine": "vllm",
        "nodes": "h100x8",
        "gpu": "H100",
        "tp": 1,
        "pp": 1,
        "share": 1.0,
        "quantisation": "none",
        "replicas": 2,
        "placement": [[0, 0], [0, 1]],
        "utilisation": 0.71,
        "capacity": {"chat/short": 5.0},
        "apps": ["chat"],
        "profile": "measured: 2026-11, H100",
    }
    return PlannedGroup(**(given | changes))


def plan(**changes: Any) -> Plan:
    given: dict[str, Any] = {
        "name": "sample",
        "objective": "cost",
        "cost_per_hour": 58.24,
        "nodes": [
            PlannedNodes(name="h100x8", gpu="H100", gpus=8, count=1, price_per_hour=55.04),
            PlannedNodes(name="l4", gpu="L4", gpus=4, count=1, price_per_hour=3.2),
        ],
        "groups": [
            group(
                "vit/E@l4",
                "E",
                components=["vit"],
                engine="cornplug",
                nodes="l4",
                gpu="L4",
                share=0.25,
                replicas=3,
                placement=[[0, 0], [0, 0], [0, 1]],
                utilisation=0.35,
                capacity={"chat/short": 4.0},
                profile="roofline (L4, 2026-11)",
            ),
            group("llm7/P@h100", "P", tp=2, placement=[[0, 2], [0, 4]]),
            group("llm7/D@h100", "D", quantisation="fp8", utilisation=0.93),
        ],
        "routes": [
            PlanRoute(
                app="chat",
                request="short",
                structure="E+P+D",
                rate=7.5,
                stages=[
                    RouteStage(tasks="E", groups={"vit/E@l4": 1.0}),
                    RouteStage(tasks="P", groups={"llm7/P@h100": 1.0}),
                    RouteStage(tasks="D", groups={"llm7/D@h100": 1.0}),
                ],
            )
        ],
        "latency_forecasts": [
            LatencyForecast(
                app="chat",
                request="short",
                rate=7.5,
                served=7.5,
                slo_percentile="p95",
                slo_ttft_s=0.5,
                slo_tpot_s=0.05,
                ttft=RequestTimes(mean=0.2, p50=0.19, p95=0.43, p99=0.61),
                tpot=RequestTimes(mean=0.03, p50=0.03, p95=0.052, p99=0.06),
                e2e=RequestTimes(mean=4.0, p50=3.9, p95=6.25, p99=7.0),
            )
        ],
        "caches": [
            CacheSize(
                name="embedding-64",
                kind="embedding",
                component="vit",
                gib=64,
                hit_rate={"chat/short": 0.437},
            )
        ],
        "reservations": [QosReservation(qos="gold", share=0.3, priority=5, deadline_s=1.5)],
        "proof": OptimalityProof(
            status="optimal", solver="HiGHS", seconds=1.3, incumbent=58.24, bound=57.9, gap=0.006
        ),
        "explanation": PlanExplanation(
            binding=[
                BindingConstraint(
                    constraint="stock[l4]",
                    text="all of l4 is taken",
                    slack=0,
                    saves_per_hour=4.5,
                )
            ],
            alternatives=[
                PlanAlternative(
                    name="without H100", text="", cost_per_hour=70.1, reason_against="costs 20 % more"
                ),
                PlanAlternative(
                    name="only L4", text="", cost_per_hour=None, reason_against="too little memory"
                ),
            ],
            monolith="The monolith wins below 2 requests/s; here it costs 12 % more.",
            curve=[
                CurvePoint(slo_factor=0.5, cost_per_hour=None),
                CurvePoint(slo_factor=1, cost_per_hour=58.24),
                CurvePoint(slo_factor=2, cost_per_hour=41.0),
            ],
            notes=["times of vit/E@l4 are estimates"],
        ),
        "input_digest": "0" * 64,
        "cornplug": "0.1",
    }
    return Plan(**(given | changes))
