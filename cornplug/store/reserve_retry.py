"""Reservations with retries, for callers that can wait until memory is allocated."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import Final

from cornplug.errors import StoreUnavailable
from cornplug.store.base import Reservation, ReserveRefusal, Store, WriterPart

_PAUSE_S: Final = 0.005


def reserve(
    store: Store,
    entries: Sequence[tuple[bytes, int]],
    *,
    app: str,
    deadline_s: float,
    part: WriterPart | None = None,
    cost_s: float = 0.0,
) -> list[Reservation | ReserveRefusal]:
    """Like `Store.reserve`, but retry GROWING until the deadline. Raises StoreUnavailable."""
    end_s = time.monotonic() + deadline_s
    answers = store.reserve(entries, app=app, deadline_s=deadline_s, part=part, cost_s=cost_s)
    while growing := [i for i, answer in enumerate(answers) if answer is ReserveRefusal.GROWING]:
        left_s = end_s - time.monotonic() - _PAUSE_S
        if left_s <= 0:
            break
        time.sleep(_PAUSE_S)
        # Reservations so far are valid even if a retry fails.
        with contextlib.suppress(StoreUnavailable):
            again = store.reserve(
                [entries[i] for i in growing], app=app, deadline_s=left_s, part=part, cost_s=cost_s
            )
            for i, answer in zip(growing, again, strict=True):
                answers[i] = answer
    return answers
