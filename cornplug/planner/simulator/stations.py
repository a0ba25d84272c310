"""Inputs and results of a simulation: stations of replicas, jobs, their times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.step_times import EngineStepTimes, PiecewiseCurve


@dataclass(frozen=True)
class Station:
    """Equal replicas behind one router."""

    name: str
    replicas: int
    tasks: str
    """Tasks of a visit here, out of "EPDG", in that order."""
    steps: EngineStepTimes | None = None
    """Needed for P and D."""
    encode: PiecewiseCurve | None = None
    """Needed for E: patches of one batch -> s. In an engine (EPD) it runs inside the iteration."""
    generate: PiecewiseCurve | None = None
    """Needed for G: units of one request -> s."""
    kv_tokens: int = 1 << 60
    max_batch: int = 256
    """Requests that decode together."""
    chunk_tokens: int = 8192
    max_patches: int = 16384
    """Of one encoder batch (a larger item is a batch by itself)."""
    router: Literal["least_work", "join_shortest_queue", "power_of_two", "random"] = "least_work"
    chunked: bool = True
    """False: no prompt is split; one longer than `chunk_tokens` is an iteration by itself."""
    groups: int = 1
    """Attention-DP groups of a replica: steps, KV, batch and chunk are those of one."""

    @property
    def schedulers(self) -> int:
        """Queues of all replicas."""
        return self.replicas * self.groups

    def __post_init__(self) -> None:
        for tasks, times in (("PD", self.steps), ("E", self.encode), ("G", self.generate)):
            if times is None and set(tasks) & set(self.tasks):
                needed = {"PD": "steps", "E": "encode", "G": "generate"}[tasks]
                raise ConfigError(f"{self.name}.{needed}", f'missing for tasks "{self.tasks}"', "Give it.")
        if not self.tasks or self.tasks != "".join(t for t in "EPDG" if t in self.tasks):
            raise ConfigError(f"{self.name}.tasks", f'"{self.tasks}"', 'Write some of "EPDG", in this order.')
        for field in ("replicas", "groups", "max_batch", "chunk_tokens", "max_patches"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{self.name}.{field}", f"{getattr(self, field)}", "Write 1 or more.")


@dataclass(frozen=True, slots=True)
class StationVisit:
    station: int
    delay_s: float = 0.0
    """Before it: transfer of the previous visit's result."""


@dataclass(frozen=True, slots=True)
class StationJob:
    at_s: float
    kind: int
    """Request class, for the caller's own grouping."""
    request: SampledRequest
    visits: tuple[StationVisit, ...]
    priority: int = 0
    """Larger goes first where it waits for an engine; equal ones in their order."""


@dataclass(frozen=True, slots=True)
class QueuePeak:
    """Most that waited at one replica at a time."""

    requests: int = 0
    prompt_tokens: int = 0
    """Of requests whose prefill had not ended, cached tokens included: as vLLM counts them."""

    def __or__(self, other: QueuePeak) -> QueuePeak:
        return QueuePeak(max(self.requests, other.requests), max(self.prompt_tokens, other.prompt_tokens))


@dataclass(frozen=True)
class JobOutcomes:
    """One row a job, in the order of the jobs; seconds from its arrival. NaN: not finished."""

    kind: NDArray[np.int64]
    ttft: NDArray[np.float64]
    """First token (of the visit that prefills); for jobs without P: end of all visits."""
    tpot: NDArray[np.float64]
    """(last token - first token) / (output tokens - 1); NaN for one token.

    Of a job that decodes but never prefills the first token was there when it arrived."""
    e2e: NDArray[np.float64]
    stage_s: NDArray[np.float64]
    """jobs x visits: from coming to a station to leaving it; NaN beyond a job's visits."""
    busy: dict[str, float]
    """Station -> share of the replicas' time with work, between first and last arrival."""
    queues: dict[str, QueuePeak]
    """By station."""
