"""docs/troubleshooting.md: an introduction by hand, and the table of docs/reasons.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from .markdown import notice, table

REASONS_FILE: Final = Path(__file__).parents[2] / "docs" / "reasons.toml"
_INTRO: Final = """# Troubleshooting

This page is for operators whose engines do not share what they should.

{notice}

1. Run `cornplug doctor --model MODEL`. It checks the host, the store, the secret, the engine versions and the
   checkpoint, and prints a remedy for each problem.
2. Search the engine's log for lines that begin with `cornplug:`. They name what is not shared, and why.
3. Read the counters at the engine's `/metrics` ([list](metrics.md)):

```text
cornplug_hits_total{{app="chat",kind="embedding",source="service_cached"}} 20
cornplug_misses_total{{app="chat",kind="kv_page",reason="absent"}} 3
cornplug_saves_total{{app="chat",kind="kv_page",outcome="stored"}} 12
```

| counters | meaning |
|---|---|
| misses with `absent`, saves with `stored` | Sharing works, but no two requests have anything in common. |
| misses with another reason | Look the reason up below. |
| no hits, misses or saves | The engine does not share. Its log says why. |

4. If two checkpoints should share and do not, run `cornplug fingerprint MODEL MODEL` to see which part
   differs. If two requests should share and do not, check that they have the same `cache_salt`.

The first column is the `reason` or `outcome` label of a metric, or the `reason` in an error response of the
[HTTP API](http-api.md). "-" means that you need not do anything.
"""


class Remedy(NamedTuple):
    meaning: str
    remedy: str


def reasons() -> Mapping[str, Mapping[str, Remedy]]:
    """Section -> reason -> its meaning and its remedy."""
    sections = tomllib.loads(REASONS_FILE.read_text())
    return {title: {word: Remedy(*said) for word, said in rows.items()} for title, rows in sections.items()}


def page() -> str:
    """The text of docs/troubleshooting.md. Reasons with the same meaning and remedy share a row."""
    parts = [_INTRO.format(notice=notice("`docs/reasons.toml`"))]
    for title, rows in reasons().items():
        words: dict[Remedy, list[str]] = {}
        for word, said in rows.items():
            words.setdefault(said, []).append(f"`{word}`")
        lines = [(", ".join(same), said.meaning, said.remedy) for said, same in words.items()]
        parts.append(f"## {title}\n\n{table(('reason', 'meaning', 'remedy'), lines)}\n")
    return "\n".join(parts)
