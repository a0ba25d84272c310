"""GB/s of KV pages to and from the store's memory, beside a pinned copy: the tests that measure the bus."""

from __future__ import annotations

from typing import Final

from gpu_sections import pytest_figures
from gpu_sections.figures import Figures

AIM: Final = 0.8
_TESTS: Final = ("tests/gpu", "-m", "gpu", "-k", "cross_at", "-s")


def measure(figures: Figures) -> None:
    """Add each copy's GB/s."""
    counts = pytest_figures.run(figures, _TESTS)
    figures.add("aim, of a plain copy", AIM)
    if not counts["passed"] and not figures.rehearse:
        raise SystemExit("no copy was measured")
