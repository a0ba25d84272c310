"""Synthetic pools of any size, from a seed: the instances of `planner_speed.py`.

Component sizes, GPU figures (planner.md's table: memory, bandwidth, dense BF16, AWS prices of
whole nodes) and the laws of capacity are real ones; the mix of applications is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from cornplug.planner.candidates.cells import undominated_cells
from cornplug.planner.optimizer.optimization_problem import (
    Cell,
    MachineClass,
    OptimizationProblem,
    PathVariant,
    PoolLimits,
    RateDemand,
    ServiceDemand,
)

TIERS = (0.5, 2.0)
"""Seconds for each stage: tight and loose."""
TIGHT = {1: 0.35, 2: 0.6, 4: 0.75, 8: 0.85}
"""Of the loose tier's capacity, by TP: more GPUs for a request keep a short time at a higher load."""


@dataclass(frozen=True)
class Device:
    name: str
    memory_gb: float
    bandwidth_gb_s: float
    tflops: float
    gpus: int
    price: float
    """Dollars an hour for a node (AWS, on demand)."""
    nvlink: bool


DEVICES = (
    Device("H100", 80, 3350, 989, 8, 55.04, True),
    Device("L4", 24, 300, 121, 4, 4.602, False),
    Device("A100", 80, 2039, 312, 8, 27.447, True),
    Device("L40S", 48, 864, 362, 4, 10.492, False),
    Device("H200", 141, 4800, 989, 8, 63.296, True),
    Device("A10G", 24, 600, 70, 4, 5.672, False),
    Device("B200", 180, 7700, 2250, 8, 113.933, True),
    Device("A100-40", 40, 1555, 312, 8, 21.958, True),
)
LLM_BILLIONS = (7.6, 8.0, 14.8, 32.8, 70.6, 3.1, 24.0, 12.2)
TOWER_BILLIONS = (0.67, 0.3, 5.5, 0.4, 1.2, 0.63)


@dataclass(frozen=True)
class Size:
    components: int = 10
    devices: int = 6
    applications: int = 6
    tp: tuple[int, ...] = (1, 2, 4, 8)
    modes: int = 2
    nodes: int = 64
    """Of each class that can be had."""
    load: float = 10.0
    """10 needs about 64 nodes, 1 about seven."""


@dataclass(frozen=True)
class Component:
    name: str
    billions: float
    tower: bool


@dataclass(frozen=True)
class Sizes:
    """Tokens of one request."""

    prompt: float
    output: float
    image: float


@dataclass(frozen=True)
class Spec:
    """The fields of a CellSpec that `prune` reads."""

    cell: Cell


def pool(size: Size, seed: int, *, objective: Literal["cost", "goodput"] = "cost") -> OptimizationProblem:
    rng = np.random.default_rng(seed)
    towers, llms = components(size)
    nodes = tuple(MachineClass(d.name, d.name, d.gpus, d.price, size.nodes) for d in DEVICES[: size.devices])
    demands, sizes, chains = applications(size, rng, towers, llms)
    services = {f"{tower.name}/E": tower for tower in towers}
    for llm in llms:
        services |= {f"{llm.name}/{role}": llm for role in ("PD", "P", "D")}
    cells = [
        cell
        for service, component in services.items()
        for device in DEVICES[: size.devices]
        for tp in size.tp
        for mode in range(size.modes)
        for cell in cells_of(service, component, device, tp, mode, sizes, rng)
    ]
    variants = [v for u in demands for v in ways(u.name, *chains[u.name])]
    kept = tuple(spec.cell for spec in undominated_cells(Spec(cell) for cell in cells))  # type: ignore[misc]
    return OptimizationProblem(
        nodes, kept, tuple(demands), tuple(variants), limits=PoolLimits(), objective=objective
    )


def components(size: Size) -> tuple[list[Component], list[Component]]:
    count = max(size.components * 2 // 5, 1)
    towers = [Component(f"vit{i}", TOWER_BILLIONS[i % len(TOWER_BILLIONS)], True) for i in range(count)]
    llms = [
        Component(f"llm{i}", LLM_BILLIONS[i % len(LLM_BILLIONS)], False)
        for i in range(size.components - count)
    ]
    return towers, llms


def applications(
    size: Size, rng: np.random.Generator, towers: list[Component], llms: list[Component]
) -> tuple[list[RateDemand], dict[str, Sizes], dict[str, tuple[Component | None, Component, float]]]:
    """Two request types each, one with images; the last application can wait."""
    demands, sizes = list[RateDemand](), dict[str, Sizes]()
    chains: dict[str, tuple[Component | None, Component, float]] = {}
    for a in range(size.applications):
        llm = llms[a % len(llms)]
        for kind in ("text", "picture"):
            name = f"app{a}/{kind}"
            tower = towers[a % len(towers)] if kind == "picture" else None
            demands.append(
                RateDemand(
                    name, round(float(rng.uniform(4, 14)) * size.load, 2), online=a < size.applications - 1
                )
            )
            sizes[name] = Sizes(
                float(rng.uniform(300, 2500)), float(rng.uniform(80, 400)), float(rng.uniform(400, 2000))
            )
            chains[name] = (tower, llm, 1 - float(rng.uniform(0, 0.6)))
    return demands, sizes, chains


def ways(demand: str, tower: Component | None, llm: Component, missed: float) -> list[PathVariant]:
    """Monolith or P+D, after E where there are images, in both tiers of each stage."""
    found = []
    for structure in ("PD", "P+D"):
        roles = [f"{llm.name}/{role}" for role in structure.split("+")]
        for stage_tier in TIERS:
            for first_tier in TIERS if tower else (TIERS[0],):
                needs = [ServiceDemand(role, stage_tier) for role in roles]
                if tower:
                    needs.insert(0, ServiceDemand(f"{tower.name}/E", first_tier, missed))
                if tower and first_tier == stage_tier == TIERS[1]:
                    continue  # together beyond the SLO
                found.append(
                    PathVariant(
                        f"{demand}:{structure}@{first_tier}+{stage_tier}", demand, structure, tuple(needs)
                    )
                )
    return found


def cells_of(
    service: str,
    component: Component,
    device: Device,
    tp: int,
    mode: int,
    sizes: dict[str, Sizes],
    rng: np.random.Generator,
) -> list[Cell]:
    """A cell for each tier; none where the weights do not fit or the GPUs have no link for it."""
    weights = component.billions * 2 / tp
    if (
        weights > 0.6 * device.memory_gb
        or tp > device.gpus
        or (tp > 2 and not device.nvlink)
        or (component.tower and tp > 1)
    ):
        return []
    role = service.rpartition("/")[2]
    speed = tp ** float(rng.uniform(0.8, 0.95)) * float(rng.uniform(0.9, 1.1))
    capacity = {u: speed * served(role, component, device, tp, s) for u, s in sizes.items()}
    return [
        Cell(
            f"{service}@{device.name}x{tp}.{mode}<{tier:g}",
            service, device.name, tp, tier,
            {u: round(value * (1.0 if tier == TIERS[1] else TIGHT[tp]), 4) for u, value in capacity.items()},
            role=role,
        )
        for tier in TIERS
    ]  # fmt: skip


def served(role: str, component: Component, device: Device, tp: int, s: Sizes) -> float:
    """Requests a second of one GPU: 2 FLOP a weight and token at 50 %, memory read at 80 %."""
    flops, bandwidth = 0.5 * device.tflops * 1e12, 0.8 * device.bandwidth_gb_s * 1e9
    weights = component.billions * 1e9
    encode = 4 * s.image * 2 * weights / flops
    if role == "E":
        return 1 / encode
    prefill = (s.prompt + s.image) * 2 * weights / flops
    batch = min(128.0, max(4.0, (0.85 * device.memory_gb * tp - weights * 2e-9) * 1e9 / (1.3e5 * 1800)))
    decode = s.output * (2 * weights / bandwidth + batch * 2 * weights / flops) / batch
    return {"P": 1 / prefill, "D": 0.92 / decode, "PD": 0.9 / (prefill + decode)}[role]
