"""One input has one plan, whatever the machine, its load and the seed of Python's hashes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

WORK = 2.0
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


def test_plan_with_other_limits_threads_or_hash_seed_is_same() -> None:
    first = planned(1, work=WORK, time_limit_s=300)
    assert len(first["groups"]) > 3
    assert planned(2, work=WORK, time_limit_s=600) == first
    assert planned(3, work=WORK, time_limit_s=300, threads=2) == first
