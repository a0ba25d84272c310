"""Inputs and results of a simulation (stations, jobs and latencies), and the simulated replicas.

The replicas in this module serve requests one after another, or batches (encoders). All kinds of replicas
have the members of `SimulatedReplica`, which the event loop and the router use. Replicas of a language
model's engine are in `engine_replica.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappush
from itertools import count
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from cornplug.errors import ConfigError
from cornplug.planner.inputs.request_sampling import SampledRequest
from cornplug.planner.perf_model.engine_spec import EngineStepTimes, PiecewiseCurve


@dataclass(frozen=True)
class Station:
    """Identical replicas behind one router."""

    name: str
    replicas: int
    tasks: str
    """Tasks that this station does for a request: a subset of "EPDG" (encode, prefill, decode, generate), in
    this order."""
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


class SimulatedReplica(Protocol):
    outstanding: int
    """Number of requests that have arrived and have not left."""
    busy_s: float
    """Time in seconds with work, between the simulation's first and last arrival."""

    @property
    def queue_peak(self) -> QueuePeak: ...

    def arrive(self, now: float, job: int, request: SampledRequest) -> None: ...

    def wake(self, now: float, token: int) -> Sequence[int]:
        """Handle an event of this replica, and return the jobs that leave now.

        `token` is the value that the replica added to the event.
        """
        ...

    def load(self, now: float) -> float:
        """Return the unfinished work of requests that have arrived, in seconds."""
        ...


class EventAgenda:
    """Future events of a simulation.

    An event is (time, sequence number, replica, the replica's token) or (time, sequence number, None, job).
    """

    def __init__(self) -> None:
        self.events: list[tuple[float, int, SimulatedReplica | None, int]] = []
        self.sequence: Iterator[int] = count()

    def add(self, at: float, replica: SimulatedReplica, token: int) -> None:
        heappush(self.events, (at, next(self.sequence), replica, token))


class TokenLog:
    """Priorities of jobs, times of their first and last tokens, and the time window in which utilisation is
    measured."""

    def __init__(self, since: float, until: float, priority: Sequence[int]) -> None:
        """Create an empty log. `priority` has one entry per job."""
        self.since, self.until, self.priority = since, until, priority
        self.first_token = [float("nan")] * len(priority)
        self.last_token = [float("nan")] * len(priority)

    def measured_overlap_s(self, start: float, end: float) -> float:
        """Return how many seconds of [start, end] are between the first and the last arrival."""
        return max(min(end, self.until) - max(start, self.since), 0.0)


class _UnlimitedQueue:
    """Base class of replicas whose queue has no limit in a plan, so that no peak is reported."""

    queue_peak = QueuePeak()


class SerialReplica(_UnlimitedQueue):
    """Replica that serves one request after another: a generator, or an engine with a generator.

    An engine with a generator (PDG) occupies its device for a request's prefill, decode and generation, as in
    Cornfigurator.
    """

    def __init__(self, station: Station, agenda: EventAgenda, log: TokenLog) -> None:
        self._station, self._agenda, self._log = station, agenda, log
        self._free_at = 0.0
        self.outstanding = 0
        self.busy_s = 0.0

    def arrive(self, now: float, job: int, request: SampledRequest) -> None:
        start = max(now, self._free_at)
        at = start + isolated_prefill_s(self._station, request)
        if "P" in self._station.tasks:
            self._log.first_token[job] = at
        if "D" in self._station.tasks:
            at += isolated_decode_s(self._station, request)
            self._log.last_token[job] = at
        if self._station.generate is not None:
            at += self._station.generate(request.units)
        self._free_at = at
        self.outstanding += 1
        self.busy_s += self._log.measured_overlap_s(start, at)
        self._agenda.add(at, self, job)

    def wake(self, now: float, token: int) -> Sequence[int]:
        self.outstanding -= 1
        return (token,)

    def load(self, now: float) -> float:
        return max(self._free_at - now, 0.0)


class EncoderReplica(_UnlimitedQueue):
    """Encoder with batches of up to `max_patches` patches, in order of arrival.

    Items of a request may be in the same batch or in different batches. The request leaves when all its items
    are encoded.
    """

    def __init__(self, station: Station, agenda: EventAgenda, log: TokenLog) -> None:
        assert station.encode is not None
        self._encode, self._max_patches = station.encode, station.max_patches
        self._agenda, self._log = agenda, log
        self._items: deque[tuple[int, int]] = deque()
        self._batch: list[int] = []
        self._idle = True
        self._remaining_items: dict[int, int] = {}
        self._queued_s = 0.0
        self._start = self._until = 0.0
        self.outstanding = 0
        self.busy_s = 0.0

    def arrive(self, now: float, job: int, request: SampledRequest) -> None:
        self.outstanding += 1
        if not request.patches:
            # Add an event, because a job may leave only in `wake`.
            self._agenda.add(now, self, job)
            return
        self._remaining_items[job] = len(request.patches)
        for patches in request.patches:
            self._items.append((job, patches))
            self._queued_s += self._encode(patches)
        if self._idle:
            # Add an event instead of a call, so that requests that arrive at the same time share the batch.
            self._idle = False
            self._start = self._until = now
            self._agenda.add(now, self, -1)

    def wake(self, now: float, token: int) -> Sequence[int]:
        if token >= 0:
            self.outstanding -= 1
            return (token,)
        self.busy_s += self._log.measured_overlap_s(self._start, now)
        done = []
        for job in self._batch:
            self._remaining_items[job] -= 1
            if not self._remaining_items[job]:
                del self._remaining_items[job]
                done.append(job)
        self._batch.clear()
        self.outstanding -= len(done)
        if self._items:
            self._begin(now)
        else:
            self._idle = True
        return done

    def load(self, now: float) -> float:
        return self._queued_s + max(self._until - now, 0.0)

    def _begin(self, now: float) -> None:
        patches = 0
        while self._items and (not patches or patches + self._items[0][1] <= self._max_patches):
            job, size = self._items.popleft()
            patches += size
            self._queued_s -= self._encode(size)
            self._batch.append(job)
        self._start, self._until = now, now + self._encode(patches)
        self._agenda.add(self._until, self, -1)


def encode_batches_s(station: Station, patches: Sequence[int]) -> float:
    """Return the time in seconds to encode items in consecutive batches of up to `max_patches` patches."""
    if station.encode is None or not patches:
        return 0.0
    total, batch = 0.0, 0
    for size in patches:
        if batch and batch + size > station.max_patches:
            total += station.encode(batch)
            batch = 0
        batch += size
    return total + station.encode(batch)


def off_device_s(station: Station, request: SampledRequest) -> float:
    """Return the additional time in seconds of a request's prefill in which the request does not occupy a
    replica.

    This is the time in the engine's API and the network, and in later pipeline stages for the last tokens.
    """
    if station.steps is None or "P" not in station.tasks:
        return 0.0
    last = min(request.computed_tokens, station.chunk_tokens)
    return station.steps.request_overhead_s + station.steps.drain_s(last)


def isolated_prefill_s(station: Station, request: SampledRequest) -> float:
    """Return the time in seconds to encode and prefill one request alone."""
    seconds = encode_batches_s(station, request.patches) if "E" in station.tasks else 0.0
    if station.steps is None or "P" not in station.tasks:
        return seconds
    chunk = station.chunk_tokens if station.chunked else request.computed_tokens
    whole, rest = divmod(request.computed_tokens, chunk)
    seconds += whole * station.steps.isolated_prefill(chunk) if whole else 0.0
    return seconds + (station.steps.isolated_prefill(rest) if rest else 0.0)


def isolated_decode_s(station: Station, request: SampledRequest) -> float:
    """Return the time in seconds of a single request's decode iterations after the first token."""
    if station.steps is None or "D" not in station.tasks:
        return 0.0
    steps = request.output_tokens - 1
    context = steps * request.prompt_tokens + steps * (steps - 1) / 2
    return steps * station.steps.decode(1) + station.steps.kv_token_s * context


def isolated_latency_s(station: Station, request: SampledRequest) -> float:
    """Return the time in seconds of a request's visit to a station if it is the only request."""
    seconds = isolated_prefill_s(station, request) + isolated_decode_s(station, request)
    if station.generate is not None and "G" in station.tasks:
        seconds += station.generate(request.units)
    return seconds
