"""Bytes of each app in the store, of the largest apps by name."""

from __future__ import annotations

import heapq
from typing import Final

from cornplug.store.base import OTHER_APPS

STAT_APPS: Final = 256


class AppBytes:
    """Room that entries and reservations of each app have."""

    def __init__(self) -> None:
        self._bytes: dict[str, int] = {}

    def charge(self, app: str, room: int) -> None:
        """Add room that the app takes; less than 0: that it gives back."""
        self._bytes[app] = self._bytes.get(app, 0) + room
        if not self._bytes[app]:
            del self._bytes[app]

    def largest(self) -> dict[str, int]:
        """App -> bytes, of the STAT_APPS with most; all others together under OTHER_APPS."""
        largest = dict(heapq.nlargest(STAT_APPS, self._bytes.items(), key=lambda each: each[1]))
        if len(self._bytes) > STAT_APPS:
            largest[OTHER_APPS] = sum(self._bytes.values()) - sum(largest.values())
        return largest
