"""Computes the bounds on one stage at every percentile of a class's SLO."""

from __future__ import annotations

from collections.abc import Iterator
from math import isinf

from cornplug.planner.inputs.slo import IdleTimes, Quantity, Slo
from cornplug.planner.perf_model.latency_bound import LatencyBound

Kind = tuple[str, bool]
"""(percentile, whether the bound is a slowdown)."""


def stage_bound(slo: Slo, seconds: float, tpot_s: float, idle: IdleTimes | None = None) -> LatencyBound:
    """Return the bounds of a class on a stage in a tier of `seconds` and `tpot_s` (inf means no bound).

    A tier is derived from the first bound of each quantity (`Slo.every`). Bounds at other percentiles are
    proportional. For example, if the SLO has 1 s at P50 and 3 s at P99, a stage with 0.4 s at P50 has 1.2 s
    at P99. The simulation of the complete plan shows deviations. `idle` contains the class's mean latencies
    on the idle replica if slowdowns are bounded.
    """
    first = dict(_parts(slo, "ttft", seconds, idle))
    tokens = dict(_parts(slo, "tpot", tpot_s, idle))
    bounds = [
        LatencyBound(kind[0], first.get(kind), tokens.get(kind), relative=kind[1])
        for kind in dict.fromkeys([*first, *tokens])
    ] or [LatencyBound(slo.percentile)]
    head = bounds[0]
    return LatencyBound(head.percentile, head.seconds, head.tpot_s, tuple(bounds[1:]), head.relative)


def _parts(
    slo: Slo, quantity: Quantity, value: float, idle: IdleTimes | None
) -> Iterator[tuple[Kind, float]]:
    """Yield the bound on a stage at each percentile, from its bound `value` at the first percentile.

    If the SLO has no bound on the quantity, the bounds are proportional to the end-to-end bounds.
    """
    if isinf(value):
        return
    told: Quantity = quantity if slo.every(quantity) else "e2e"
    whole = slo.first_s(told, idle)
    if whole is None:  # The tier is from another class, but this class's requests must also meet it.
        yield (slo.percentile, False), value
        return
    for bound in slo.every(told):
        part = value * bound.seconds(idle, told) / whole
        if bound.relative and idle is not None:
            part /= max(idle.at(quantity), 1e-9)
        yield (bound.percentile, bound.relative), part
