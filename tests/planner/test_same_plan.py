"""One input has one plan, whatever the machine, its load and the seed of Python's hashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cornplug.planner.inputs import toml_reader
from cornplug.planner.optimizer import solvers
from cornplug.planner.pipeline.decide import decide
from cornplug.planner.plan import PlanExplanation
from cornplug.planner.report import explanation

from .sample_input import given

WORK = 0.1
"""Ends the search before the plan is proved, and long before the time limit of a busy machine."""
EXAMPLE = Path(__file__).parents[2] / "examples" / "plan_and_launch" / "plan.toml"
_PLAN = """
import json, sys
from pathlib import Path
from cornplug.planner.inputs import toml_reader
from cornplug.planner.pipeline.decide import decide

plan_input = toml_reader.read(Path(sys.argv[1]))
rules = plan_input.rules.model_copy(update={"simulate": False})
solver = plan_input.solver.model_copy(update=json.loads(sys.argv[2]))
decision = decide(plan_input.model_copy(update={"rules": rules, "solver": solver}), digest="")
assert not decision.solution.timed_out
print(decision.plan.model_dump_json(exclude={"proof": {"seconds", "first_s"}}))
"""


def planned(hash_seed: int, **solver: Any) -> dict[str, Any]:
    """The plan of the four services in a process of its own, without its wall-clock figures."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", _PLAN, str(EXAMPLE), json.dumps(solver)]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(json.loads(found.stdout))


@pytest.mark.more
def test_plan_with_other_limits_or_hash_seed_is_same() -> None:
    first = planned(1, work=WORK, time_limit_s=1e5)
    assert len(first["groups"]) > 3
    assert planned(2, work=WORK, time_limit_s=1e6) == first
    two = planned(3, work=WORK, time_limit_s=1e5, threads=2)
    assert planned(4, work=WORK, time_limit_s=1e6, threads=2) == two


def test_plan_and_its_reasons_on_a_slow_machine_are_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All clocks of the planner run a thousand times too fast, as they do for a starved process."""
    plan_input = given(rate=14, solver={"time_limit_s": 1e6})

    def explained() -> tuple[dict[str, Any], PlanExplanation]:
        decision = decide(plan_input, digest="")
        plan = decision.plan.model_dump(exclude={"proof": {"seconds", "first_s"}})
        return plan, explanation.explain(plan_input, decision)

    first = explained()
    assert len(first[1].alternatives) > 1
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() * 1000)
    assert explained() == first


def test_plan_of_spare_nodes_has_no_other_limit_in_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits, made = list[float](), solvers._WarmStartHighs.__init__

    def noted(self: solvers._WarmStartHighs, *, start: bool, **settings: Any) -> None:
        limits.append(settings["timeLimit"])
        made(self, start=start, **settings)

    monkeypatch.setattr(solvers._WarmStartHighs, "__init__", noted)
    plan_input = toml_reader.read(Path(__file__).parent / "cases" / "b01_node_loss.toml")
    solver = plan_input.solver.model_copy(update={"time_limit_s": 1e6})
    plan_input = plan_input.model_copy(update={"solver": solver})
    explanation.explain(plan_input, decide(plan_input, digest=""))
    assert len(limits) > 5
    assert min(limits) > 0.01e6
