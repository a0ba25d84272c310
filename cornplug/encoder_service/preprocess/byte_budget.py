"""Bounds bytes in memory, with a part reserved for each class: bodies that come, and prepared media.

A medium's bytes are taken by its header's dimensions before anything is decoded, corrected once the true size
is known, and given back with the answer.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Self

from cornplug.errors import EncoderRefused
from cornplug.qos import ServiceClass


class ByteBudget:
    """Thread-safe. A class may take unreserved bytes and its own, which are its fraction of all."""

    def __init__(self, fractions: Mapping[ServiceClass, float], max_bytes: int, *, purpose: str) -> None:
        """`purpose` completes the sentence "it takes 5 bytes ..." of refusals.

        With one class nothing is reserved: there is nobody to reserve it from.
        """
        self.max_bytes: Final = max_bytes
        self._purpose = purpose
        several = len(fractions) > 1
        self._reserved = {qos: int(part * max_bytes) for qos, part in fractions.items()} if several else {}
        self._lock = threading.Lock()
        self._held: Counter[ServiceClass] = Counter()

    def share(self, qos: ServiceClass) -> BudgetShare:
        """The budget of one medium or body, of 0 bytes at first."""
        return BudgetShare(self, qos)

    def held_bytes(self) -> int:
        """Bytes taken now."""
        with self._lock:
            return sum(self._held.values())

    def adjust(self, qos: ServiceClass, more: int, total: int) -> None:
        """Take `more` bytes (or give back) for something of `total` bytes. Raises as `BudgetShare.need`."""
        with self._lock:
            if more > 0:
                set_aside = sum(
                    max(0, reserved - self._held[q]) for q, reserved in self._reserved.items() if q != qos
                )
                limit = self.max_bytes - sum(reserved for q, reserved in self._reserved.items() if q != qos)
                if total > limit:
                    raise EncoderRefused(
                        f"it takes {total} bytes {self._purpose}, and its class may hold {limit}: send a "
                        "smaller one",
                        reason="too_large_prepared",
                    )
                if sum(self._held.values()) + set_aside + more > self.max_bytes:
                    raise EncoderRefused(
                        f"no memory is free for the {total} bytes that it takes {self._purpose}: ask again",
                        reason="overloaded",
                    )
            self._held[qos] += more


class BudgetShare:
    """The bytes of one medium or body; a context manager that gives them back. Thread-safe."""

    def __init__(self, budget: ByteBudget, qos: ServiceClass) -> None:
        self._budget = budget
        self._qos = qos
        self._lock = threading.Lock()
        self._bytes = 0
        self._open = True

    def need(self, size: int) -> None:
        """Hold `size` bytes.

        Raises EncoderRefused, nothing changed: "too_large_prepared" where they never fit, "overloaded" where
        they do not fit now, or the request was cancelled.
        """
        with self._lock:
            if not self._open:
                raise EncoderRefused("its request was cancelled", reason="overloaded")
            self._budget.adjust(self._qos, size - self._bytes, size)
            self._bytes = size

    def close(self) -> None:
        """Give all bytes back."""
        with self._lock:
            if self._open:
                self._budget.adjust(self._qos, -self._bytes, 0)
                self._bytes, self._open = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
