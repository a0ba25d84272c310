"""Stations simulated apart, each under its final load, and their times added along paths.

A station's arrivals are the times at which the stations before it, simulated in the same way, let
requests go, since a queue makes bursts even and a batch makes what was even come in bursts. The
requests themselves are drawn anew. Along a path a request keeps its draw: of a station's records
one of those whose size there is nearest is taken, so that a prompt that is long for prefill is long
for decode, too. What is left out is that two queues of a path may be long at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.simulation import arrivals
from cornplug.planner.simulation.path_times import PathTimes
from cornplug.planner.simulation.replicas import alone_s, off_device_s
from cornplug.planner.simulation.simulator import Job, Station, Visit, simulate
from cornplug.planner.simulation.traffic import Stop, Traffic, Way, horizon

Floats = NDArray[np.float64]
_WINDOW = 0.005


@dataclass(frozen=True)
class Records:
    """One class at one station, ascending by a request's seconds with nothing beside it."""

    alone: Floats
    ttft: Floats
    tpot: Floats
    stage: Floats
    done: float
    """Requests that left for each that came, in the time that counts; at most 1."""
    left: Floats
    """When each request left, whether in the time that counts or not; in no order."""
    draws: NDArray[np.int64]
    """Of the same requests: which of the class's draws."""

    def near(self, alone: Floats, rng: np.random.Generator) -> NDArray[np.int64]:
        """For each request a row of about its size."""
        low = np.searchsorted(self.alone, alone, "left")
        high = np.searchsorted(self.alone, alone, "right")
        window = max(2.0, _WINDOW * len(self.alone))
        spread = np.maximum(high - low, window)
        rows: NDArray[np.int64] = ((low + high) / 2 + (rng.random(len(alone)) - 0.5) * spread).astype(
            np.int64
        )
        return np.clip(rows, 0, len(self.alone) - 1)


def apart(
    stations: Sequence[Station], all_traffic: Sequence[Traffic], requests: int, rng: np.random.Generator
) -> dict[str, PathTimes]:
    if not all_traffic:
        return {}
    span = Span(*horizon(stations, all_traffic, requests))
    at: dict[int, dict[int, Records]] = {}
    for place in sorted(range(len(stations)), key=lambda i: "EPDG".index(stations[i].tasks[0])):
        feeds = {kind: _feed(place, kind, t, at, span, rng) for kind, t in enumerate(all_traffic)}
        at[place] = _alone(stations[place], all_traffic, feeds, span, rng)
    return {
        t.of.name: _add_up(stations, t, {i: at[i][kind] for i in at if kind in at[i]}, requests, rng)
        for kind, t in enumerate(all_traffic)
    }


@dataclass(frozen=True)
class Span:
    """Seconds that count, and seconds before and after them that do not."""

    counted: float
    warm: float

    @property
    def whole(self) -> float:
        return self.counted + 2 * self.warm

    def holds(self, at: Floats) -> NDArray[np.bool_]:
        return (at >= self.warm) & (at < self.warm + self.counted)


# One station ----------------------------------------------------------------------------------


def _feed(
    place: int, kind: int, t: Traffic, at: dict[int, dict[int, Records]], span: Span, rng: np.random.Generator
) -> Floats:
    """Times at which a class's requests come to a station, from all stops that may precede it."""
    parts = [np.empty(0)]
    for way in t.ways:
        for before, stop in zip((None, *way.stops), way.stops, strict=False):
            if place not in stop.stations:
                continue
            share = way.share * stop.weights[stop.stations.index(place)]
            if before is None:
                parts.append(_thin(arrivals.within(t.of.rate, t.of.burst, span.whole, rng), share, rng))
                continue
            for last, weight in zip(before.stations, before.weights, strict=True):
                if weight:
                    left, draws = at[last][kind].left, at[last][kind].draws
                    parts.append(_thin(left + stop.delays_s[draws], share * weight / t.visits_of(last), rng))
    return np.sort(np.concatenate(parts))


def _thin(at: Floats, share: float, rng: np.random.Generator) -> Floats:
    return at[rng.random(len(at)) < share] if share < 1 else at


def _alone(
    station: Station,
    all_traffic: Sequence[Traffic],
    feeds: Mapping[int, Floats],
    span: Span,
    rng: np.random.Generator,
) -> dict[int, Records]:
    """Records of each class (its place in `all_traffic`) that comes to the station."""
    if station.steps is not None:
        # A path has it once, whichever station it is at.
        station = replace(station, steps=replace(station.steps, request_overhead_s=0.0, pipeline=1))
    kinds = np.concatenate([np.full(len(at), kind) for kind, at in feeds.items()])
    draws = np.concatenate(
        [arrivals.evenly(len(all_traffic[kind].of.draws), len(at), rng) for kind, at in feeds.items()]
    )
    at = np.concatenate(list(feeds.values()))
    order = np.argsort(at, kind="stable")
    kinds, draws, at = kinds[order], draws[order], at[order]
    here = (Visit(0),)
    jobs = [
        Job(time, kind, all_traffic[kind].of.draws[d], here)
        for time, kind, d in zip(at.tolist(), kinds.tolist(), draws.tolist(), strict=True)
    ]
    outcome = simulate([station], jobs, seed=int(rng.integers(1 << 31)))
    alone = np.array([alone_s(station, job.draw) for job in jobs])
    inside, done = span.holds(at), span.holds(at + outcome.e2e)
    records = {}
    for kind in feeds:
        mine = kinds == kind
        rows = np.flatnonzero(inside & mine)
        if not len(rows):
            # So rare a visitor that none came in time: the others' times stand for its own.
            rows = np.flatnonzero(inside)
        rows = rows[np.argsort(alone[rows], kind="stable")]
        if len(rows):
            records[kind] = Records(
                alone[rows],
                outcome.ttft[rows],
                outcome.tpot[rows],
                outcome.stage_s[rows, 0],
                min(float((done & mine).sum() / max((inside & mine).sum(), 1)), 1.0),
                (at + outcome.e2e)[mine],
                draws[mine],
            )
    return records


# Along a path -----------------------------------------------------------------------------------


def _add_up(
    stations: Sequence[Station],
    t: Traffic,
    records: Mapping[int, Records],
    requests: int,
    rng: np.random.Generator,
) -> PathTimes:
    ways, draws = t.choose(requests, rng), arrivals.evenly(len(t.of.draws), requests, rng)
    tour = _Tour(stations, t, records, rng, requests)
    for i, way in enumerate(t.ways):
        rows = np.flatnonzero(ways == i)
        for stop in way.stops:
            tour.stop(stop, rows, draws[rows])
    first = np.where(np.isnan(tour.first), tour.now, tour.first)
    return PathTimes(
        first, tour.tpot, tour.now, t.of.rate * sum(way.share * tour.done(way) for way in t.ways)
    )


class _Tour:
    """Sampled requests of one class, as they go from stop to stop."""

    def __init__(
        self,
        stations: Sequence[Station],
        t: Traffic,
        records: Mapping[int, Records],
        rng: np.random.Generator,
        n: int,
    ) -> None:
        self._stations, self._records, self._rng = stations, records, rng
        self._output = np.array([draw.output_tokens for draw in t.of.draws])
        self._alone = {
            at: np.array([alone_s(stations[at], draw) for draw in t.of.draws])
            for way in t.ways
            for stop in way.stops
            for at in stop.stations
        }
        self._off_device = {
            at: np.array([off_device_s(stations[at], draw) for draw in t.of.draws]) for at in self._alone
        }
        self.now = np.zeros(n)
        self.first = np.full(n, np.nan)
        self.tpot = np.full(n, np.nan)

    def stop(self, stop: Stop, rows: NDArray[np.int64], draws: NDArray[np.int64]) -> None:
        places = stop.choose(len(rows), self._rng)
        for place in np.unique(places).tolist():
            here = places == place
            self._visit(stop, place, rows[here], draws[here])

    def _visit(self, stop: Stop, place: int, rows: NDArray[np.int64], draws: NDArray[np.int64]) -> None:
        records = self._records[place]
        near = records.near(self._alone[place][draws], self._rng)
        delay, stage = stop.delays_s[draws], records.stage[near]
        station = self._stations[place]
        if "P" in station.tasks:
            self.now[rows] += self._off_device[place][draws]
            self.first[rows] = self.now[rows] + delay + records.ttft[near]
        if "D" in station.tasks and "P" in station.tasks:
            self.tpot[rows] = records.tpot[near]
        elif "D" in station.tasks:
            more = self._output[draws] - 1
            self.tpot[rows] = np.where(more > 0, (delay + stage) / np.maximum(more, 1), np.nan)
        self.now[rows] += delay + stage

    def done(self, way: Way) -> float:
        """Share of a way's requests that its slowest stop lets through."""
        return min(
            sum(
                weight * self._records[place].done
                for place, weight in zip(stop.stations, stop.weights, strict=True)
            )
            for stop in way.stops
        )
