"""docs/support-matrix.md, from the results of tests in docs/support-matrix.json."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .markdown import table

RESULTS: Final = Path(__file__).parents[2] / "docs" / "support-matrix.json"
LABELS: Final[Mapping[str, str]] = {"vllm": "vLLM", "sglang": "SGLang"}
_INTRO: Final = """# Support matrix

*Written by the test run: `script/test` and `script/test-more` keep the results of tests with real engines in
`docs/support-matrix.json`, and `script/docs` makes this page of them.*

"yes": the tests of this promise passed on this engine; "**no**": one failed; "-": none ran there. A bed is a
way to run vLLM without a GPU:

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


def page(file: Path = RESULTS) -> str:
    """The page's text."""
    results = json.loads(file.read_text())
    columns = sorted({_column(result) for result in results}, key=Column.place)
    sections: dict[str, dict[str, dict[Column, bool]]] = defaultdict(lambda: defaultdict(dict))
    for result in results:
        cells, column = sections[result["section"]][result["promise"]], _column(result)
        cells[column] = cells.get(column, True) and result["passed"]
    parts = [_INTRO]
    for section, promises in sections.items():
        rows = [[promise, *_row(cells, columns)] for promise, cells in promises.items()]
        parts.append(f"## {section}\n\n{table(['', *(column.title() for column in columns)], rows)}\n")
    return "\n".join(parts)


def _column(result: Mapping[str, Any]) -> Column:
    return Column(result["engine"], result["release"], result["bed"])


def _row(cells: Mapping[Column, bool], columns: Sequence[Column]) -> list[str]:
    return ["-" if column not in cells else "yes" if cells[column] else "**no**" for column in columns]
