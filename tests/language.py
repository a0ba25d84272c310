"""Counts four habits of speech that hide the noun from the reader, in documents and in docstrings.

`python tests/language.py` prints the sentences of both and the rates.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

TREE: Final = Path(__file__).parents[1]
GENERATED: Final = frozenset(
    {"index.md", "configuration.md", "metrics.md", "http-api.md", "command-line.md", "troubleshooting.md"}
)

HABITS: Final[Mapping[str, re.Pattern[str]]] = {
    "headless": re.compile(r"\bwhat(?:ever)?\b(?!\s+(?:kind|sort|if)\b)", re.IGNORECASE),
    "nobody": re.compile(r"\b(?:no|any|some|every)body\b", re.IGNORECASE),
    "of_ours": re.compile(r"\bof (?:ours|theirs|yours|mine|(?:its|their|our|his|your) own)\b", re.IGNORECASE),
    "who": re.compile(
        r"(?:^|[.;:,(] |\b(?:to|by|of|for|from|with|and|or|as|than|but|that|is|unless|where) )"
        r"(?:who|whoever|whom|whose)\b",
        re.IGNORECASE | re.MULTILINE,
    ),
}
"""A clause in place of a noun; an actor without a name; a possessive without a noun; "who" as a noun."""


def documents() -> dict[str, str]:
    """File -> its prose. Generated pages are left out: their words would dilute the count."""
    files = [TREE / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    files += [f for f in sorted((TREE / "docs").glob("*.md")) if f.name not in GENERATED]
    return {str(f.relative_to(TREE)): prose(f.read_text()) for f in files}


def prose(text: str) -> str:
    """Markdown without code, headings, addresses of links and table rules."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^#.*$|^[| :-]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "`x`", text).replace("|", "\n"))


def docstrings(root: Path) -> dict[str, str]:
    """Package -> all its docstrings, those under fields and constants included."""
    found: dict[str, list[str]] = {}
    for file in sorted(root.rglob("*.py")):
        package = file.relative_to(root).parts[0].removesuffix(".py")
        if file.parent == root:
            package = "root"
        for node in ast.walk(ast.parse(file.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                found.setdefault(package, []).append(re.sub(r"`[^`]*`", "`x`", node.value.value))
    return {package: "\n\n".join(texts) for package, texts in found.items()}


def sentences(text: str, habit: str) -> Iterator[str]:
    """The lines that have a habit, but for questions."""
    for sentence in re.split(r"(?<=[.!?])\s+|\n\n", text):
        if not sentence.rstrip().endswith("?"):
            for _ in HABITS[habit].finditer(sentence):
                yield " ".join(sentence.split())


def rates(text: str) -> dict[str, float]:
    """Habit -> its count per 10,000 words."""
    words = len(text.split())
    return {habit: 1e4 * sum(1 for _ in sentences(text, habit)) / words for habit in HABITS}


def main() -> int:
    texts = documents() | docstrings(TREE / "cornplug")
    for name, text in texts.items():
        for habit in HABITS:
            for sentence in sentences(text, habit):
                print(f"{name}: {habit}: {sentence[:160]}")
    for name, text in {"documents": "\n".join(documents().values()), **docstrings(TREE / "cornplug")}.items():
        print(f"{name:20}", len(text.split()), {habit: round(rate) for habit, rate in rates(text).items()})
    return 0


if __name__ == "__main__":
    sys.exit(main())
