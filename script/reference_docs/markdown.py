"""Markdown tables, and the notice that a page is generated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def notice(source: str) -> str:
    """The line under a generated page's title."""
    return f"*Generated from {source} by `script/docs`.*"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; a cell's line breaks become spaces."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
