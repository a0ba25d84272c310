"""Discrete-event simulation of requests that visit stations of engine replicas.

An event is a request's arrival at a station, or the end of a replica's piece of work. Consecutive decode
iterations of an engine are one piece of work, so the simulation of a request does not take longer if its
output is longer. Requests that arrive at the same time share an iteration or a batch. Failures, preemption
for lack of KV (admission reserves KV), and the router's latency are not simulated.

A station consists of identical replicas behind one router. The router chooses a replica for each request by
one of these policies, and the first replica among equal replicas:

- power_of_two: the replica with fewer requests, of two random replicas, as in vllm-router and sglang-router.
- random: a random replica.
- least_work: the replica with the fewest seconds of unfinished work (`load`).
- join_shortest_queue: the replica with the fewest requests.

Real routers have only the information that the first two policies use. The others are for comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from heapq import heappop, heappush
from itertools import pairwise
from operator import or_
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.engine_replica import EngineReplica
from cornplug.planner.simulator.replicas import (
    EncoderReplica,
    EventAgenda,
    SerialReplica,
    SimulatedReplica,
    TokenLog,
    off_device_s,
)
from cornplug.planner.simulator.stations import JobOutcomes, QueuePeak, Station, StationJob, StationVisit

__all__ = ["JobOutcomes", "Station", "StationJob", "StationVisit", "simulate"]
_RANDOM_BLOCK: Final = 512
"""Number of random numbers that a station draws in one call."""


def simulate(stations: Sequence[Station], jobs: Sequence[StationJob], *, seed: int = 0) -> JobOutcomes:
    """Simulate all jobs until they finish, and return their latencies.

    If a station is overloaded, jobs wait as long as necessary. The jobs must be sorted by `at_s`.
    `off_device_s` of the first station that prefills is added once to a job's TTFT and end-to-end latency.

    Raises ConfigError if a job's KV does not fit on a replica, and ValueError if the jobs are not sorted.
    """
    if any(b.at_s < a.at_s for a, b in pairwise(jobs)):
        raise ValueError("jobs must be sorted by at_s")
    agenda = EventAgenda()
    log = TokenLog(*_span(jobs), [job.priority for job in jobs])
    rng = np.random.default_rng(seed)
    dispatches = [RouterDispatch(station, agenda, log, rng) for station in stations]
    run = _EventLoop(jobs, dispatches, agenda)
    run.run()
    return _outcome(jobs, stations, dispatches, log, run)


def _span(jobs: Sequence[StationJob]) -> tuple[float, float]:
    return (jobs[0].at_s, jobs[-1].at_s) if jobs else (0.0, 0.0)


class _EventLoop:
    """Event loop of a simulation. Records the times at which each job arrived at and left its stations."""

    def __init__(
        self, jobs: Sequence[StationJob], dispatches: Sequence[RouterDispatch], agenda: EventAgenda
    ) -> None:
        self._jobs, self._dispatches, self._agenda = jobs, dispatches, agenda
        self.arrivals: list[list[float]] = [[] for _ in jobs]
        self.departures: list[list[float]] = [[] for _ in jobs]
        self.end = [float("nan")] * len(jobs)

    def run(self) -> None:
        events = self._agenda.events
        for i, job in enumerate(self._jobs):
            while events and events[0][0] < job.at_s:
                self._step()
            self._start_next_visit(i, job.at_s)
        while events:
            self._step()

    def _step(self) -> None:
        now, _, replica, token = heappop(self._agenda.events)
        if replica is None:
            self._arrive(token, now)
            return
        for i in replica.wake(now, token):
            self.departures[i].append(now)
            self._start_next_visit(i, now)

    def _start_next_visit(self, i: int, now: float) -> None:
        """Start a job's next visit, or end the job."""
        visits = self._jobs[i].visits
        done = len(self.departures[i])
        if done == len(visits):
            self.end[i] = now
            return
        delay = visits[done].delay_s
        if delay or done:
            heappush(self._agenda.events, (now + delay, next(self._agenda.sequence), None, i))
        else:
            self._arrive(i, now)

    def _arrive(self, i: int, now: float) -> None:
        job = self._jobs[i]
        self.arrivals[i].append(now)
        self._dispatches[job.visits[len(self.departures[i])].station].arrive(now, i, job.request)


def _outcome(
    jobs: Sequence[StationJob],
    stations: Sequence[Station],
    dispatches: Sequence[RouterDispatch],
    log: TokenLog,
    loop: _EventLoop,
) -> JobOutcomes:
    at = np.array([job.at_s for job in jobs])
    output = np.array([job.request.output_tokens for job in jobs], dtype=np.int64)
    overhead = np.array([_overhead(job, stations) for job in jobs])
    end, first, last = np.array(loop.end), np.array(log.first_token), np.array(log.last_token)
    first_known = np.where(np.isnan(first), at, first)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(output > 1, (last - first_known) / (output - 1), np.nan)
    span = max(log.until - log.since, 0.0)
    return JobOutcomes(
        kind=np.array([job.kind for job in jobs], dtype=np.int64),
        ttft=np.where(np.isnan(first), end, first) - at + overhead,
        tpot=tpot,
        e2e=end - at + overhead,
        stage_s=_stage_times(loop.arrivals, loop.departures),
        busy={d.station.name: d.busy_s / (span * d.station.replicas) if span else 0.0 for d in dispatches},
        queues={d.station.name: d.queue_peak for d in dispatches},
    )


def _overhead(job: StationJob, stations: Sequence[Station]) -> float:
    for visit in job.visits:
        station = stations[visit.station]
        if station.steps is not None and "P" in station.tasks:
            return off_device_s(station, job.request)
    return 0.0


def _stage_times(arrivals: list[list[float]], departures: list[list[float]]) -> NDArray[np.float64]:
    width = max((len(row) for row in arrivals), default=0)
    times = np.full((len(arrivals), width), np.nan)
    for i, (row_in, row_out) in enumerate(zip(arrivals, departures, strict=True)):
        for k, (a, b) in enumerate(zip(row_in, row_out, strict=True)):
            times[i, k] = b - a
    return times


class RouterDispatch:
    def __init__(
        self, station: Station, agenda: EventAgenda, log: TokenLog, rng: np.random.Generator
    ) -> None:
        self.station = station
        self._rng = rng
        self._random_numbers: list[float] = []
        self._replicas = [_replica(station, agenda, log) for _ in range(station.replicas)]

    def arrive(self, now: float, job: int, request: SampledRequest) -> None:
        self._choose(now).arrive(now, job, request)

    @property
    def busy_s(self) -> float:
        return sum(replica.busy_s for replica in self._replicas)

    @property
    def queue_peak(self) -> QueuePeak:
        return reduce(or_, (replica.queue_peak for replica in self._replicas))

    def _choose(self, now: float) -> SimulatedReplica:
        if len(self._replicas) == 1:
            return self._replicas[0]
        if self.station.router == "random":
            return self._replicas[self._random_index(len(self._replicas))]
        if self.station.router == "power_of_two":
            return self._shorter_of_two()
        if self.station.router == "join_shortest_queue":
            return min(self._replicas, key=lambda replica: replica.outstanding)
        return self._least_work(now)

    def _shorter_of_two(self) -> SimulatedReplica:
        """Choose the less loaded of two different random replicas. On a tie, choose the replica that was
        drawn first."""
        i, k = self._random_index(len(self._replicas)), self._random_index(len(self._replicas) - 1)
        one, other = self._replicas[i], self._replicas[k + (k >= i)]
        return one if one.outstanding <= other.outstanding else other

    def _random_index(self, n: int) -> int:
        """Return a random index below `n`.

        Random numbers are drawn in blocks, because a call of numpy's generator takes as long as a simulated
        request.
        """
        if not self._random_numbers:
            self._random_numbers = self._rng.random(_RANDOM_BLOCK).tolist()
        return int(self._random_numbers.pop() * n)

    def _least_work(self, now: float) -> SimulatedReplica:
        best, least = self._replicas[0], float("inf")
        for replica in self._replicas:
            load = replica.load(now)
            if load < least:
                best, least = replica, load
                if not load:
                    break
        return best


def _replica(station: Station, agenda: EventAgenda, log: TokenLog) -> SimulatedReplica:
    if "G" in station.tasks:
        return SerialReplica(station, agenda, log)
    if station.tasks == "E":
        return EncoderReplica(station, agenda, log)
    return EngineReplica(station, agenda, log)
