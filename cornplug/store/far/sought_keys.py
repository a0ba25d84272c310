"""Absent keys that this process has sought in far stores, each with the ticket of its question."""

from __future__ import annotations

import math
import os
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

SOUGHT_S: Final = 1.0
"""Time for which a key is not asked for again."""
OPEN_S: Final = 0.5
"""Time after which a ticket is not waited for. A far store has to answer within 0.25 s, and a later ticket
may have replaced the answered one in the table."""
_MOST: Final = 1 << 14
_NEVER: Final = (-math.inf, 0)


class SoughtKeys:
    """Thread-safe; the newest keys only. A burst of equal requests sends one question, with one ticket."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._asked: OrderedDict[bytes, tuple[float, int]] = OrderedDict()

    def begin(self, keys: Sequence[bytes], now_s: float) -> tuple[list[bytes], int]:
        """Return the keys to ask for now, and the ticket to wait for.

        If a key is new, the ticket is new too: the daemon answers it after all earlier questions. If none is,
        it is the ticket of the latest question for one of the keys, or 0 if that was `OPEN_S` ago.
        """
        if os.getpid() != self._process:
            # In a forked child, a thread of the parent may have held the lock.
            self._process, self._lock = os.getpid(), threading.Lock()
        with self._lock:
            asked = [self._asked.get(key, _NEVER) for key in keys]
            new = [key for key, (asked_s, _) in zip(keys, asked, strict=True) if now_s - asked_s >= SOUGHT_S]
            if not new:
                asked_s, ticket = max(asked, default=_NEVER)
                return [], ticket if now_s - asked_s < OPEN_S else 0
            # Forked processes have their `random` in common.
            ticket = 1 + secrets.randbits(63)
            for key in new:
                self._asked[key] = now_s, ticket
                self._asked.move_to_end(key)
            while len(self._asked) > _MOST:
                self._asked.popitem(last=False)
            return new, ticket
