"""Counterfactual questions about a plan: the cost for a slightly different pool, found by one quick solve.

A pool is the optimisation problem that the plan solves. To compute an alternative, options of one decision
are removed from the pool. To find binding constraints, one kind of constraint is relaxed at a time. Slacks
alone do not show which constraints bind: a constraint of an integer program may have slack and still increase
the cost, because half a node cannot be rented.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from cornplug.planner.inputs.schema import Component, Engine, SolverOptions
from cornplug.planner.optimizer import infeasibility, milp
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PathVariant, PoolSolution
from cornplug.planner.optimizer.solution import goals
from cornplug.planner.optimizer.solvers import SolverLimits
from cornplug.planner.optimizer.solvers import solve as run_solver
from cornplug.planner.report import formatting

QUESTION_WORK: Final = 0.5
"""Maximum solver work for one question, in the unit of `SolverOptions.work`."""
BUILD_WORK: Final = 0.02
"""Solver work that is counted for building a question's model."""
MONOLITH = "monolith"
MONOLITHS, DIVIDED = "monolith everywhere", "divided everywhere"
"""Names of the questions about the cost with monoliths only, and without monoliths."""
FEWER_REQUESTS_SHARE = 0.1
"""Fraction of a class's requests that is removed to compute what these requests cost."""


@dataclass(frozen=True)
class CounterfactualQuestion:
    name: str
    text: str
    pool: OptimizationProblem


@dataclass(frozen=True)
class CounterfactualResult:
    value: float | None
    """Value of the pool's objective (dollars per hour, goodput or least share), or None if no plan was found
    that is at least as good as `at_least`.
    """
    proven: bool
    """Whether the solver proved the value within its gap, or proved that there is no such plan."""
    reason: str = ""
    """If the value is None: the capacity or cell (replica configuration) that is missing, or "" if the reason
    is not known."""
    timed_out: bool = False
    """Whether the time limit ended the search. Another run may have another result."""


class ExplanationBudget:
    """Solver work that explanations may still use. The budget counts work instead of time, so that the same
    input has the same explanations on any machine."""

    def __init__(self, work: float) -> None:
        """Create a budget of `work`, in the unit of `SolverOptions.work`."""
        self.remaining = max(work, 0.0)

    def spend(self, work: float) -> None:
        self.remaining = max(self.remaining - work, 0.0)


def solve_question(
    pool: OptimizationProblem,
    settings: SolverOptions,
    budget: ExplanationBudget,
    *,
    at_least: float | None = None,
) -> CounterfactualResult:
    """Solve the pool for its first objective only, and return the result. If the pool has no plan, the
    missing resources are not computed.

    With `at_least`, only plans that are at least as good as this value are considered, which prunes most of
    the search. The work, at most `QUESTION_WORK`, is subtracted from the budget.
    """
    budget.spend(BUILD_WORK)
    model = milp.build(pool)
    if reason := infeasibility.summarize_unserved(model):
        return CounterfactualResult(None, True, reason)
    goal = goals(model)[0]
    model.problem.setObjective(goal.sign * goal.expression)
    if at_least is not None:
        model.problem.addConstraint(
            goal.sign * goal.expression <= goal.sign * at_least * objective_hours(pool)
        )
    work = min(QUESTION_WORK, budget.remaining)
    run = run_solver(model.problem, SolverLimits(settings.gap, settings.time_limit_s, settings.threads, work))
    budget.spend(run.work)
    if run.status in ("infeasible", "none"):
        return CounterfactualResult(None, run.status == "infeasible", timed_out=run.timed_out)
    value = goal.sign * run.objective / objective_hours(pool)
    return CounterfactualResult(value, run.status == "optimal", timed_out=run.timed_out)


def objective_hours(pool: OptimizationProblem) -> float:
    """Return the hours by which to divide the objective to get dollars per hour. This is the horizon of a
    re-plan, whose objective is the dollars over the horizon, and otherwise 1."""
    return pool.current.horizon_hours if pool.current is not None and pool.objective == "cost" else 1.0


def is_monolith(structure: str) -> bool:
    """Return whether a structure is a monolith, in which one engine encodes, prefills and decodes. A monolith
    may have a separate generator."""
    return structure.removesuffix("+G") == MONOLITH


def alternative_questions(
    pool: OptimizationProblem, solution: PoolSolution
) -> Iterator[CounterfactualQuestion]:
    """Yield a question for each choice of the plan: what would the plan cost without it?"""
    yield from _structures(pool, solution)
    yield from _gpus(pool, solution)
    yield from _caches(pool, solution)


def only_monoliths(pool: OptimizationProblem) -> OptimizationProblem:
    """Return the pool without structures that divide a request among engines."""
    return _variants(pool, lambda v: is_monolith(v.structure))


def without_monoliths(pool: OptimizationProblem) -> OptimizationProblem:
    """Return the pool without the monoliths of those classes that have other structures."""
    able = {v.demand for v in pool.variants if not is_monolith(v.structure)}
    return _variants(pool, lambda v: not is_monolith(v.structure) or v.demand not in able)


def used_structures(pool: OptimizationProblem, solution: PoolSolution) -> set[str]:
    """Return the structures that the plan uses."""
    return {v.structure for v in pool.variants if solution.served.get(v.name, 0.0) > 0}


def _structures(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[CounterfactualQuestion]:
    used = {s for s in used_structures(pool, solution) if not is_monolith(s)}
    if used and any(is_monolith(v.structure) for v in pool.variants):
        yield CounterfactualQuestion(MONOLITHS, "every request in one engine", only_monoliths(pool))
    for name in sorted(used) if len(used) > 1 else ():
        yield CounterfactualQuestion(
            f"without {name}", f"no request as {name}", _without_structure(pool, name)
        )
    if not used and without_monoliths(pool).variants != pool.variants:
        yield CounterfactualQuestion(
            DIVIDED, "no monolith where another structure is allowed", without_monoliths(pool)
        )


def _gpus(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[CounterfactualQuestion]:
    gpu = {n.name: n.gpu for n in pool.nodes}
    used = {gpu[name] for name, n in solution.nodes.items() if n}
    kinds = sorted(set(gpu.values()))
    for kind in kinds if len(kinds) > 1 else ():
        if kind in used:
            yield CounterfactualQuestion(
                f"without {kind}", f"no {kind}", _limit_to_gpus(pool, [k for k in kinds if k != kind])
            )
    # With two GPU types, "only A" would equal "without B".
    for kind in kinds if len(kinds) > 2 else ():
        if used != {kind}:
            yield CounterfactualQuestion(f"only {kind}", f"all on {kind}", _limit_to_gpus(pool, [kind]))


def _caches(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[CounterfactualQuestion]:
    chosen = [level for level in pool.levels if level.name in solution.levels]
    if not any(level.bytes for level in chosen):
        return
    smallest: dict[str, float] = {}
    for level in pool.levels:
        smallest[level.cache] = min(level.bytes, smallest.get(level.cache, level.bytes))
    kept = tuple(level for level in pool.levels if level.bytes == smallest[level.cache])
    names = {level.name for level in kept}
    small = _variants(replace(pool, levels=kept), lambda v: v.levels <= names)
    yield CounterfactualQuestion("smallest caches", "every cache at the smallest of its sizes", small)


def _variants(pool: OptimizationProblem, keep: Callable[[PathVariant], bool]) -> OptimizationProblem:
    return replace(pool, variants=tuple(v for v in pool.variants if keep(v)))


def _without_structure(pool: OptimizationProblem, name: str) -> OptimizationProblem:
    return _variants(pool, lambda v: v.structure != name)


def _limit_to_gpus(pool: OptimizationProblem, gpus: Collection[str]) -> OptimizationProblem:
    nodes = {n.name for n in pool.nodes if n.gpu in gpus}
    return replace(pool, cells=tuple(c for c in pool.cells if c.nodes in nodes))


def without_engine(components: Iterable[Component], engine: Engine) -> list[Component] | None:
    """Return the components without this engine, or None if a language model has no other engine.

    A question without an engine needs a new pool, because cells of slower engines were removed from the
    present pool.
    """
    others = []
    for c in components:
        engines = [e for e in c.engines if e != engine]
        if c.kind == "llm" and not engines:
            return None
        others.append(c.model_copy(update={"engines": engines or c.engines}))
    return others


@dataclass(frozen=True)
class RelaxedConstraint:
    question: CounterfactualQuestion
    slack: float
    """Smallest slack among the program's rows for this constraint."""
    is_price: bool = False
    """Whether the saving is the price of serving some requests. This price is reported even if no constraint
    binds."""


def constraint_questions(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    """Yield the pool's constraints, each with the pool in which it is relaxed."""
    yield from _stock(pool, solution)
    yield from _limits(pool, solution)
    yield from _growth(pool, solution)
    yield from _spot(pool, solution)
    yield from _network(pool, solution)
    yield from _changes(pool, solution)
    yield from _demand(pool)


def _stock(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    for node in pool.nodes:
        left = node.stock - solution.nodes.get(node.name, 0)
        if left == 0 and node.stock:
            more = tuple(replace(n, stock=2 * n.stock) if n == node else n for n in pool.nodes)
            text = f"all {node.stock} machines of {node.name} are used"
            yield RelaxedConstraint(
                CounterfactualQuestion(f"stock[{node.name}]", text, replace(pool, nodes=more)), 0.0
            )


def _limits(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    limits = pool.limits
    online = any(d.online for d in pool.demands)
    if limits.spare:
        relaxed = replace(pool, limits=replace(limits, spare=frozenset(), by_node=False, crowded=()))
        lost = "node" if limits.by_node else "replica"
        text = f"each online service survives the loss of a {lost} (rules.n_plus_one)"
        yield RelaxedConstraint(
            CounterfactualQuestion("spare", text, relaxed), _least_slack(solution, "spare[")
        )
    if online and limits.online_share < limits.max_utilisation:
        relaxed = replace(pool, limits=replace(limits, online_share=limits.max_utilisation))
        most = formatting.format_percent(limits.online_share)
        text = f"online requests use at most {most} of a replica (rules.online_share)"
        yield RelaxedConstraint(
            CounterfactualQuestion("online", text, relaxed), _least_slack(solution, "online[")
        )
    elif limits.max_utilisation < 1:
        relaxed = replace(pool, limits=replace(limits, max_utilisation=1.0, online_share=1.0))
        most = formatting.format_percent(limits.max_utilisation)
        text = f"replicas are used to at most {most} (rules.max_utilisation)"
        yield RelaxedConstraint(
            CounterfactualQuestion("capacity", text, relaxed), _least_slack(solution, "capacity[")
        )


def _growth(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    if any(d.online and d.growth_per_s for d in pool.demands):
        relaxed = replace(pool, demands=tuple(replace(d, growth_per_s=0.0) for d in pool.demands))
        text = "running replicas carry the growth of online requests until more replicas have started"
        slack = _least_slack(solution, "growth[")
        yield RelaxedConstraint(CounterfactualQuestion("growth", text, relaxed), slack)


def _spot(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    slacks = [slack for row, slack in solution.slack.items() if row.startswith("spot[")]
    if slacks:
        relaxed = replace(pool, limits=replace(pool.limits, spot_share=1.0))
        most = formatting.format_percent(pool.limits.spot_share)
        text = f"spot machines serve at most {most} of each online request class (rules.spot_share)"
        yield RelaxedConstraint(CounterfactualQuestion("spot", text, relaxed), min(slacks))


def _network(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    if "network" in solution.slack:
        relaxed = replace(pool, nodes=tuple(replace(n, nic=inf) for n in pool.nodes))
        most = formatting.format_percent(pool.limits.network_utilisation)
        text = f"traffic between nodes uses at most {most} of their network bandwidth"
        yield RelaxedConstraint(CounterfactualQuestion("network", text, relaxed), solution.slack["network"])


def _changes(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[RelaxedConstraint]:
    current = pool.current
    if current is not None and current.max_changes is not None:
        relaxed = replace(pool, current=replace(current, max_changes=None))
        text = f"at most {current.max_changes} starts and role switches (change.max_changes)"
        yield RelaxedConstraint(
            CounterfactualQuestion("change_budget", text, relaxed), solution.slack.get("change_budget", 0.0)
        )


def _demand(pool: OptimizationProblem) -> Iterator[RelaxedConstraint]:
    if pool.objective != "cost":
        return
    for demand in sorted(pool.demands, key=lambda d: -d.rate):
        fewer = tuple(
            replace(d, rate=d.rate * (1 - FEWER_REQUESTS_SHARE)) if d == demand else d for d in pool.demands
        )
        text = f"with {formatting.format_percent(FEWER_REQUESTS_SHARE)} fewer of these requests"
        yield RelaxedConstraint(
            CounterfactualQuestion(f"demand[{demand.name}]", text, replace(pool, demands=fewer)),
            0.0,
            is_price=True,
        )


def _least_slack(solution: PoolSolution, prefix: str) -> float:
    """Return the smallest slack of the rows that are named `prefix` and a cell, over all cells with replicas.
    The rows of cells without replicas are 0 <= 0."""
    rows = (f"{prefix}{cell}]" for cell, n in solution.replicas.items() if n)
    return min((solution.slack[row] for row in rows if row in solution.slack), default=0.0)
