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
from dataclasses import dataclass, field
from typing import Final

from devkit.test_runs.outcomes import Outcomes, run_pytest

MAX_SECOND_TRIES: Final = 2


@dataclass
class FinishedRun:
    """A pytest process that ended, and how to repeat one of its tests."""

    outcomes: Outcomes
    run_alone: Callable[[str], Outcomes]
    """Runs the test with this node id in a process of its own."""
    title: str = ""
    """Precedes the node ids in the summary."""
    recovered: list[str] = field(default_factory=list)
    """Node ids of the tests that passed on the second try."""

    def can_repeat(self) -> bool:
        """Whether every test has an outcome and some failed."""
        return self.outcomes.status == 1 and self.outcomes.complete

    def labelled(self, nodeids: Sequence[str]) -> list[str]:
        """Lines of the summary."""
        return [f"  {self.title} {nodeid}" if self.title else f"  {nodeid}" for nodeid in nodeids]


def apply_second_tries(runs: Sequence[FinishedRun]) -> None:
    """Repeat the failed tests of these runs and write their new outcomes into the runs."""
    if sum(len(run.outcomes.failed()) for run in runs) > MAX_SECOND_TRIES:
        return
    if any(run.outcomes.interrupted for run in runs):
        return
    for run in runs:
        for nodeid in run.outcomes.failed() if run.can_repeat() else ():
            print(f"\n=== second try: {nodeid}", flush=True)
            again = run.run_alone(nodeid)
            if again.interrupted:
                return
            if again.status == 0 and again.tests.get(nodeid) == "passed":
                run.outcomes.tests[nodeid] = "passed"
                run.recovered.append(nodeid)
        if run.recovered and not run.outcomes.failed():
            run.outcomes.status = 0


def summary(runs: Sequence[FinishedRun]) -> str:
    """The last lines of the output: second tries, failures, and the counts."""
    recovered = [line for run in runs for line in run.labelled(run.recovered)]
    failed = [line for run in runs for line in run.labelled(run.outcomes.failed())]
    lines = []
    if recovered:
        lines += ["passed on the second try:", *recovered, ""]
    if failed:
        lines += ["failed:", *failed, ""]
    if len(failed) > MAX_SECOND_TRIES:
        lines += [f"No second try: more than {MAX_SECOND_TRIES} tests failed.", ""]
    for run in runs:
        if not run.outcomes.complete:
            place = f"{run.title}: " if run.title else ""
            lines += [f"{place}pytest ended with status {run.outcomes.status} before all tests had run.", ""]
    counts = [
        f"{sum(run.outcomes.count(outcome) for run in runs)} {outcome}"
        for outcome in ("passed", "failed", "skipped")
    ]
    return "\n".join(["", *lines, ", ".join(counts)])


def main(arguments: Sequence[str]) -> int:
    """Run pytest with these arguments; return the exit status."""
    run = FinishedRun(run_pytest(arguments), lambda nodeid: run_pytest(arguments, only=nodeid))
    apply_second_tries([run])
    print(summary([run]), flush=True)
    return run.outcomes.status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
