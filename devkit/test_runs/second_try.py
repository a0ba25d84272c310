"""Run tests with real engines, and run those that failed a second time, alone.

    python -m devkit.test_runs.second_try [PYTEST ARGUMENTS]

A real engine can be late on a busy machine, so a failed test is run once more in a pytest process of its own,
after all others. If it passes then, it counts as passed and is listed under "passed on the second try". At
most two tests may need a second try: if more fail, the run fails and nothing is repeated. Nothing is repeated
either if collection failed or pytest did not reach its last test.

The last line of the output has the counts: "86 passed, 0 failed, 3 skipped". The exit status is 0 if no
test failed, else pytest's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final

from devkit.test_runs.outcomes import Outcomes, run_pytest

MAX_SECOND_TRIES: Final = 2


def apply_second_tries(first: Outcomes, run_alone: Callable[[str], Outcomes]) -> list[str]:
    """Run the failed tests again and write their new outcomes into `first`. Return those that now passed.

    Args:
        first: Outcomes of the whole run. If it may not be repeated, it is left as it is.
        run_alone: Runs the test with this node id in a process of its own.
    """
    failed = first.failed()
    if first.status != 1 or not first.complete or not 0 < len(failed) <= MAX_SECOND_TRIES:
        return []
    recovered = []
    for nodeid in failed:
        print(f"\n=== second try: {nodeid}", flush=True)
        again = run_alone(nodeid)
        if again.status not in (0, 1):
            break  # interrupted
        if again.status == 0 and again.tests.get(nodeid) == "passed":
            first.tests[nodeid] = "passed"
            recovered.append(nodeid)
    if not first.failed():
        first.status = 0
    return recovered


def summary(outcomes: Outcomes, recovered: Sequence[str]) -> str:
    """The last lines of a run's output."""
    lines = []
    if recovered:
        lines += ["", "passed on the second try:", *(f"  {nodeid}" for nodeid in recovered)]
    if failed := outcomes.failed():
        lines += ["", "failed:", *(f"  {nodeid}" for nodeid in failed)]
    if len(failed) > MAX_SECOND_TRIES:
        lines += ["", f"No second try: more than {MAX_SECOND_TRIES} tests failed."]
    if not outcomes.complete:
        lines += ["", f"Incomplete: pytest ended with status {outcomes.status} before all tests had run."]
    return "\n".join([*lines, "", outcomes.line()])


def main(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments; return the exit status."""
    outcomes = run_pytest(arguments)
    recovered = apply_second_tries(outcomes, lambda nodeid: run_pytest(arguments, only=nodeid))
    print(summary(outcomes, recovered), flush=True)
    return outcomes.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
