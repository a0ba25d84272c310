"""Discrete-event simulation of requests through stations of engine replicas.

Contract (its owner fills it in):
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.demand import Draw
from cornplug.planner.times import Curve, StepTimes


@dataclass(frozen=True)
class Station:
    """Equal replicas behind one router."""

    name: str
    replicas: int
    tasks: str
    """Of "EPDG", what a visit does here, in that order."""
    steps: StepTimes | None = None
    """Needed for P and D."""
    encode: Curve | None = None
    """Needed for E: patches of one batch -> s. In an engine (EPD) it runs inside the iteration."""
    generate: Curve | None = None
    kv_tokens: int = 1 << 60
    max_batch: int = 256
    """Requests that decode together."""
    chunk_tokens: int = 8192
    max_patches: int = 16384
    """Of one encoder batch (an item larger than this is a batch of its own)."""
    router: Literal["least_work", "join_shortest_queue", "random"] = "least_work"


@dataclass(frozen=True, slots=True)
class Visit:
    station: int
    delay_s: float = 0.0
    """Before it: transfer of what the visit before made."""


@dataclass(frozen=True, slots=True)
class Job:
    at_s: float
    kind: int
    """Request class, for the caller's own grouping."""
    draw: Draw
    visits: tuple[Visit, ...]


@dataclass(frozen=True)
class Outcome:
    """One row a job, in the order of the jobs; seconds from its arrival. NaN: not finished."""

    kind: NDArray[np.int64]
    ttft: NDArray[np.float64]
    """First token (of the visit that prefills); for jobs without P: end of all visits."""
    tpot: NDArray[np.float64]
    """(last token - first token) / (output tokens - 1); NaN for one token."""
    e2e: NDArray[np.float64]
    stage_s: NDArray[np.float64]
    """jobs x visits: from coming to a station to leaving it; NaN beyond a job's visits."""
    busy: dict[str, float]
    """Station -> share of the replicas' time with work, between first and last arrival."""


def simulate(stations: Sequence[Station], jobs: Sequence[Job], *, seed: int = 0) -> Outcome:
    """Run all jobs (sorted by `at_s`) to their end."""
    raise NotImplementedError
