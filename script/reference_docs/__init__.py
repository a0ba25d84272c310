"""The reference pages of docs/, generated from the code and from results of tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

from reference_docs import (
    boards,
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
    "../README.md": front_page.readme,
    "configuration.md": configuration.page,
    "metrics.md": metrics.page,
    "http-api.md": http_api.page,
    "command-line.md": command_line.page,
    "plan-input.md": plan_input.page,
    "sglang-kinds.md": sglang_kinds.page,
    "support-matrix.md": support_matrix.page,
    "troubleshooting.md": troubleshooting.page,
    "../cornplug/checkpoints/tested_releases.py": validated_families.page,
    **{f"../deploy/grafana/{name}": partial(boards.board, name) for name in boards.BOARDS},
}
"""File of docs/, a module of data, or a board, by its path from docs/ -> its text."""
