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
COVERED: Final = ("cornplug", ":!cornplug/apps", ":!cornplug/planner", ":!cornplug/replay.py")
"""The code that runs in or beside an engine, as git pathspecs."""
_INTRO: Final = f"""# Support matrix

This page lists the engine releases and dtypes in which each feature was tested with a real engine. It is
generated from `docs/support-matrix.json`, which has the test, commit and vLLM configuration of each result.

A cell has the dtypes in which the tests passed: float32 (f32), float16 (f16) or bfloat16 (bf16). It is empty
if no test ran. † means that a test is older than {OLD_AFTER} commits to engine-related code.

An engine shares the media of a family only in the releases and dtypes of the rows **Families**.
"""
_SHORT: Final[Mapping[str, str]] = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


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
    """Results of one promise in one release and dtype."""

    passed: bool = True
    old: bool = False


Cell = dict[str, Outcome]
"""Dtype -> outcome."""


def page(file: Path = RESULTS) -> str:
    """The page's text. Promises with equal cells share a row."""
    results = json.loads(file.read_text())
    columns = sorted({_column(result) for result in results}, key=Column.place)
    sections: dict[str, dict[str, dict[Column, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        cell = sections[result["section"]][result["promise"]].setdefault(_column(result), {})
        before = cell.get(result["dtype"], Outcome())
        old = before.old or result.get("old", False)
        cell[result["dtype"]] = Outcome(before.passed and result["passed"], old)
    head = ["", *(column.title() for column in columns)]
    rows: list[list[str]] = []
    for section in sorted(sections, key=lambda name: (not name.startswith("Families"), name)):
        rows.append([f"**{section}**", *("" for _ in columns)])
        merged: dict[tuple[str, ...], list[str]] = {}
        for promise, cells in sections[section].items():
            merged.setdefault(tuple(_text(cells.get(column, {})) for column in columns), []).append(promise)
        rows += [["<br>".join(promises), *texts] for texts, promises in merged.items()]
    return f"{_INTRO}\n{table(head, rows)}\n"


def _column(result: Mapping[str, Any]) -> Column:
    return Column(result["engine"], result["release"])


def _text(cell: Cell) -> str:
    """A cell as the page shows it, such as "f32, bf16†"."""
    parts = []
    for dtype in sorted(cell, reverse=True):
        fails = "" if cell[dtype].passed else " **fails**"
        parts.append(_SHORT.get(dtype, dtype) + fails + ("†" if cell[dtype].old else ""))
    return ", ".join(parts)


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
