"""A pytest plugin that writes the outcome and duration of each test to a file, and its reader.

`DEVKIT_OUTCOMES=FILE pytest -p devkit.test_runs.outcomes ...` writes FILE. With `DEVKIT_ONLY_TEST=NODEID`
pytest also deselects every other test. Unlike a node id among the arguments, this keeps all options.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from devkit.test_runs.child_process import run_child

FILE_VARIABLE: Final = "DEVKIT_OUTCOMES"
ONLY_VARIABLE: Final = "DEVKIT_ONLY_TEST"

_SEVERITY: Final = {"skipped": 0, "passed": 1, "failed": 2}


@dataclass
class CollectedTest:
    """A test that pytest selected, with the names of its markers."""

    nodeid: str
    markers: frozenset[str]

    @property
    def file(self) -> str:
        """Path of the test's file, relative to pytest's root."""
        return self.nodeid.partition("::")[0]


@dataclass
class Outcomes:
    """Results of one pytest process."""

    status: int
    """Exit status of pytest."""
    tests: dict[str, str] = field(default_factory=dict)
    """Node id -> "passed", "failed" or "skipped"; a failed set-up or teardown is a failed test."""
    collected: list[CollectedTest] = field(default_factory=list)
    complete: bool = True
    """False if collection failed or pytest stopped before the last test."""
    interrupted: bool = False
    """True if this process received SIGINT or SIGTERM during the run."""

    def failed(self) -> list[str]:
        """Node ids of the failed tests, in the order in which they ran."""
        return [nodeid for nodeid, outcome in self.tests.items() if outcome == "failed"]

    def count(self, outcome: str) -> int:
        """Number of tests with this outcome."""
        return sum(found == outcome for found in self.tests.values())


def run_pytest(
    arguments: Sequence[str],
    *,
    python: str | Path = sys.executable,
    env: Mapping[str, str] | None = None,
    only: str | None = None,
    output: Path | None = None,
) -> Outcomes:
    """Run pytest in a process of its own and return the outcomes of its tests.

    Args:
        python: Interpreter of the environment to test.
        env: Variables to add to this process's environment.
        only: Node id of the only test to run.
        output: File for pytest's output; by default it goes to this process's output.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "outcomes"
        added = {**(env or {}), FILE_VARIABLE: str(file), **({ONLY_VARIABLE: only} if only else {})}
        command = [str(python), "-m", "pytest", "-p", __name__, *arguments]
        status, interrupted = run_child(command, env={**os.environ, **added}, output=output)
        lines = file.read_text().splitlines() if file.exists() else []
    found = read_outcomes(status, [json.loads(line) for line in lines])
    found.interrupted = interrupted
    return found


def read_outcomes(status: int, lines: Sequence[Mapping[str, Any]]) -> Outcomes:
    """Combine the lines that the plugin wrote. A file without its last line is incomplete."""
    found = Outcomes(status, complete=False)
    for line in lines:
        match line["kind"]:
            case "collected":
                found.collected.append(CollectedTest(line["nodeid"], frozenset(line["markers"])))
            case "test":
                before = found.tests.get(line["nodeid"], line["outcome"])
                found.tests[line["nodeid"]] = max(before, line["outcome"], key=_SEVERITY.__getitem__)
            case "finished":
                found.complete = line["complete"]
    return found


class _Writer:
    """Writes one JSON line per event."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._complete = True

    def _write(self, **line: object) -> None:
        with self._file.open("a") as out:
            out.write(json.dumps(line) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            markers = sorted({marker.name for marker in item.iter_markers()})
            self._write(kind="collected", nodeid=item.nodeid, markers=markers)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._complete = self._complete and not report.failed

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A set-up that passed says nothing about the test: its call may be interrupted.
        if report.when == "call" or report.outcome != "passed":
            self._write(kind="test", nodeid=report.nodeid, outcome=report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        stopped = bool(session.shouldfail or session.shouldstop)
        self._write(kind="finished", complete=self._complete and not stopped)


def pytest_configure(config: pytest.Config) -> None:
    """Start to write, except in a worker of xdist: its controller gets the same reports."""
    if (file := os.environ.get(FILE_VARIABLE)) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Writer(Path(file)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect all tests but the one that the environment names."""
    if only := os.environ.get(ONLY_VARIABLE):
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid != only])
        items[:] = [item for item in items if item.nodeid == only]
