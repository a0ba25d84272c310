"""When the monolith wins: in words, from its cost here and at other loads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.report import formatting
from cornplug.planner.report.counterfactual import CounterfactualAnswer

LOADS: Final = (0.25, 4.0, 0.5, 2.0)
"""Of all rates."""


@dataclass(frozen=True)
class MonolithCost:
    """Dollars an hour at a multiple of the planned rates; None: no plan."""

    factor: float
    monolith: float | None
    best: float | None


def at(pool: OptimizationProblem, factor: float) -> OptimizationProblem:
    """The pool at another load, with as much more stock as it takes to leave the question open."""
    demands = tuple(replace(d, rate=d.rate * factor) for d in pool.demands)
    nodes = tuple(replace(n, stock=ceil(n.stock * max(factor, 1.0))) for n in pool.nodes)
    return replace(pool, demands=demands, nodes=nodes, current=None)


def it_wins(cost: float, divided: CounterfactualAnswer | None) -> str:
    """`cost`: of the plan, which is all monoliths."""
    if divided is None:
        return "The monolith wins here."
    if divided.value is None:
        return "The monolith wins here: nothing else keeps the SLOs with this pool."
    return f"The monolith wins here: dividing requests costs {_more(divided.value, cost)}."


def it_loses(cost: float, single: CounterfactualAnswer) -> str:
    """`cost`: of the plan, which divides some requests."""
    if single.value is None:
        reason = f" ({single.reason})" if single.reason else ""
        return f"The monolith loses here: with monoliths only, no plan keeps the SLOs on this pool{reason}."
    if single.value <= cost + 1e-6:
        return "The monolith everywhere costs the same here."
    return f"The monolith loses here: everywhere, it costs {_more(single.value, cost)}."


def at_other_loads(loads: Sequence[MonolithCost], gap: float) -> str:
    """Where it is as cheap as the best plan, within the solver's gap."""
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
