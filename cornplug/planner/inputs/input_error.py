"""Error for an invalid field of a plan's input, with the location of the field."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Final

from cornplug.errors import ConfigError

Place = tuple[str | int, ...]
"""Location of a field: keys and list indices from the top of the input, such as ("applications", 0,
"llm")."""

_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


class InputError(ConfigError):
    """Error for an invalid field of the input. `field` is text such as "applications[0].llm"."""

    def __init__(self, place: Place, problem: str, remedy: str) -> None:
        super().__init__(field(place), problem, remedy)
        self.place = place
        self.problem = problem


def field(place: Place) -> str:
    """Format a location as TOML's dotted keys, with list indices in brackets."""
    text = ""
    for part in place:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += ("." if text else "") + (part if _BARE_KEY.fullmatch(part) else f'"{part}"')
    return text or "the file"


def nearest(name: str, known: Sequence[str]) -> str:
    """Return a remedy for an unknown name: the known name that is most similar, if any, and all known
    names."""
    close = get_close_matches(name, known, 1, 0.6)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    return f"{guess}Known: {', '.join(known) or 'none'}."
