"""Simulates a station's router, which chooses a replica for each request.

- power_of_two: the replica with fewer requests, of two random replicas, as in vllm-router and sglang-router.
- random: a random replica.
- least_work: the replica with the fewest seconds of unfinished work (`load`).
- join_shortest_queue: the replica with the fewest requests.

Among equal replicas, the first replica is chosen. Real routers have only the information that the first two
policies use. The other policies are bounds for comparison.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Final

import numpy as np

from cornplug.planner.inputs.request_classes import SampledRequest
from cornplug.planner.simulator.engine_replica import EngineReplica
from cornplug.planner.simulator.replicas import (
    EncoderReplica,
    EventAgenda,
    SerialReplica,
    SimulatedReplica,
    TokenLog,
)
from cornplug.planner.simulator.stations import QueuePeak, Station

_BLOCK: Final = 512
"""Number of random numbers that a station draws in one call."""


class RouterDispatch:
    def __init__(
        self, station: Station, agenda: EventAgenda, log: TokenLog, rng: np.random.Generator
    ) -> None:
        self.station = station
        self._rng = rng
        self._drawn: list[float] = []
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
            return self._replicas[self._below(len(self._replicas))]
        if self.station.router == "power_of_two":
            return self._shorter_of_two()
        if self.station.router == "join_shortest_queue":
            return min(self._replicas, key=lambda replica: replica.outstanding)
        return self._least_work(now)

    def _shorter_of_two(self) -> SimulatedReplica:
        """Choose the less loaded of two different random replicas, or the first drawn on a tie."""
        i, k = self._below(len(self._replicas)), self._below(len(self._replicas) - 1)
        one, other = self._replicas[i], self._replicas[k + (k >= i)]
        return one if one.outstanding <= other.outstanding else other

    def _below(self, n: int) -> int:
        """Return a random index below `n`.

        Random numbers are drawn in blocks, because a call of numpy's generator takes as long as a simulated
        request.
        """
        if not self._drawn:
            self._drawn = self._rng.random(_BLOCK).tolist()
        return int(self._drawn.pop() * n)

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
