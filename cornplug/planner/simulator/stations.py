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
    """Times of iterations. Required for the tasks P and D."""
    encode: PiecewiseCurve | None = None
    """Time in seconds to encode a batch, by number of patches. Required for the task E. In an engine (EPD),
    encoding is part of the iteration."""
    generate: PiecewiseCurve | None = None
    """Time in seconds to generate a request's output, by number of units. Required for the task G."""
    kv_tokens: int = 1 << 60
    max_batch: int = 256
    """Maximum number of requests that decode together."""
    chunk_tokens: int = 8192
    max_patches: int = 16384
    """Maximum number of patches in an encoder batch. An item with more patches has its own batch."""
    router: Literal["least_work", "join_shortest_queue", "power_of_two", "random"] = "least_work"
    chunked: bool = True
    """Whether prompts may be divided among iterations. Otherwise a prompt longer than a chunk has its own
    iteration."""
    groups: int = 1
    """Number of attention-DP groups per replica. `steps`, `kv_tokens`, `max_batch` and `chunk_tokens` are per
    group."""

    @property
    def schedulers(self) -> int:
        """Number of schedulers, and thus queues, in all replicas."""
        return self.replicas * self.groups

    def __post_init__(self) -> None:
        for tasks, times in (("PD", self.steps), ("E", self.encode), ("G", self.generate)):
            if times is None and set(tasks) & set(self.tasks):
                needed = {"PD": "steps", "E": "encode", "G": "generate"}[tasks]
                raise ConfigError(
                    f"{self.name}.{needed}", f'missing for tasks "{self.tasks}"', "Set this field."
                )
        if not self.tasks or self.tasks != "".join(t for t in "EPDG" if t in self.tasks):
            raise ConfigError(
                f"{self.name}.tasks",
                f'"{self.tasks}" is not valid',
                'Write one or more letters of "EPDG", in this order.',
            )
        for field in ("replicas", "groups", "max_batch", "chunk_tokens", "max_patches"):
            if getattr(self, field) < 1:
                raise ConfigError(
                    f"{self.name}.{field}", f"{getattr(self, field)} is too small", "Write 1 or more."
                )


@dataclass(frozen=True, slots=True)
class StationVisit:
    station: int
    delay_s: float = 0.0
    """Delay in seconds before the visit, to transfer the result of the previous visit."""


@dataclass(frozen=True, slots=True)
class StationJob:
    at_s: float
    kind: int
    """Number of the request class, by which the caller groups results."""
    request: SampledRequest
    visits: tuple[StationVisit, ...]
    priority: int = 0
    """Priority in an engine's queue. Larger priorities are served first, and equal priorities keep their
    order."""


@dataclass(frozen=True, slots=True)
class QueuePeak:
    """Maximum length of one replica's queue during a simulation."""

    requests: int = 0
    prompt_tokens: int = 0
    """Number of prompt tokens in requests that have not finished prefill. Like vLLM's limit, the number
    includes cached tokens."""

    def __or__(self, other: QueuePeak) -> QueuePeak:
        return QueuePeak(max(self.requests, other.requests), max(self.prompt_tokens, other.prompt_tokens))


@dataclass(frozen=True)
class JobOutcomes:
    """Results of a simulation. Arrays have one entry for each job, in the order of the jobs.

    Times are in seconds. A time is NaN if it does not exist for the job.
    """

    kind: NDArray[np.int64]
    ttft: NDArray[np.float64]
    """Time from the job's arrival to the first token, or to the end of all visits if no station prefills."""
    tpot: NDArray[np.float64]
    """(last token - first token) / (output tokens - 1), or NaN if the output has one token. If a job decodes
    without prefill, the time of its first token is its arrival."""
    e2e: NDArray[np.float64]
    stage_s: NDArray[np.float64]
    """Time from the arrival at a station until the job leaves the station, shape (jobs, visits). NaN beyond a
    job's visits."""
    busy: dict[str, float]
    """Share of the time between the first and last arrival in which a station's replicas have work, by
    station."""
    queues: dict[str, QueuePeak]
    """Largest queue of one of a station's replicas, by station."""
