"""docs/support-matrix.md, from the results of tests in docs/support-matrix.json."""

from __future__ import annotations

import json
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
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

*Generated: `script/test-more` keeps the results of tests with real engines, their commits and dates in
`docs/support-matrix.json`, and `script/docs` writes this page from them.*

"yes": the tests of this promise passed on this engine; "**no**": one failed; "-": none ran there. "(old)":
one of these tests last ran more than {OLD_AFTER} commits ago. Only commits to `cornplug/` count, without its
folders `apps`, `planner` and `replay`. A bed is a way to run vLLM without a GPU:

| bed | model runner | KV layout | processes | scheduling |
|---|---|---|---|---|
| v1 | V1 | CPU's | several | synchronous |
| v1-one | V1 | CPU's | one | synchronous |
| v2 | V2 | CPU's | several | synchronous |
| v2-gpu | V2 | Triton attention's, as on a GPU | one | asynchronous |
"""


class Column(NamedTuple):
    """An engine as tests ran it."""

    engine: str
    release: str
    bed: str

    def place(self) -> tuple[bool, list[int], str]:
        """The order of columns: vLLM, then its releases, then beds."""
        numbers = [int(part) for part in self.release.split(".") if part.isdigit()]
        return self.engine != "vllm", numbers, self.bed

    def title(self) -> str:
        return " ".join(filter(None, [LABELS[self.engine], self.release, self.bed]))


class Cell(NamedTuple):
    """Results of one promise in one column."""

    passed: bool = True
    old: bool = False

    def text(self) -> str:
        return ("yes" if self.passed else "**no**") + (" (old)" if self.old else "")


def page(file: Path = RESULTS) -> str:
    """The page's text."""
    results = json.loads(file.read_text())
    columns = sorted({_column(result) for result in results}, key=Column.place)
    sections: dict[str, dict[str, dict[Column, Cell]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        cells, column = sections[result["section"]][result["promise"]], _column(result)
        before = cells.get(column, Cell())
        cells[column] = Cell(before.passed and result["passed"], before.old or result.get("old", False))
    parts = [_INTRO]
    for section, promises in sections.items():
        rows = [[promise, *_row(cells, columns)] for promise, cells in promises.items()]
        parts.append(f"## {section}\n\n{table(['', *(column.title() for column in columns)], rows)}\n")
    return "\n".join(parts)


def _column(result: Mapping[str, Any]) -> Column:
    return Column(result["engine"], result["release"], result["bed"])


def _row(cells: Mapping[Column, Cell], columns: Sequence[Column]) -> list[str]:
    return [cells[column].text() if column in cells else "-" for column in columns]


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
