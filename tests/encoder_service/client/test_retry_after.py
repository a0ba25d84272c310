"""Both forms of Retry-After, and texts that are neither."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from cornplug.encoder_service.client.retry import retry_after_s

NOW_S = datetime(2026, 11, 28, 12, 0, 0, tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("7", 7.0),
        (" 0.5 ", 0.5),
        (3, 3.0),
        ("Sat, 28 Nov 2026 12:01:30 GMT", 90.0),
        ("Saturday, 28-Nov-26 12:00:10 GMT", 10.0),
        ("Sat, 28 Nov 2026 11:00:00 GMT", 0.0),
        ("Sat, 28 Nov 2026 13:00:00 +0100", 0.0),
        ("-1", None),
        ("inf", None),
        ("nan", None),
        ("soon", None),
        ("", None),
        ("Sat, 99 Nov 2026 12:00:00 GMT", None),
        (None, None),
        ([3], None),
    ],
)
def test_retry_after_each_form_gives_seconds(value: object, seconds: float | None) -> None:
    assert retry_after_s(value, now_s=NOW_S) == seconds
