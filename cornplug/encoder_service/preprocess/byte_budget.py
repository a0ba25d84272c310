"""Budget for bytes in memory, with a share reserved for each class. Used for incoming bodies and prepared
media.

Before a medium is decoded, its bytes are estimated from the dimensions in its header and reserved. The
reservation is corrected once the actual size is known, and released with the reply.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Self

from cornplug.errors import EncoderRefused
from cornplug.qos import ServiceClass


class ByteBudget:
    """Budget of all classes. Thread-safe. A class may use its own reserved bytes and unreserved bytes."""

    def __init__(self, fractions: Mapping[ServiceClass, float], max_bytes: int, *, purpose: str) -> None:
        """Create a budget of `max_bytes`, in which each class reserves a fraction.

        `purpose` completes the message "5 bytes are needed ..." of refusals. With a single class, nothing is
        reserved.
        """
        self.max_bytes: Final = max_bytes
        self._purpose = purpose
        several = len(fractions) > 1
        self._reserved = {qos: int(part * max_bytes) for qos, part in fractions.items()} if several else {}
        self._lock = threading.Lock()
        self._held: Counter[ServiceClass] = Counter()

    def share(self, qos: ServiceClass) -> BudgetShare:
        """Return a share for one medium or body, which initially holds 0 bytes."""
        return BudgetShare(self, qos)

    def held_bytes(self) -> int:
        """Return the number of bytes that all shares hold now."""
        with self._lock:
            return sum(self._held.values())

    def adjust(self, qos: ServiceClass, more: int, total: int) -> None:
        """Add `more` bytes to a share, which then holds `total` bytes. Release bytes if `more` is negative.

        Raises the same errors as `BudgetShare.need`.
        """
        with self._lock:
            if more > 0:
                set_aside = sum(
                    max(0, reserved - self._held[q]) for q, reserved in self._reserved.items() if q != qos
                )
                limit = self.max_bytes - sum(reserved for q, reserved in self._reserved.items() if q != qos)
                if total > limit:
                    raise EncoderRefused(
                        f"{total} bytes are needed {self._purpose}, and the limit for this class is {limit}; "
                        "send a smaller medium",
                        reason="too_large_prepared",
                    )
                if sum(self._held.values()) + set_aside + more > self.max_bytes:
                    raise EncoderRefused(
                        f"no memory is free for the {total} bytes needed {self._purpose}; retry later",
                        reason="overloaded",
                    )
            self._held[qos] += more


class BudgetShare:
    """Bytes of the budget that one medium or body holds. A context manager that releases them.
    Thread-safe."""

    def __init__(self, budget: ByteBudget, qos: ServiceClass) -> None:
        self._budget = budget
        self._qos = qos
        self._lock = threading.Lock()
        self._bytes = 0
        self._open = True

    def need(self, size: int) -> None:
        """Change the number of bytes that this share holds to `size`.

        If this raises EncoderRefused, the share is unchanged: "too_large_prepared" if `size` bytes can never
        fit, "overloaded" if they do not fit now or the request was cancelled.
        """
        with self._lock:
            if not self._open:
                raise EncoderRefused("the request was cancelled", reason="overloaded")
            self._budget.adjust(self._qos, size - self._bytes, size)
            self._bytes = size

    def close(self) -> None:
        """Release all bytes."""
        with self._lock:
            if self._open:
                self._budget.adjust(self._qos, -self._bytes, 0)
                self._bytes, self._open = 0, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
