"""Attributes engines' metrics to request classes with the running plan's routes.

This is necessary because engines do not report metrics by class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from cornplug.errors import ConfigError
from cornplug.planner.plan import Plan, PlanRoute
from cornplug.planner.replan.observed_load import ObservedWindow

EVERYTHING: Final = ""
"""Scope of metrics from all of the plan's engines together."""


@dataclass(frozen=True)
class ClassShare:
    """Share that one request class has in the observed load of a scope."""

    window: ObservedWindow
    rate: float
    """Expected rate of the class in the scope, according to the input."""
    parts: Mapping[str, float]
    """Share of the scope's requests by class, according to the plan's routes."""
    name: str
    """Name of the class."""
    tasks: str
    """Tasks of the scope's engines, for example "P" for the prefill group of a pair. "PD" if the scope is not
    a single group."""

    @property
    def part(self) -> float:
        return self.parts[self.name]

    @property
    def exclusive(self) -> bool:
        """Whether all of the scope's requests belong to this class."""
        return self.part > 1 - 1e-9

    @property
    def answers(self) -> bool:
        """Whether the scope's engines count each request exactly once, with its complete output."""
        return "D" in self.tasks or self.tasks == "G"

    @property
    def prefills(self) -> bool:
        """Whether the scope's engines prefill, so that their cache hits are real.

        A decode engine counts transferred tokens as hits.
        """
        return "P" in self.tasks


def scopes(plan: Plan) -> dict[str, frozenset[str]]:
    """Return the request classes whose load each scope covers.

    A scope is everything, an application, a request class, or a group.
    """
    found: dict[str, frozenset[str]] = {EVERYTHING: frozenset()}
    for route in plan.routes:
        name = class_of(route)
        for scope in (EVERYTHING, route.app, name, *(g for s in route.stages for g in s.groups)):
            found[scope] = found.get(scope, frozenset()) | {name}
    return found


def class_of(route: PlanRoute) -> str:
    return f"{route.app}/{route.request}"


def check(plan: Plan, scope: str) -> None:
    """Raise ConfigError if the plan has no scope with this name, or if its engines would count requests
    twice."""
    known = scopes(plan)
    if scope not in known:
        names = ", ".join(name for name in known if name)
        raise ConfigError(f"--metrics {scope}=...", "the plan has no such group or class", f"Known: {names}.")
    if scope in _tasks(plan):
        return
    for route in plan.routes:
        stages = [s.tasks for s in route.stages]
        if class_of(route) in known[scope] and any("D" in t and "P" not in t for t in stages):
            groups = ", ".join(g for s in route.stages for g in s.groups)
            raise ConfigError(
                f"--metrics {scope or 'URL'}",
                f"{class_of(route)} prefills in one engine and decodes in another, and both count it",
                f"Set the address of each group, GROUP=URL. The groups are {groups}.",
            )


def shares(
    name: str, plan: Plan, rates: Mapping[str, float], windows: Mapping[str, ObservedWindow]
) -> Iterator[ClassShare]:
    """Yield the share of the class `name` in each scope in which it has requests.

    `rates` contains the input's rate of each class, and `windows` the observed load of each scope.
    """
    tasks = _tasks(plan)
    for scope, window in windows.items():
        expected = rates_at(plan, scope, rates)
        if expected.get(name, 0.0) > 0:
            whole = sum(expected.values())
            parts = {other: rate / whole for other, rate in expected.items()}
            yield ClassShare(window, expected[name], parts, name, tasks.get(scope, "PD"))


def planned_rates(plan: Plan, scope: str) -> dict[str, float]:
    """Return the planned requests per second of each class for a scope's engines."""
    return rates_at(plan, scope, {f"{o.app}/{o.request}": o.served for o in plan.latency_forecasts})


def does(plan: Plan, scope: str, task: str) -> bool:
    """Return whether a scope's engines do a task ("P" or "D"). A scope with several groups does all tasks."""
    return task in _tasks(plan).get(scope, task)


def sole_group(plan: Plan, scope: str, task: str) -> str | None:
    """Return the group that does a task for all of a scope's requests, or None if there is not exactly
    one."""
    if scope in _tasks(plan):
        return scope if does(plan, scope, task) else None
    inside = scopes(plan)[scope]
    stages = [stage for r in plan.routes if class_of(r) in inside for stage in r.stages]
    found = {group for stage in stages if task in stage.tasks for group in stage.groups}
    return found.pop() if len(found) == 1 else None


def _tasks(plan: Plan) -> dict[str, str]:
    return {g.name: g.tasks for g in plan.groups}


def rates_at(plan: Plan, scope: str, rates: Mapping[str, float]) -> dict[str, float]:
    """Return the requests per second of each class that a scope would receive if the classes had these
    rates."""
    planned: dict[str, float] = {}
    seen: dict[str, float] = {}
    inside, group = scopes(plan)[scope], scope in _tasks(plan)
    for route in plan.routes:
        name = class_of(route)
        planned[name] = planned.get(name, 0.0) + route.rate
        if name in inside:
            weight = max((s.groups.get(scope, 0.0) for s in route.stages), default=0.0) if group else 1.0
            seen[name] = seen.get(name, 0.0) + route.rate * weight
    return {name: rates.get(name, 0.0) * part / planned[name] for name, part in seen.items() if part}
