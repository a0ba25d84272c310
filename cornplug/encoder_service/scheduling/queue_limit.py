"""Limit on the number of waiting requests, with slots reserved for each class."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from cornplug.encoder_service.scheduling.batcher import PendingRequest
from cornplug.qos import ServiceClass

QueueFull = tuple[Literal["over_share", "overloaded"], str]
"""Reason and message of the refusal if there is no slot."""


class QueueLimit:
    """Requests that were admitted and are not answered yet. Thread-safe.

    A class may take unreserved slots and its own, which are its share of all: other classes cannot fill
    these.
    """

    def __init__(self, classes: Sequence[ServiceClass], slots: int) -> None:
        self.slots: Final = slots
        self._reserved = {qos: math.floor(qos.share * slots) for qos in classes}
        self._changed = threading.Condition()
        self._waits: set[PendingRequest] = set()
        self._held: Counter[ServiceClass] = Counter()
        self._stopping = False

    def enter(self, pending: PendingRequest) -> QueueFull | None:
        """Take a slot, or return why there is none. `leave` releases it."""
        with self._changed:
            if self._stopping:
                return "overloaded", "the service is stopping"
            kept = sum(
                max(0, own - self._held[qos]) for qos, own in self._reserved.items() if qos != pending.qos
            )
            if len(self._waits) + kept >= self.slots:
                # The class's reserved slots are taken, or it would have got one.
                if len(self._waits) > self._held[pending.qos]:
                    return (
                        "over_share",
                        f"{self._held[pending.qos]} requests of its class are already waiting",
                    )
                return "overloaded", f"{len(self._waits)} requests are already waiting"
            self._waits.add(pending)
            self._held[pending.qos] += 1
            return None

    def leave(self, pending: PendingRequest) -> None:
        """Release the slot, because the request was answered or cancelled."""
        with self._changed:
            if pending in self._waits:
                self._waits.remove(pending)
                self._held[pending.qos] -= 1
                self._changed.notify_all()

    def drain(self, deadline_s: float) -> bool:
        """Admit no more requests, and wait until all have left. Returns False if the deadline passes
        first."""
        with self._changed:
            self._stopping = True
            return self._changed.wait_for(lambda: not self._waits, deadline_s)

    def identities(self) -> frozenset[bytes]:
        """Return the identities of the models that the requests use."""
        with self._changed:
            return frozenset(pending.request.identity for pending in self._waits)

    def __len__(self) -> int:
        with self._changed:
            return len(self._waits)
