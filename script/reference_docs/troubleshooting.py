"""docs/troubleshooting.md: an introduction by hand, and the table of docs/reasons.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

from .markdown import notice, table

REASONS_FILE: Final = Path(__file__).parents[2] / "docs" / "reasons.toml"
_INTRO: Final = """# Troubleshooting: why did it not share?

{notice}

1. Run `cornplug doctor --model MODEL`. It checks the host, the store, the secret, the engines' versions and
   the checkpoint, and names a remedy for each fault.
2. Read the engine's log: a line that begins with `cornplug:` names a thing that is not shared, and why.
3. Read the counters at the engine's `/metrics` ([all of them](metrics.md)):

```text
cornplug_hits_total{{app="chat",what="embedding",source="service_cached"}} 20
cornplug_misses_total{{app="chat",what="kv_page",reason="absent"}} 3
cornplug_saves_total{{app="chat",what="kv_page",outcome="stored"}} 12
```

| counters | meaning |
|---|---|
| misses with `absent`, saves with `stored` | sharing works; no two requests had anything in common |
| misses with another reason | the reason is below |
| no hits, no misses, no saves | the engine shares nothing: read its log |

4. Two checkpoints that should share and do not: `cornplug fingerprint MODEL MODEL` prints which part differs.
   Two requests: `cache_salt` keeps their entries apart.

The word in the first column is the label `reason` (or `outcome`) of a series, and the `reason` of an
`ErrorAnswer` of the [HTTP API](http-api.md).
"""


class Remedy(NamedTuple):
    meaning: str
    remedy: str


def reasons() -> Mapping[str, Mapping[str, Remedy]]:
    """Section -> reason -> its meaning and its remedy."""
    sections = tomllib.loads(REASONS_FILE.read_text())
    return {title: {word: Remedy(*said) for word, said in rows.items()} for title, rows in sections.items()}


def page() -> str:
    """The text of docs/troubleshooting.md."""
    parts = [_INTRO.format(notice=notice("`docs/reasons.toml`"))]
    for title, rows in reasons().items():
        lines = [(f"`{word}`", said.meaning, said.remedy) for word, said in rows.items()]
        parts.append(f"## {title}\n\n{table(('reason', 'meaning', 'remedy'), lines)}\n")
    return "\n".join(parts)
