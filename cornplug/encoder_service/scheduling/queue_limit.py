"""The hard bound of what waits, with seats that each class keeps for itself."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from cornplug.encoder_service.scheduling.batcher import PendingRequest
from cornplug.qos import ServiceClass

Full = tuple[Literal["over_share", "overloaded"], str]
"""Why there is no seat: a reason of refusals, and in words."""


class WaitingRoom:
    """Requests that were let in and are not answered yet. Thread-safe.

    A class may take the seats of nobody, and its own, which are its share of all: however many of
    another class come first, they do not fill the room for it.
    """

    def __init__(self, classes: Sequence[ServiceClass], seats: int) -> None:
        self.seats: Final = seats
        self._own = {qos: math.floor(qos.share * seats) for qos in classes}
        self._changed = threading.Condition()
        self._waits: set[PendingRequest] = set()
        self._held: Counter[ServiceClass] = Counter()
        self._stopping = False

    def enter(self, wait: PendingRequest) -> Full | None:
        """Take a seat, or hear why there is none. `leave` gives it back."""
        with self._changed:
            if self._stopping:
                return "overloaded", "the service is stopping"
            kept = sum(max(0, own - self._held[qos]) for qos, own in self._own.items() if qos != wait.qos)
            if len(self._waits) + kept >= self.seats:
                # Its own seats are taken, or it would have got one.
                if len(self._waits) > self._held[wait.qos]:
                    return "over_share", f"{self._held[wait.qos]} requests of its class wait already"
                return "overloaded", f"{len(self._waits)} requests wait already"
            self._waits.add(wait)
            self._held[wait.qos] += 1
            return None

    def leave(self, wait: PendingRequest) -> None:
        """It was answered, or nobody waits for it any more."""
        with self._changed:
            if wait in self._waits:
                self._waits.remove(wait)
                self._held[wait.qos] -= 1
                self._changed.notify_all()

    def drain(self, deadline_s: float) -> bool:
        """Let nobody more in, and wait until all have left. False when the deadline passed first."""
        with self._changed:
            self._stopping = True
            return self._changed.wait_for(lambda: not self._waits, deadline_s)

    def identities(self) -> frozenset[bytes]:
        """The models that those in it wait for."""
        with self._changed:
            return frozenset(wait.request.identity for wait in self._waits)

    def __len__(self) -> int:
        with self._changed:
            return len(self._waits)
