"""Tests as a section: their outcomes, and the figures that they record as properties."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from gpu_sections.figures import Figures

_TREE: Final = Path(__file__).parents[2]
_OUTCOMES: Final = ("failure", "error", "skipped")


def run(figures: Figures, arguments: Sequence[str]) -> Counter[str]:
    """Run pytest; add outcomes, recorded properties and failures. Returns the number of each outcome."""
    with tempfile.TemporaryDirectory(prefix="cp-bench-") as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, *arguments], cwd=_TREE, check=False)
        if not report.exists():
            raise SystemExit("pytest ended without a report")
        counts: Counter[str] = Counter()
        for case in ElementTree.parse(report).iter("testcase"):
            counts.update([_add(figures, case)])
    figures.add("tests", dict(counts))
    return counts


def _add(figures: Figures, case: Any) -> str:
    name = str(case.get("name"))
    for one in case.iter("property"):
        figures.add(f"{name}: {one.get('name')}", float(one.get("value")))
    for outcome in _OUTCOMES:
        if (found := case.find(outcome)) is not None:
            text = found.text or found.get("message") or ""
            if outcome != "skipped":
                figures.fail(name, text)
            return "failed" if outcome == "failure" else outcome
    return "passed"


def gpu_test_files() -> list[str]:
    """Files with tests marked gpu. Other files may import what is not here."""
    files = sorted((_TREE / "tests").rglob("test_*.py"))
    return [str(file.relative_to(_TREE)) for file in files if "mark.gpu" in file.read_text()]
