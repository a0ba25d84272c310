"""Explanation of a plan: constraints that determine its cost, its alternatives, and the price of its SLOs.

Each question needs a separate solve. The solver work of all solves together is limited. The notes list the
questions that were skipped because of this limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil
from typing import Final

from cornplug.planner.inputs.schema import Engine, PlanInput, SolverOptions
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.pipeline.decide import PlanDecision
from cornplug.planner.pipeline.formulate import formulate
from cornplug.planner.plan import BindingConstraint, PlanAlternative, PlanExplanation
from cornplug.planner.report import counterfactual, formatting
from cornplug.planner.report.counterfactual import (
    CounterfactualQuestion,
    CounterfactualResult,
    ExplanationBudget,
    solve_question,
)
from cornplug.planner.report.slo_cost_curve import SloSweep, compute_curve, has_bounds, slo_prices

DEFAULT_WORK: Final = 15.0
"""Default solver work for all questions together, in the unit of `SolverOptions.work`."""
_GAP: Final = 0.01
_MAX_NAMED: Final = 3
"""Maximum number of questions that a note lists by name."""
PhaseCallback = Callable[[str, float], None]
_LOAD_FACTORS: Final = (0.25, 4.0, 0.5, 2.0)
"""Factors on all request rates at which monoliths are compared with the best plan, in this order."""


@dataclass
class _Questions:
    """Decision with its input, the remaining solver work, and the results so far."""

    plan_input: PlanInput
    decision: PlanDecision
    budget: ExplanationBudget
    settings: SolverOptions
    skipped: list[str] = field(default_factory=list)
    timed_out: list[str] = field(default_factory=list)
    """Names of the questions whose search was ended by the time limit."""
    results: dict[str, CounterfactualResult] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Value of the plan, in the unit of its objective."""
        plan = self.decision.plan
        return plan.cost_per_hour if self.is_cost_objective else self.decision.solution.objective

    @property
    def is_cost_objective(self) -> bool:
        return self.decision.pool.objective == "cost"

    @property
    def noise(self) -> float:
        """Largest difference from `value` that the solver's gap alone can cause."""
        return max(self.settings.gap, self.decision.solution.gap) * abs(self.value) + 1e-6

    def solve(
        self, name: str, pool: OptimizationProblem, *, better: bool = False
    ) -> CounterfactualResult | None:
        """Solve this pool, and return the result, or None if no work is left. A second call with the same
        `name` returns the first result.

        With `better`, only plans that are better than the decision's plan by more than the noise are
        considered.
        """
        if name in self.results:
            return self.results[name]
        if self.budget.remaining <= 0:
            self.skipped.append(name)
            return None
        gain = -self.noise if self.is_cost_objective else self.noise
        at_least = self.value + gain if better else None
        result = self.results[name] = solve_question(pool, self.settings, self.budget, at_least=at_least)
        if result.timed_out:
            self.timed_out.append(name)
        return result

    def gain_over_plan(self, result: CounterfactualResult) -> float | None:
        """Return the difference by which the result's value is better than the plan's value, or None if the
        result has no plan."""
        if result.value is None:
            return None
        return (self.value - result.value) if self.is_cost_objective else (result.value - self.value)


def explain(
    plan_input: PlanInput,
    decision: PlanDecision,
    *,
    work: float = DEFAULT_WORK,
    progress: PhaseCallback | None = None,
) -> PlanExplanation:
    """Return the explanation of a plan. Questions about the pool may use half of the solver work, and the
    questions about the cost of the SLOs may use the rest."""
    report = progress or (lambda _phase, _share: None)
    solver = plan_input.solver
    settings = solver.model_copy(update={"gap": max(solver.gap, _GAP)})
    questions = _Questions(plan_input, decision, ExplanationBudget(work / 2), settings)
    report("reasons", 0.0)
    sentence = _monolith(questions)
    report("reasons", 0.2)
    others = _alternatives(questions)
    report("reasons", 0.35)
    binding = _bindings(questions)
    report("reasons", 0.5)
    sweep = SloSweep(
        plan_input,
        ExplanationBudget(work / 2 + questions.budget.remaining),
        skipped=questions.skipped,
        timed_out=questions.timed_out,
    )
    curve = compute_curve(sweep, questions.value) if _bounds_matter(questions) else []
    report("reasons", 0.8)
    if curve:
        binding = _sort_by_savings([*binding, *slo_prices(sweep, questions.value, questions.noise)])
    report("reasons", 1.0)
    notes = [*decision.plan.explanation.notes, *_notes(decision, questions)]
    return PlanExplanation(
        binding=binding,
        alternatives=others,
        monolith=sentence,
        curve=curve,
        notes=notes,
    )


def _alternatives(questions: _Questions) -> list[PlanAlternative]:
    found = []
    in_pool = counterfactual.alternative_questions(questions.decision.pool, questions.decision.solution)
    for question in chain(in_pool, _engines(questions)):
        result = questions.solve(question.name, question.pool)
        if result is not None:
            cost = result.value if questions.is_cost_objective else None
            reason_against = _reason_against(questions, result)
            found.append(
                PlanAlternative(
                    name=question.name, text=question.text, cost_per_hour=cost, reason_against=reason_against
                )
            )
    return sorted(found, key=lambda a: (a.cost_per_hour is None, a.cost_per_hour or 0.0))


def _engines(questions: _Questions) -> Iterator[CounterfactualQuestion]:
    used = {g.engine for g in questions.decision.plan.groups}
    engines: tuple[Engine, ...] = ("sglang", "vllm")
    for engine in engines if questions.budget.remaining > 0 else ():
        others = counterfactual.without_engine(questions.decision.problem.components, engine)
        if engine in used and others:
            pool = formulate(questions.plan_input.model_copy(update={"components": others})).pool
            yield CounterfactualQuestion(
                f"without {engine}", f"no replica of {engine} (closed-form estimates only)", pool
            )


def _reason_against(questions: _Questions, result: CounterfactualResult) -> str:
    gained = questions.gain_over_plan(result)
    if gained is None:
        if result.reason:
            return result.reason
        return "no plan meets the SLOs" if result.proven else "no plan was found within the solver work"
    lost = -gained
    if lost <= questions.noise:
        return "equally good within the solver's gap"
    share = formatting.format_percent(lost / abs(questions.value)) if questions.value else ""
    about = "" if result.proven else "at most "
    if questions.is_cost_objective:
        return f"costs {about}{formatting.format_dollars(lost)} more (+{share})"
    return f"serves {about}{lost:.3g} less (-{share})"


def _bindings(questions: _Questions) -> list[BindingConstraint]:
    found = []
    for relaxed in counterfactual.constraint_questions(questions.decision.pool, questions.decision.solution):
        result = questions.solve(relaxed.question.name, relaxed.question.pool, better=True)
        gained = None if result is None else questions.gain_over_plan(result)
        unanswered = result is None and not relaxed.is_price and abs(relaxed.slack) < 1e-6
        if gained is not None or unanswered:
            found.append(
                BindingConstraint(
                    constraint=relaxed.question.name,
                    text=relaxed.question.text,
                    slack=relaxed.slack,
                    saves_per_hour=gained if questions.is_cost_objective else None,
                )
            )
    return _sort_by_savings(found)


def _sort_by_savings(found: list[BindingConstraint]) -> list[BindingConstraint]:
    return sorted(found, key=lambda b: -(b.saves_per_hour or 0.0))


def _bounds_matter(questions: _Questions) -> bool:
    """Return whether latency bounds affect the cost. If only throughputs are known, bounds have no effect."""
    timed = any(spec.has_times for spec in questions.decision.problem.cells.values())
    bounded = has_bounds(questions.plan_input.applications)
    return questions.is_cost_objective and questions.plan_input.change is None and timed and bounded


def _monolith(questions: _Questions) -> str:
    pool = questions.decision.pool
    if not questions.is_cost_objective:
        return ""
    used = counterfactual.used_structures(pool, questions.decision.solution)
    whole = all(counterfactual.is_monolith(s) for s in used)
    single = questions.solve(counterfactual.MONOLITHS, counterfactual.only_monoliths(pool))
    if single is None:
        return ""
    if counterfactual.without_monoliths(pool).variants == pool.variants and whole:
        return "The input allows only monoliths."
    if whole:
        other = questions.solve(counterfactual.DIVIDED, counterfactual.without_monoliths(pool))
        head = _monolith_wins(questions.value, other)
    else:
        head = monolith_loses(questions.value, single)
    loads = [load for factor in _LOAD_FACTORS if (load := _monolith_cost_at(questions, factor))]
    return " ".join([head, _other_loads_sentence(loads, questions.settings.gap)]).strip()


def _monolith_cost_at(questions: _Questions, factor: float) -> MonolithCost | None:
    """Return the costs at a multiple of the planned rates, or None if no solver work is left."""
    pool, name = questions.decision.pool, f"load × {factor:g}"
    single = questions.solve(f"monolith at {name}", scale_load(counterfactual.only_monoliths(pool), factor))
    best = questions.solve(name, scale_load(pool, factor)) if single else None
    return MonolithCost(factor, single.value, best.value) if single and best else None


def _notes(decision: PlanDecision, questions: _Questions) -> Iterator[str]:
    for miss in decision.misses:
        over = formatting.format_percent(miss.excess_ratio - 1)
        bound = formatting.format_time_or_slowdown(miss.bound, slowdown=miss.slowdown)
        quantity = f"{formatting.format_percentile(miss.percentile)} {miss.quantity.upper()}"
        what = f"{miss.demand} misses its {quantity} of {bound} by {over}"
        yield f"{what} in the simulation of the whole plan."
    if decision.solution.timed_out:
        yield "The solver's time limit ended the search. Another run may find a different plan."
    guessed = [g for g in decision.plan.groups if formatting.profile_origin(g.profile) == "ESTIMATE"]
    if guessed:
        services = ", ".join(sorted({g.service for g in guessed}))
        yield (
            f"Times of {services} are estimates from the GPU table. Measure them with "
            "`cornplug profile` before you buy."
        )
    if any(g.engine == "sglang" and "P" in g.tasks for g in guessed):
        yield (
            "Estimates are fitted to vLLM. In published measurements, SGLang took 1.5 to 7 times as long for "
            "the first token."
        )
    spot = [n.name for n in decision.plan.nodes if n.spot]
    if spot:
        most = formatting.format_percent(decision.pool.limits.spot_share)
        yield (
            f"{', '.join(spot)} are spot machines, which may all be reclaimed at once. They serve at most "
            f"{most} of each online request class. Other requests wait if the machines are reclaimed."
        )
    if questions.timed_out:
        yield f"The solver's time limit ended {_names(questions.timed_out)}. Another run may differ."
    if questions.skipped:
        yield f"The solver work did not suffice for {_names(questions.skipped)}. Increase --explain."
    for reason, n in decision.problem.dropped.most_common(3):
        yield f"Excluded {formatting.format_count(n, 'configuration')}: {reason}."


def _names(questions: Iterable[str]) -> str:
    """Return the first few of the questions' names as text, with the number of further names."""
    names = list(dict.fromkeys(questions))
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return f"{', '.join(names[:_MAX_NAMED])}{more}"


@dataclass(frozen=True)
class MonolithCost:
    """Dollars per hour at `factor` times the planned rates. A cost is None if there is no plan."""

    factor: float
    monolith: float | None
    """Cost with monoliths only."""
    best: float | None
    """Cost with any structures."""


def scale_load(pool: OptimizationProblem, factor: float) -> OptimizationProblem:
    """Return the pool with all rates multiplied by `factor`, and with more stock for a larger load, so that
    the stock does not decide the comparison."""
    demands = tuple(replace(d, rate=d.rate * factor) for d in pool.demands)
    nodes = tuple(replace(n, stock=ceil(n.stock * max(factor, 1.0))) for n in pool.nodes)
    return replace(pool, demands=demands, nodes=nodes, current=None)


def _monolith_wins(cost: float, divided: CounterfactualResult | None) -> str:
    """Return the sentence for a plan with monoliths only, whose cost is `cost`."""
    if divided is None:
        return "The monolith wins here."
    if divided.value is None:
        return "The monolith wins here: no other structure meets the SLOs with this pool."
    return f"The monolith wins here: dividing requests costs {_compare_costs(divided.value, cost)}."


def monolith_loses(cost: float, single: CounterfactualResult) -> str:
    """Return the sentence for a plan that divides some requests among engines, whose cost is `cost`."""
    if single.value is None:
        reason = f" ({single.reason})" if single.reason else ""
        return f"The monolith loses here: no plan of monoliths only meets the SLOs with this pool{reason}."
    if single.value <= cost + 1e-6:
        return "Using the monolith everywhere costs the same here."
    return f"The monolith loses here: using it everywhere costs {_compare_costs(single.value, cost)}."


def _other_loads_sentence(loads: Sequence[MonolithCost], gap: float) -> str:
    """Return a sentence about the loads at which monoliths are as cheap as the best plan, apart from the
    solver's gap."""
    known = sorted((x for x in loads if x.best is not None), key=lambda x: x.factor)
    if not known:
        return ""
    wins = [x.factor for x in known if _is_as_cheap(x, gap)]
    loses = [x.factor for x in known if not _is_as_cheap(x, gap)]
    said = [f"it is the cheapest at {_format_factors(wins)} this load"] if wins else []
    said += [f"it is not at {_format_factors(loses)} this load"] if loses else []
    text = ", ".join(said)
    return f"{text[0].upper()}{text[1:]}."


def _is_as_cheap(load: MonolithCost, gap: float) -> bool:
    assert load.best is not None
    return load.monolith is not None and load.monolith <= load.best * (1 + gap) + 1e-6


def _format_factors(factors: Sequence[float]) -> str:
    *first, last = [f"{f:g}" for f in factors]
    return f"{', '.join(first)} and {last} times" if first else f"{last} times"


def _compare_costs(cost: float, base_cost: float) -> str:
    if cost <= base_cost + 1e-6 or not base_cost:
        return f"{formatting.format_dollars(cost)}, the same"
    return f"{formatting.format_dollars(cost)}, {formatting.format_percent(cost / base_cost - 1)} more"
