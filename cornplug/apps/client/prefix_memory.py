"""Prefixes that this client sent to each engine. Bounded: the longest unused goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Final

MOST_STEPS: Final = 65_536
"""Of one engine: 8 million tokens, and about 8 MB of this process."""


class PrefixMemory:
    """Steps of prompts by engine. Not safe for threads: `EngineChooser` has the lock."""

    def __init__(self, most_steps: int = MOST_STEPS) -> None:
        self._most = most_steps
        self._steps: dict[str, OrderedDict[int, None]] = {}

    def engines(self) -> tuple[str, ...]:
        """Engines that have had any step."""
        return tuple(self._steps)

    def keep(self, engines: Container[str]) -> None:
        """Forget engines that are not among these: a launch has ended them."""
        for engine in [one for one in self._steps if one not in engines]:
            del self._steps[engine]

    def known(self, engine: str, steps: Sequence[int]) -> int:
        """Number of leading steps that this engine has had."""
        found = self._steps.get(engine, ())
        for number, step in enumerate(steps):
            if step not in found:
                return number
        return len(steps)

    def remember(self, engine: str, steps: Sequence[int]) -> None:
        """Note that this engine has these steps now."""
        found = self._steps.setdefault(engine, OrderedDict())
        # From the last one on: of a prompt, the end is forgotten before the beginning.
        for step in reversed(steps):
            found[step] = None
            found.move_to_end(step)
        while len(found) > self._most:
            found.popitem(last=False)

    def forget(self, engine: str) -> None:
        """Note that this engine lost its memory: its process ended."""
        self._steps.pop(engine, None)
