"""Sentences that compare the cost of monoliths with the plan's, at the planned load and at other loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.report import formatting
from cornplug.planner.report.counterfactual import CounterfactualAnswer

LOADS: Final = (0.25, 4.0, 0.5, 2.0)
"""Factors on all request rates at which monoliths are compared with the best plan, in this order."""


@dataclass(frozen=True)
class MonolithCost:
    """Dollars per hour at `factor` times the planned rates. A cost is None if there is no plan."""

    factor: float
    monolith: float | None
    """Cost with monoliths only."""
    best: float | None
    """Cost with any structures."""


def at(pool: OptimizationProblem, factor: float) -> OptimizationProblem:
    """Return the pool with all rates multiplied by `factor`, and with more stock for a larger load, so that
    the stock does not decide the comparison."""
    demands = tuple(replace(d, rate=d.rate * factor) for d in pool.demands)
    nodes = tuple(replace(n, stock=ceil(n.stock * max(factor, 1.0))) for n in pool.nodes)
    return replace(pool, demands=demands, nodes=nodes, current=None)


def it_wins(cost: float, divided: CounterfactualAnswer | None) -> str:
    """Return the sentence for a plan with monoliths only, whose cost is `cost`."""
    if divided is None:
        return "The monolith wins here."
    if divided.value is None:
        return "The monolith wins here: no other structure meets the SLOs with this pool."
    return f"The monolith wins here: dividing requests costs {_more(divided.value, cost)}."


def it_loses(cost: float, single: CounterfactualAnswer) -> str:
    """Return the sentence for a plan that divides some requests among engines, whose cost is `cost`."""
    if single.value is None:
        reason = f" ({single.reason})" if single.reason else ""
        return f"The monolith loses here: no plan of monoliths only meets the SLOs with this pool{reason}."
    if single.value <= cost + 1e-6:
        return "Using the monolith everywhere costs the same here."
    return f"The monolith loses here: using it everywhere costs {_more(single.value, cost)}."


def at_other_loads(loads: Sequence[MonolithCost], gap: float) -> str:
    """Return a sentence about the loads at which monoliths are as cheap as the best plan, within the solver's
    gap."""
    known = sorted((x for x in loads if x.best is not None), key=lambda x: x.factor)
    if not known:
        return ""
    wins = [x.factor for x in known if _as_cheap(x, gap)]
    loses = [x.factor for x in known if not _as_cheap(x, gap)]
    said = [f"it is the cheapest at {_times(wins)} this load"] if wins else []
    said += [f"it is not at {_times(loses)} this load"] if loses else []
    text = ", ".join(said)
    return f"{text[0].upper()}{text[1:]}."


def _as_cheap(load: MonolithCost, gap: float) -> bool:
    assert load.best is not None
    return load.monolith is not None and load.monolith <= load.best * (1 + gap) + 1e-6


def _times(factors: Sequence[float]) -> str:
    *first, last = [f"{f:g}" for f in factors]
    return f"{', '.join(first)} and {last} times" if first else f"{last} times"


def _more(cost: float, than: float) -> str:
    if cost <= than + 1e-6 or not than:
        return f"{formatting.dollars(cost)}, the same"
    return f"{formatting.dollars(cost)}, {formatting.percent(cost / than - 1)} more"
