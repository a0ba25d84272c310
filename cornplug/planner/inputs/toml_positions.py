"""Line numbers of keys and list elements in a TOML file, which `tomllib` does not report.

The text must be valid TOML, because this module does not check it. Values are skipped.
"""

from __future__ import annotations

import re
import tomllib
from bisect import bisect_right
from typing import Final

from cornplug.planner.inputs.input_error import Place

_BLANK: Final = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*")
_STRING: Final = re.compile(
    r'"""(?:\\.|[^\\])*?"""(?:"{0,2})' + r"|'''.*?'''(?:'{0,2})" + r'|"(?:\\.|[^"\\\n])*"' + r"|'[^'\n]*'",
    re.DOTALL,
)
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")
_SCALAR: Final = re.compile(r"[^,\]}\n#]+")
_DOT: Final = re.compile(r"[ \t]*\.[ \t]*")


def lines_of(text: str) -> dict[Place, int]:
    """Return the line of each location in the text, counted from 1. A table that dotted keys create has the
    line of the first of these keys."""
    return _Scan(text).places()


def line_of(lines: dict[Place, int], place: Place) -> int:
    """Return the line of a location, or of the innermost table around it that the file contains. Returns 1 if
    there is none."""
    while place and place not in lines:
        place = place[:-1]
    return lines.get(place, 1)


class _Scan:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._newlines = [m.start() for m in re.finditer("\n", text)]
        self._lines: dict[Place, int] = {}
        self._elements: dict[Place, int] = {}
        """Number of [[tables]] before the current position, by the location of their list."""

    def places(self) -> dict[Place, int]:
        table: Place = ()
        while self._skip(_BLANK) and self._at < len(self._text):
            line = self._line
            if self._take("[["):
                table = self._next_element(self._key())
                self._take("]]")
            elif self._take("["):
                table = self._inside(self._key())
                self._take("]")
            else:
                self._pair(table)
                continue
            self._note(table, line)
        return self._lines

    @property
    def _line(self) -> int:
        return bisect_right(self._newlines, self._at - 1) + 1

    def _note(self, place: Place, line: int) -> None:
        for end in range(1, len(place) + 1):
            self._lines.setdefault(place[:end], line)

    def _inside(self, keys: Place) -> Place:
        """Return the location of a header's table. A key that is a [[list]] refers to the list's last element
        so far."""
        place: Place = ()
        for key in keys:
            place += (key,)
            if place in self._elements:
                place += (self._elements[place] - 1,)
        return place

    def _next_element(self, keys: Place) -> Place:
        elements = (*self._inside(keys[:-1]), keys[-1])
        number = self._elements.get(elements, 0)
        self._elements[elements] = number + 1
        return (*elements, number)

    def _pair(self, table: Place) -> None:
        line = self._line
        place = table + self._key()
        self._note(place, line)
        self._skip(_BLANK)
        self._take("=")
        self._value(place)

    def _key(self) -> Place:
        keys: list[str] = []
        while True:
            self._skip(_BLANK)
            if found := _BARE_KEY.match(self._text, self._at):
                keys.append(found[0])
            else:
                found = _STRING.match(self._text, self._at)
                assert found, "a key, as tomllib has seen"
                keys.append(tomllib.loads(f"key = {found[0]}")["key"])
            self._at = found.end()
            if not (dot := _DOT.match(self._text, self._at)):
                self._skip(_BLANK)
                return tuple(keys)
            self._at = dot.end()

    def _value(self, place: Place) -> None:
        self._skip(_BLANK)
        self._note(place, self._line)
        if self._take("["):
            self._array(place)
        elif self._take("{"):
            self._inline_table(place)
        else:
            self._skip(_STRING) or self._skip(_SCALAR)

    def _array(self, place: Place) -> None:
        number = 0
        while self._skip(_BLANK) and not self._take("]"):
            self._value((*place, number))
            number += 1
            self._skip(_BLANK)
            self._take(",")

    def _inline_table(self, place: Place) -> None:
        while self._skip(_BLANK) and not self._take("}"):
            self._pair(place)
            self._skip(_BLANK)
            self._take(",")

    def _take(self, token: str) -> bool:
        found = self._text.startswith(token, self._at)
        self._at += len(token) if found else 0
        return found

    def _skip(self, pattern: re.Pattern[str]) -> bool:
        """Advance past a match of the pattern, and return whether it matched. `_BLANK` always matches."""
        found = pattern.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found is not None
