"""Inputs and results of a simulation: stations of replicas, jobs, and their latencies."""

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
    """Identical replicas behind one router."""

    name: str
    replicas: int
    tasks: str
    """Tasks of a visit, a subset of "EPDG" in this order."""
    steps: EngineStepTimes | None = None
    """Required for P and D."""
    encode: PiecewiseCurve | None = None
    """Encode seconds by patches of a batch. Required for E. In an engine (EPD), encoding is part of the
    iteration."""
    generate: PiecewiseCurve | None = None
    """Generation seconds by units of a request. Required for G."""
    kv_tokens: int = 1 << 60
    max_batch: int = 256
    """Maximum number of requests that decode together."""
    chunk_tokens: int = 8192
    max_patches: int = 16384
    """Maximum patches of an encoder batch. A larger item is a batch of its own."""
    router: Literal["least_work", "join_shortest_queue", "power_of_two", "random"] = "least_work"
    chunked: bool = True
    """Whether prompts may be split. Otherwise a longer prompt is an iteration of its own."""
    groups: int = 1
    """Attention-DP groups per replica. Steps, KV, batch and chunk are those of one group."""

    @property
    def schedulers(self) -> int:
        """Number of queues of all replicas."""
        return self.replicas * self.groups

    def __post_init__(self) -> None:
        for tasks, times in (("PD", self.steps), ("E", self.encode), ("G", self.generate)):
            if times is None and set(tasks) & set(self.tasks):
                needed = {"PD": "steps", "E": "encode", "G": "generate"}[tasks]
                raise ConfigError(f"{self.name}.{needed}", f'missing for tasks "{self.tasks}"', "Set it.")
        if not self.tasks or self.tasks != "".join(t for t in "EPDG" if t in self.tasks):
            raise ConfigError(
                f"{self.name}.tasks", f'"{self.tasks}"', 'Write one or more letters of "EPDG", in this order.'
            )
        for field in ("replicas", "groups", "max_batch", "chunk_tokens", "max_patches"):
            if getattr(self, field) < 1:
                raise ConfigError(f"{self.name}.{field}", f"{getattr(self, field)}", "Write 1 or more.")


@dataclass(frozen=True, slots=True)
class StationVisit:
    station: int
    delay_s: float = 0.0
    """Delay before the visit, to transfer the previous result."""


@dataclass(frozen=True, slots=True)
class StationJob:
    at_s: float
    kind: int
    """Request class, for grouping by the caller."""
    request: SampledRequest
    visits: tuple[StationVisit, ...]
    priority: int = 0
    """Priority in an engine's queue. Larger goes first; equal priorities keep their order."""


@dataclass(frozen=True, slots=True)
class QueuePeak:
    """Longest queue of one replica at any time."""

    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of requests that have not finished prefill, including cached tokens, as vLLM counts
    them."""

    def __or__(self, other: QueuePeak) -> QueuePeak:
        return QueuePeak(max(self.requests, other.requests), max(self.prompt_tokens, other.prompt_tokens))


@dataclass(frozen=True)
class JobOutcomes:
    """Results by job, in the order of the jobs. Seconds are relative to the arrival; NaN means not
    finished."""

    kind: NDArray[np.int64]
    ttft: NDArray[np.float64]
    """Time to the first token, or the end of all visits without P."""
    tpot: NDArray[np.float64]
    """(last token - first token) / (output tokens - 1), or NaN for one token. If a job decodes without
    prefill, its first token is at its arrival."""
    e2e: NDArray[np.float64]
    stage_s: NDArray[np.float64]
    """(jobs, visits): seconds from the arrival at a station until leaving it. NaN beyond a job's visits."""
    busy: dict[str, float]
    """Share of the replicas' time with work between first and last arrival, by station."""
    queues: dict[str, QueuePeak]
    """Queue peaks by station."""
