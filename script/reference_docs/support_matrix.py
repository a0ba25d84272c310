"""docs/support-matrix.md, from the results of tests in docs/support-matrix.json."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from .markdown import table

TREE: Final = Path(__file__).parents[2]
RESULTS: Final = TREE / "docs" / "support-matrix.json"
LABELS: Final[Mapping[str, str]] = {"vllm": "vLLM", "sglang": "SGLang"}
OLD_AFTER: Final = 100
"""A result is old after this many commits to `COVERED`."""
COVERED: Final = ("cornplug", ":!cornplug/apps", ":!cornplug/planner", ":!cornplug/replay")
"""The code that runs in or beside an engine, as git pathspecs."""
_INTRO: Final = f"""# Support matrix

This page lists the engine releases and dtypes in which each feature was tested with a real engine.

*Generated: `script/test-more` records test results in `docs/support-matrix.json`, and `script/docs` writes
this page from that file.*

| cell | meaning |
|---|---|
| a dtype, with [beds](#beds) | The tests passed in this dtype, in these vLLM configurations. |
| - | No test ran. |
| **fails** | A test failed. |
| (old) | A test last ran more than {OLD_AFTER} commits ago. Only commits to engine-related code count. |

An engine shares the media of a family only in the releases and dtypes of the first three tables. Otherwise it
encodes the media itself and logs the reason.
"""
_BEDS: Final = """## Beds

A bed is a configuration of vLLM without a GPU:

| bed | model runner | KV layout | processes | scheduling |
|---|---|---|---|---|
| v1 | V1 | CPU's | several | synchronous |
| v1-one | V1 | CPU's | one | synchronous |
| v2 | V2 | CPU's | several | synchronous |
| v2-gpu | V2 | Triton attention's, as on a GPU | one | asynchronous |
"""


class Column(NamedTuple):
    """A release of an engine."""

    engine: str
    release: str

    def place(self) -> tuple[bool, list[int]]:
        """The order of columns: vLLM, then its releases."""
        return self.engine != "vllm", [int(part) for part in self.release.split(".") if part.isdigit()]

    def title(self) -> str:
        return f"{LABELS[self.engine]} {self.release}"


class Outcome(NamedTuple):
    """Results of one promise in one release and dtype, on one bed."""

    passed: bool = True
    old: bool = False

    def mark(self) -> str:
        return ("" if self.passed else " **fails**") + (" (old)" if self.old else "")


Cell = dict[str, dict[str, Outcome]]
"""Dtype -> bed -> outcome."""


def page(file: Path = RESULTS) -> str:
    """The page's text."""
    results = json.loads(file.read_text())
    columns = sorted({_column(result) for result in results}, key=Column.place)
    sections: dict[str, dict[str, dict[Column, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        cell = sections[result["section"]][result["promise"]].setdefault(_column(result), {})
        beds = cell.setdefault(result["dtype"], {})
        before = beds.get(result["bed"], Outcome())
        old = before.old or result.get("old", False)
        beds[result["bed"]] = Outcome(before.passed and result["passed"], old)
    parts = [_INTRO]
    for section in sorted(sections, key=lambda name: (not name.startswith("Families"), name)):
        rows = [
            [promise, *(_text(cells.get(column, {})) for column in columns)]
            for promise, cells in sections[section].items()
        ]
        parts.append(f"## {section}\n\n{table(['', *(column.title() for column in columns)], rows)}\n")
    return "\n".join([*parts, _BEDS])


def _column(result: Mapping[str, Any]) -> Column:
    return Column(result["engine"], result["release"])


def _text(cell: Cell) -> str:
    """A cell as the page shows it: "float32: v1, v2 (old); bfloat16: v1", or "float32" without beds."""
    parts = []
    for dtype in sorted(cell, reverse=True):
        beds = ", ".join(f"{bed}{outcome.mark()}" for bed, outcome in sorted(cell[dtype].items()))
        parts.append(dtype + (beds if "" in cell[dtype] else f": {beds}"))
    return "; ".join(parts) or "-"


def mark_old(file: Path = RESULTS, tree: Path = TREE) -> None:
    """Write into each result whether it is old.

    A result keeps its mark if git cannot count: outside a checkout, or if a shallow clone lacks the commit.
    """

    @cache
    def commits_since(commit: str) -> int | None:
        command = ["git", "rev-list", "--count", f"{commit}..HEAD", "--", *COVERED]
        try:
            done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None  # no git on this machine
        return int(done.stdout) if done.returncode == 0 else None

    results = json.loads(file.read_text())
    for result in results:
        count = commits_since(result["commit"]) if result.get("commit") else OLD_AFTER + 1
        if count is not None:
            result["old"] = count > OLD_AFTER
    file.write_text("[\n" + ",\n".join(map(json.dumps, results)) + "\n]\n")
