"""Page keys of prompts with media as both engines' rooms must make them: the cases, and their frozen values.

A change of a value needs a new version in the domain's name. `python tests/lineage_vectors.py`
writes the values of cases that are not in the file yet, and changes none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, NamedTuple

GOLDEN: Final = Path(__file__).parent / "golden" / "lineages.json"
SECRET: Final = bytes(range(32))
ROOT: Final = b"r" * 32
PAGE_TOKENS: Final = 32
PLACEHOLDER: Final = 151_655
A, B = b"\xaa" * 32, b"\xbb" * 32


class Medium(NamedTuple):
    """A run of placeholder tokens."""

    key: bytes
    """Its embedding key."""
    offset: int
    rows: int


CASES: Final = {
    "80 rows": (Medium(A, 40, 80),),
    "79 rows": (Medium(A, 40, 79),),
    "another of 80 rows": (Medium(B, 40, 80),),
    "80 rows, then 8": (Medium(A, 40, 80), Medium(B, 130, 8)),
    "80 rows, then 9": (Medium(A, 40, 80), Medium(B, 130, 9)),
    "twice, of other rows": (Medium(A, 3, 40), Medium(A, 60, 41)),
}


def tokens(media: tuple[Medium, ...]) -> list[int]:
    """Of a whole prompt."""
    made = [(11 * i) % 997 for i in range(192)]
    for medium in media:
        made[medium.offset : medium.offset + medium.rows] = [PLACEHOLDER] * medium.rows
    return made


def known() -> dict[str, Any]:
    """Case -> page keys as hex."""
    found: dict[str, Any] = json.loads(GOLDEN.read_text())
    return found


if __name__ == "__main__":
    from cornplug.identity import LINK_TOKENS, hash_chain, media_item_lineage, page_key, placeholder_tokens

    def made(media: tuple[Medium, ...]) -> list[str]:
        seen = tokens(media)
        for medium in media:
            wide = placeholder_tokens(media_item_lineage(medium.key, medium.rows))
            for row in range(medium.rows):
                seen[medium.offset + row] = wide[row % 4]
        step = PAGE_TOKENS // LINK_TOKENS
        return [
            page_key(SECRET, ROOT, PAGE_TOKENS, link).hex()
            for link in hash_chain(b"", seen)[step - 1 :: step]
        ]

    new = {name: made(media) for name, media in CASES.items()}
    GOLDEN.write_text(json.dumps(new | (known() if GOLDEN.exists() else {}), indent=1) + "\n")
