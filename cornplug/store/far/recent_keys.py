"""Keys that were asked for a moment ago: nothing is asked twice within it. Bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class RecentKeys:
    """Each key is recent for `seconds`, and the `most` newest ones only. Not thread-safe."""

    def __init__(self, *, seconds: float, most: int) -> None:
        self._seconds, self._most = seconds, most
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until_s)

    def holds(self, key: bytes, now_s: float) -> bool:
        """Whether a key is recent."""
        return self._until_s.get(key, now_s) > now_s

    def note(self, keys: Iterable[bytes], now_s: float) -> None:
        """These keys are recent from now on."""
        for key in keys:
            self._until_s[key] = now_s + self._seconds
            self._until_s.move_to_end(key)
        while self._until_s and (
            len(self._until_s) > self._most or next(iter(self._until_s.values())) <= now_s
        ):
            self._until_s.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """A key is recent no longer."""
        self._until_s.pop(key, None)
