"""Bounds of one stage, at every percentile of a class's SLO."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf

from cornplug.planner.inputs.slo import Quantity, Slo
from cornplug.planner.perf_model.latency_bound import LatencyBound


def stage_bound(slo: Slo, seconds: float, tpot_s: float) -> LatencyBound:
    """The bounds that a class has where a tier keeps `seconds` and `tpot_s` (inf: none).

    A tier is made of the first bound of each kind (`Slo.first`). A bound at another percentile is in
    proportion: with 1 s at P50 and 3 s at P99, a stage that has 0.4 s at P50 has 1.2 s at P99. What the
    stages of a path lose or gain against that is seen in the simulation of the whole plan.
    """
    first = dict(_parts(slo, "ttft", seconds))
    tokens = dict(_parts(slo, "tpot", tpot_s))
    bounds = [
        LatencyBound(percentile, first.get(percentile), tokens.get(percentile))
        for percentile in dict.fromkeys([*first, *tokens])
    ] or [LatencyBound(slo.percentile)]
    return LatencyBound(bounds[0].percentile, bounds[0].seconds, bounds[0].tpot_s, tuple(bounds[1:]))


def _parts(slo: Slo, quantity: Quantity, value: float) -> Iterator[tuple[str, float]]:
    """Percentile -> its part of `value`; without a bound on the quantity, that on the whole answer tells."""
    if isinf(value):
        return
    told: Quantity = quantity if slo.first(quantity) else "e2e"
    whole = slo.first_bound(told)
    if whole is None:  # a tier of another class: this one's requests keep it, too
        yield slo.percentile, value
        return
    for table in slo.tables:
        bound = table.bound(told)
        if bound is not None:
            yield table.percentile, value * bound / whole
