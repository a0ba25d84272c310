"""Prefixes that this client sent to each engine. Bounded; the least recently used prefixes are dropped
first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Final

MOST_STEPS: Final = 65_536
"""Maximum steps per engine: 8 million tokens, and about 8 MB of this process."""


class PrefixMemory:
    """Steps of prompts by engine. Not thread-safe: `EngineChooser` holds the lock."""

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._most = most_steps
        self._steps: dict[str, OrderedDict[int, None]] = {}

    def engines(self) -> tuple[str, ...]:
        """Return the engines that have received any step."""
        return tuple(self._steps)

    def keep(self, engines: Container[str]) -> None:
        """Forget all other engines, which a launch has ended."""
        for engine in [one for one in self._steps if one not in engines]:
            del self._steps[engine]

    def known(self, engine: str, steps: Sequence[int]) -> int:
        """Return the number of leading steps that this engine has received."""
        found = self._steps.get(engine, ())
        for number, step in enumerate(steps):
            if step not in found:
                return number
        return len(steps)

    def remember(self, engine: str, steps: Sequence[int]) -> None:
        """Record that this engine now has these steps."""
        found = self._steps.setdefault(engine, OrderedDict())
        # In reverse order, so that the end of a prompt is forgotten before its beginning.
        for step in reversed(steps):
            found[step] = None
            found.move_to_end(step)
        while len(found) > self._most:
            found.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Record that this engine lost its memory, because its process ended."""
        self._steps.pop(engine, None)
