"""docs/measured.md, from the results in benchmarks/results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from .markdown import notice, table

RESULTS: Final = Path(__file__).parents[2] / "benchmarks" / "results"


class Case(NamedTuple):
    """A row of the page."""

    text: str
    result: str
    """Name of the benchmark."""
    row: str
    """Name of the row of its result."""


SECTIONS: Final[Mapping[str, Sequence[Case]]] = {
    "Reuse": (
        Case("second app, same image: TTFT", "second_app", "TTFT, new question"),
        Case(
            "fresh vLLM, 1,500-token prefix with an image: TTFT", "fresh_engine", "TTFT, prefix with an image"
        ),
        Case("fresh vLLM, 1,500-token text prefix: TTFT", "fresh_engine", "TTFT, prefix of text"),
        Case(
            "vLLM's prefix in SGLang, with an image: TTFT",
            "cross_engine",
            "vLLM to SGLang: prefix with an image",
        ),
        Case("vLLM's prefix in SGLang, text: TTFT", "cross_engine", "vLLM to SGLang: prefix of text"),
        Case(
            "SGLang's prefix in vLLM, with an image: TTFT",
            "cross_engine",
            "SGLang to vLLM: prefix with an image",
        ),
        Case("SGLang's prefix in vLLM, text: TTFT", "cross_engine", "SGLang to vLLM: prefix of text"),
    ),
}
FACTS: Final[Mapping[str, Mapping[str, str]]] = {}
"""Title of a section -> name of the benchmark -> beginning of the facts that the page quotes."""

_PAGE: Final = """# Measured

This page shows what cornplug saves and costs compared with stock engines.

{notice}

Everything ran on {machines} without a GPU, with small models and random weights, between {first} and {last}.
Tokens were identical in all runs that compare them. Each ratio is cornplug's value divided by stock's, with
its 95 % interval. For times (TTFT is the time to first token) and CPU, below 1 is better. For throughput,
above 1 is better. The linked results have commits, versions and absolute values. `script/bench NAME` repeats
a benchmark.

{sections}"""


def results() -> Mapping[str, Mapping[str, Any]]:
    """The results that the page quotes, by the name of their benchmark."""
    names = {case.result for cases in SECTIONS.values() for case in cases}
    return {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in sorted(names)}


def page() -> str:
    """The text of docs/measured.md."""
    found = results()
    machines = [result["machine"] for result in found.values()]
    dates = sorted(machine["date"].split()[0] for machine in machines)
    kinds = sorted({f"{machine['cores']} cores of an {machine['cpu']}" for machine in machines})
    return _PAGE.format(
        notice=notice("`benchmarks/results`"),
        machines=" or ".join(kinds),
        first=dates[0],
        last=dates[-1],
        sections="\n".join(_section(title, cases, found) for title, cases in SECTIONS.items()),
    )


def _section(title: str, cases: Sequence[Case], found: Mapping[str, Mapping[str, Any]]) -> str:
    rows, linked = [], set[str]()
    for case in cases:
        link = "" if case.result in linked else f" ([{case.result}](../benchmarks/results/{case.result}.md))"
        linked.add(case.result)
        (row,) = (one for one in found[case.result]["rows"] if one["name"] == case.row)
        rows.append((case.text + link, _ratio(row)))
    return f"## {title}\n\n{table(('case', 'ratio'), rows)}\n"


def _ratio(row: Mapping[str, Any]) -> str:
    low, high = row["ratio_95"]
    digits = 3 if high < 0.1 or low > 0.9 else 2
    return f"{row['ratio']:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
