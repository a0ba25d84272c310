"""Explanation of a plan: the constraints that determine its cost, its alternatives, and the price of its
SLOs.

Each question needs a separate solve. All solves together have a limit of solver work, and the notes list the
questions that were skipped because of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

from cornplug.planner.inputs.schema import Engine, PlanInput, SolverOptions
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem
from cornplug.planner.pipeline.decide import PlanDecision
from cornplug.planner.pipeline.formulate import formulate
from cornplug.planner.plan import BindingConstraint, PlanAlternative, PlanExplanation
from cornplug.planner.report import alternatives, binding_constraints, formatting, monolith, slo_cost_curve
from cornplug.planner.report.counterfactual import (
    CounterfactualAnswer,
    CounterfactualQuestion,
    ExplanationBudget,
    ask,
)

WORK: Final = 15.0
"""Default solver work for all questions together, in the unit of `SolverOptions.work`."""
_GAP: Final = 0.01
_NAMED: Final = 3
"""Maximum number of questions that a note lists by name."""

Report = Callable[[str, float], None]


@dataclass
class _Asked:
    """Decision with its input, the remaining solver work, and the answers so far."""

    plan_input: PlanInput
    decision: PlanDecision
    budget: ExplanationBudget
    settings: SolverOptions
    skipped: list[str] = field(default_factory=list)
    timed_out: list[str] = field(default_factory=list)
    """Names of the questions whose search the time limit ended."""
    answers: dict[str, CounterfactualAnswer] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Value of the plan, in the unit of its objective."""
        plan = self.decision.plan
        return plan.cost_per_hour if self.costs else self.decision.solution.objective

    @property
    def costs(self) -> bool:
        return self.decision.pool.objective == "cost"

    @property
    def noise(self) -> float:
        """Largest difference from `value` that the solver's gap alone can cause."""
        return max(self.settings.gap, self.decision.solution.gap) * abs(self.value) + 1e-6

    def ask(
        self, name: str, pool: OptimizationProblem, *, better: bool = False
    ) -> CounterfactualAnswer | None:
        """Solve this pool, and return the answer, or None if no work is left. A second call with the same
        `name` returns the first answer.

        With `better`, only plans that are better than the decision's plan by more than the noise are
        considered.
        """
        if name in self.answers:
            return self.answers[name]
        if self.budget.left <= 0:
            self.skipped.append(name)
            return None
        gain = -self.noise if self.costs else self.noise
        at_least = self.value + gain if better else None
        answer = self.answers[name] = ask(pool, self.settings, self.budget, at_least=at_least)
        if answer.timed_out:
            self.timed_out.append(name)
        return answer

    def gained(self, answer: CounterfactualAnswer) -> float | None:
        """Return by how much the answer's value is better than the plan's, or None if the answer has no
        plan."""
        if answer.value is None:
            return None
        return (self.value - answer.value) if self.costs else (answer.value - self.value)


def explain(
    plan_input: PlanInput,
    decision: PlanDecision,
    *,
    work: float = WORK,
    progress: Report | None = None,
) -> PlanExplanation:
    """Return the explanation of a plan. Questions about the pool may use half of the solver work, and the
    price of the SLOs the rest."""
    report = progress or (lambda _phase, _share: None)
    solver = plan_input.solver
    settings = solver.model_copy(update={"gap": max(solver.gap, _GAP)})
    asked = _Asked(plan_input, decision, ExplanationBudget(work / 2), settings)
    report("reasons", 0.0)
    sentence = _monolith(asked)
    report("reasons", 0.2)
    others = _alternatives(asked)
    report("reasons", 0.35)
    binding = _bindings(asked)
    report("reasons", 0.5)
    sweep = slo_cost_curve.SloSweep(
        plan_input,
        ExplanationBudget(work / 2 + asked.budget.left),
        skipped=asked.skipped,
        timed_out=asked.timed_out,
    )
    curve = slo_cost_curve.curve(sweep, asked.value) if _bounds_matter(asked) else []
    report("reasons", 0.8)
    if curve:
        binding = _dearest_first([*binding, *slo_cost_curve.slo_prices(sweep, asked.value, asked.noise)])
    report("reasons", 1.0)
    notes = [*decision.plan.explanation.notes, *_notes(decision, asked)]
    return PlanExplanation(
        binding=binding,
        alternatives=others,
        monolith=sentence,
        curve=curve,
        notes=notes,
    )


def _alternatives(asked: _Asked) -> list[PlanAlternative]:
    found = []
    in_pool = alternatives.questions(asked.decision.pool, asked.decision.solution)
    for question in chain(in_pool, _engines(asked)):
        answer = asked.ask(question.name, question.pool)
        if answer is not None:
            cost = answer.value if asked.costs else None
            reason_against = _against(asked, answer)
            found.append(
                PlanAlternative(
                    name=question.name, text=question.text, cost_per_hour=cost, reason_against=reason_against
                )
            )
    return sorted(found, key=lambda a: (a.cost_per_hour is None, a.cost_per_hour or 0.0))


def _engines(asked: _Asked) -> Iterator[CounterfactualQuestion]:
    used = {g.engine for g in asked.decision.plan.groups}
    engines: tuple[Engine, ...] = ("sglang", "vllm")
    for engine in engines if asked.budget.left > 0 else ():
        others = alternatives.without_engine(asked.decision.problem.components, engine)
        if engine in used and others:
            pool = formulate(asked.plan_input.model_copy(update={"components": others})).pool
            yield CounterfactualQuestion(
                f"without {engine}", f"no replica of {engine} (closed-form estimates only)", pool
            )


def _against(asked: _Asked, answer: CounterfactualAnswer) -> str:
    gained = asked.gained(answer)
    if gained is None:
        if answer.reason:
            return answer.reason
        return "no plan meets the SLOs" if answer.proven else "no plan was found within the solver work"
    lost = -gained
    if lost <= asked.noise:
        return "equally good within the solver's gap"
    share = formatting.percent(lost / abs(asked.value)) if asked.value else ""
    about = "" if answer.proven else "at most "
    if asked.costs:
        return f"costs {about}{formatting.dollars(lost)} more (+{share})"
    return f"serves {about}{lost:.3g} less (-{share})"


def _bindings(asked: _Asked) -> list[BindingConstraint]:
    found = []
    for relaxed in binding_constraints.questions(asked.decision.pool, asked.decision.solution):
        answer = asked.ask(relaxed.question.name, relaxed.question.pool, better=True)
        gained = None if answer is None else asked.gained(answer)
        unasked = answer is None and not relaxed.price and abs(relaxed.slack) < 1e-6
        if gained is not None or unasked:
            found.append(
                BindingConstraint(
                    constraint=relaxed.question.name,
                    text=relaxed.question.text,
                    slack=relaxed.slack,
                    saves_per_hour=gained if asked.costs else None,
                )
            )
    return _dearest_first(found)


def _dearest_first(found: list[BindingConstraint]) -> list[BindingConstraint]:
    return sorted(found, key=lambda b: -(b.saves_per_hour or 0.0))


def _bounds_matter(asked: _Asked) -> bool:
    """Return whether bounds affect the cost. If only throughputs are known, all bounds cost the same."""
    timed = any(spec.timed for spec in asked.decision.problem.cells.values())
    bounded = slo_cost_curve.bounded(asked.plan_input.applications)
    return asked.costs and asked.plan_input.change is None and timed and bounded


def _monolith(asked: _Asked) -> str:
    pool = asked.decision.pool
    if not asked.costs:
        return ""
    used = alternatives.structures(pool, asked.decision.solution)
    whole = all(alternatives.is_monolith(s) for s in used)
    single = asked.ask(alternatives.MONOLITHS, alternatives.monoliths(pool))
    if single is None:
        return ""
    if alternatives.divided(pool).variants == pool.variants and whole:
        return "The input allows only monoliths."
    if whole:
        other = asked.ask(alternatives.DIVIDED, alternatives.divided(pool))
        head = monolith.it_wins(asked.value, other)
    else:
        head = monolith.it_loses(asked.value, single)
    loads = [load for factor in monolith.LOADS if (load := _at_load(asked, factor))]
    return " ".join([head, monolith.at_other_loads(loads, asked.settings.gap)]).strip()


def _at_load(asked: _Asked, factor: float) -> monolith.MonolithCost | None:
    """Return the costs at a multiple of the planned rates, or None if no solver work is left."""
    pool, name = asked.decision.pool, f"load × {factor:g}"
    single = asked.ask(f"monolith at {name}", monolith.at(alternatives.monoliths(pool), factor))
    best = asked.ask(name, monolith.at(pool, factor)) if single else None
    return monolith.MonolithCost(factor, single.value, best.value) if single and best else None


def _notes(decision: PlanDecision, asked: _Asked) -> Iterator[str]:
    for miss in decision.misses:
        over = formatting.percent(miss.times - 1)
        bound = formatting.measured(miss.bound, slowdown=miss.slowdown)
        quantity = f"{formatting.percentile(miss.percentile)} {miss.what.upper()}"
        what = f"{miss.of} misses its {quantity} of {bound} by {over}"
        yield f"{what} in the simulation of the whole plan."
    if decision.solution.timed_out:
        yield "The solver's time limit ended the search. Another run may find a different plan."
    guessed = [g for g in decision.plan.groups if formatting.mark(g.profile) == "ESTIMATE"]
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
        most = formatting.percent(decision.pool.limits.spot_share)
        yield (
            f"{', '.join(spot)} are spot machines, which may all be taken back at once. They serve at most "
            f"{most} of each online request class. Other requests wait if the machines are taken back."
        )
    if asked.timed_out:
        yield f"The solver's time limit ended {_names(asked.timed_out)}. Another run may differ."
    if asked.skipped:
        yield f"The solver work did not suffice for {_names(asked.skipped)}. Increase --explain."
    for reason, n in decision.problem.dropped.most_common(3):
        yield f"Excluded {formatting.count(n, 'configuration')}: {reason}."


def _names(questions: Iterable[str]) -> str:
    """Return the first few of the questions' names as text, with the number of further names."""
    names = list(dict.fromkeys(questions))
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"
