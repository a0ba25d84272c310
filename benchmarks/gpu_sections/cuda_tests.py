"""Tests that need a GPU."""

from __future__ import annotations

from gpu_sections import pytest_figures
from gpu_sections.figures import Figures


def measure(figures: Figures) -> None:
    """Run the tests marked gpu."""
    counts = pytest_figures.run(figures, ["-m", "gpu", "-rs", *pytest_figures.gpu_test_files()])
    if not counts["passed"] and not figures.rehearse:
        raise SystemExit("no test ran")
