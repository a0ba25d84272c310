"""docs/troubleshooting.md: an introduction by hand, and the lists of docs/reasons.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from .markdown import notice

REASONS_FILE: Final = Path(__file__).parents[2] / "docs" / "reasons.toml"
_INTRO: Final = """# Troubleshooting

This page is for operators whose engines do not share what they should.

{notice}

1. Run `cornplug doctor --model MODEL`, which prints a remedy for each problem.
2. Search the engine's log for lines that begin with `cornplug:`. They name what is not shared, and why.
3. Read the counters at the engine's `/metrics`. Misses with the reason `absent` and saves with the outcome
   `stored` show that sharing works, but that requests have nothing in common. Look other reasons up below. If
   there are no hits, misses or saves, the engine does not share.
4. If two checkpoints should share, `cornplug fingerprint MODEL MODEL` shows which part differs. If two
   requests should share, check that they have the same `cache_salt`.

The lists explain the `reason` and `outcome` of [metrics](metrics.md) and of [HTTP](http-api.md) errors, or
give the remedy.
"""


def reasons() -> Mapping[str, Mapping[str, str]]:
    """Section -> reason -> its meaning and its remedy."""
    sections: dict[str, dict[str, str]] = tomllib.loads(REASONS_FILE.read_text())
    return sections


def page() -> str:
    """The text of docs/troubleshooting.md. Reasons with the same text share a line."""
    parts = [_INTRO.format(notice=notice("`docs/reasons.toml`"))]
    for title, rows in reasons().items():
        words: dict[str, list[str]] = {}
        for word, text in rows.items():
            words.setdefault(text, []).append(f"`{word}`")
        lines = [f"- {', '.join(same)}: {text}" for text, same in words.items()]
        parts.append("\n".join([f"## {title}\n", *lines, ""]))
    return "\n".join(parts)
