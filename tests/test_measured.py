"""docs/measured.md quotes only results of today's code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from reference_docs import measured

TREE = Path(__file__).parents[1]
MAX_COMMITS = 200


@pytest.mark.parametrize("name", measured.results())
def test_measured_result_is_of_a_recent_commit(name: str) -> None:
    result = measured.results()[name]
    assert not result["quick"], f"run script/bench {name}"
    commit = result["machine"].get("commit")
    assert commit, f"the result has no commit: run script/bench {name}"
    behind = _git("rev-list", "--count", f"{commit}..HEAD")
    if behind is None:
        pytest.skip("not a checkout with history")
    assert int(behind) < MAX_COMMITS, f"{commit} is {behind} commits old: run script/bench {name}"


def _git(*command: str) -> str | None:
    """Output of a git command, or None if this tree has no history."""
    if not (TREE / ".git").exists() or _run("rev-parse", "--is-shallow-repository") != "false":
        return None
    return _run(*command)


def _run(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=TREE, capture_output=True, text=True, check=True)
    return done.stdout.strip()
