"""Parser for the Retry-After header (RFC 9110, section 10.2.3): seconds, or an HTTP date."""

from __future__ import annotations

import math
import time
from email.utils import parsedate_to_datetime


def retry_after_s(value: object, *, now_s: float | None = None) -> float | None:
    """Seconds until the server may be asked again, at least 0; None if `value` is neither form.

    Args:
        value: The header's text, or a number of seconds from an error's body.
        now_s: Unix time that a date is compared with; None: the clock's.
    """
    if not isinstance(value, int | float | str):
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _until(str(value), time.time() if now_s is None else now_s)
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def _until(date: str, now_s: float) -> float | None:
    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - now_s)
    except (ValueError, OverflowError):
        return None
