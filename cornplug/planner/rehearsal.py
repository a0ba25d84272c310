"""A whole plan's requests through all of its stations: simulated together, and predicted apart.

`rehearse` simulates every class and every station of a plan in one run. `predict` is what the plan
promises, and does not see that run: `convolution.py` says how.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cornplug.planner.convolution import apart
from cornplug.planner.plan import Route, Times
from cornplug.planner.simulator import Station, simulate
from cornplug.planner.traffic import Class, Delays, horizon, jobs_of, traffic

__all__ = ["Class", "Delays", "Result", "predict", "rehearse", "times_of"]


@dataclass(frozen=True)
class Result:
    """Times of one class, in seconds."""

    ttft: Times
    tpot: Times
    e2e: Times
    finished: float
    """Requests a second that were done while requests arrived; below the rate in an overload."""


def times_of(samples: NDArray[np.float64]) -> Times:
    """Mean and percentiles of what is not NaN."""
    known = samples[~np.isnan(samples)]
    if not len(known):
        return Times()
    p50, p95, p99 = np.quantile(known, [0.5, 0.95, 0.99])
    return Times(mean=float(known.mean()), p50=float(p50), p95=float(p95), p99=float(p99))


def rehearse(
    stations: Mapping[str, Station],
    routes: Sequence[Route],
    classes: Mapping[str, Class],
    delays: Delays,
    *,
    requests: int,
    seed: int,
) -> dict[str, Result]:
    """Simulate the plan with all classes sharing its stations.

    About `requests` requests are counted, of each class in proportion to its rate; the plan is
    warm before the first and stays loaded after the last. A request's group at a stage is chosen
    by the stage's weights, at random.

    Raises:
        ConfigError: a route's class or group is unknown, or a request's KV fits no replica.
    """
    rng = np.random.default_rng(seed)
    places = list(stations.values())
    all_traffic = traffic(stations, routes, classes, delays)
    if not all_traffic:
        return {}
    counted, warm = horizon(places, all_traffic, requests)
    jobs = sorted(
        (job for kind, t in enumerate(all_traffic) for job in jobs_of(t, kind, counted + 2 * warm, rng)),
        key=lambda job: job.at_s,
    )
    outcome = simulate(places, jobs, seed=seed + 1)
    at = np.array([job.at_s for job in jobs])
    done = at + outcome.e2e
    results = {}
    for kind, t in enumerate(all_traffic):
        mine = outcome.kind == kind
        rows = mine & (at >= warm) & (at < warm + counted)
        ended = mine & (done >= warm) & (done < warm + counted)
        results[t.of.name] = Result(
            times_of(outcome.ttft[rows]),
            times_of(outcome.tpot[rows]),
            times_of(outcome.e2e[rows]),
            float(ended.sum() / counted),
        )
    return results


def predict(
    stations: Mapping[str, Station],
    routes: Sequence[Route],
    classes: Mapping[str, Class],
    delays: Delays,
    *,
    requests: int,
    seed: int,
) -> dict[str, Result]:
    """What the plan promises: stations apart, a request's times at them added along its path.

    Raises:
        ConfigError: as `rehearse`.
    """
    # Not one random number in common with a rehearsal of the same seed.
    rng = np.random.default_rng([seed, 1])
    places = list(stations.values())
    all_traffic = traffic(stations, routes, classes, delays)
    return {
        name: Result(times_of(path.ttft), times_of(path.tpot), times_of(path.e2e), path.finished)
        for name, path in apart(places, all_traffic, requests, rng).items()
    }
