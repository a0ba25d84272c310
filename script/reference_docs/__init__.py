"""The reference pages of docs/, generated from the code and from results of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from reference_docs import (
    command_line,
    configuration,
    front_page,
    http_api,
    metrics,
    plan_input,
    sglang_kinds,
    support_matrix,
    troubleshooting,
    validated_families,
)

TREE: Final = Path(__file__).parents[2]

PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "index.md": front_page.page,
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "http-api.md": http_api.page,
    "command-line.md": command_line.page,
    "plan-input.md": plan_input.page,
    "sglang-kinds.md": sglang_kinds.page,
    "support-matrix.md": support_matrix.page,
    "troubleshooting.md": troubleshooting.page,
    "../cornplug/checkpoints/validated_families.py": validated_families.page,
}
"""File of docs/, or a module of data, by its path from there -> its text."""
