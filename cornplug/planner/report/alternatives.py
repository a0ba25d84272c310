"""Alternatives to a plan. Each reverses one structural decision by removing options from the pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from cornplug.planner.inputs.schema import Component, Engine
from cornplug.planner.optimizer.optimization_problem import OptimizationProblem, PathVariant, PoolSolution
from cornplug.planner.report.counterfactual import CounterfactualQuestion

MONOLITH = "monolith"
MONOLITHS, DIVIDED = "monolith everywhere", "divided everywhere"
"""Names of the questions what the plan would cost with monoliths only, and without monoliths."""


def is_monolith(structure: str) -> bool:
    """Return whether a structure is a monolith. A structure with a separate generator may also be one,
    because the language model still runs in a single engine."""
    return structure.removesuffix("+G") == MONOLITH


def questions(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[CounterfactualQuestion]:
    """Yield questions what the plan would cost without one of its choices."""
    yield from _structures(pool, solution)
    yield from _gpus(pool, solution)
    yield from _caches(pool, solution)


def monoliths(pool: OptimizationProblem) -> OptimizationProblem:
    """Return the pool without structures that divide a request among engines."""
    return _variants(pool, lambda v: is_monolith(v.structure))


def divided(pool: OptimizationProblem) -> OptimizationProblem:
    """Return the pool without the monoliths of those classes that have other structures."""
    able = {v.demand for v in pool.variants if not is_monolith(v.structure)}
    return _variants(pool, lambda v: not is_monolith(v.structure) or v.demand not in able)


def structures(pool: OptimizationProblem, solution: PoolSolution) -> set[str]:
    """Return the structures that the plan uses."""
    return {v.structure for v in pool.variants if solution.served.get(v.name, 0.0) > 0}


def _structures(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[CounterfactualQuestion]:
    used = {s for s in structures(pool, solution) if not is_monolith(s)}
    if used and any(is_monolith(v.structure) for v in pool.variants):
        yield CounterfactualQuestion(MONOLITHS, "every request in one engine", monoliths(pool))
    for name in sorted(used) if len(used) > 1 else ():
        yield CounterfactualQuestion(
            f"without {name}", f"no request as {name}", _without_structure(pool, name)
        )
    if not used and divided(pool).variants != pool.variants:
        yield CounterfactualQuestion(DIVIDED, "no monolith where another structure is allowed", divided(pool))


def _gpus(pool: OptimizationProblem, solution: PoolSolution) -> Iterator[CounterfactualQuestion]:
    gpu = {n.name: n.gpu for n in pool.nodes}
    used = {gpu[name] for name, n in solution.nodes.items() if n}
    kinds = sorted(set(gpu.values()))
    for kind in kinds if len(kinds) > 1 else ():
        if kind in used:
            yield CounterfactualQuestion(
                f"without {kind}", f"no {kind}", _on(pool, [k for k in kinds if k != kind])
            )
    # With two GPU types, "only A" would equal "without B".
    for kind in kinds if len(kinds) > 2 else ():
        if used != {kind}:
            yield CounterfactualQuestion(f"only {kind}", f"all on {kind}", _on(pool, [kind]))


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


def _on(pool: OptimizationProblem, gpus: Collection[str]) -> OptimizationProblem:
    nodes = {n.name for n in pool.nodes if n.gpu in gpus}
    return replace(pool, cells=tuple(c for c in pool.cells if c.nodes in nodes))


def without_engine(components: Iterable[Component], engine: Engine) -> list[Component] | None:
    """Return the components without this engine, or None if a language model has no other engine.

    The question without an engine needs a new pool, because the present pool lacks the slower engine's cells,
    which were pruned.
    """
    others = []
    for c in components:
        engines = [e for e in c.engines if e != engine]
        if c.kind == "llm" and not engines:
            return None
        others.append(c.model_copy(update={"engines": engines or c.engines}))
    return others
