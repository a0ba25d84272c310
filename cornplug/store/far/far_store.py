"""A far store: names to records, nothing else. It is not trusted: records are sealed (`far_record.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol
from urllib.parse import urlsplit

ASK_S: Final = 0.25
"""Deadline of a question whether records exist."""
MOVE_S: Final = 2.0
"""Deadline of one record's way, in either direction."""


class FarFailure(OSError):
    """A far store did not answer in time, or answered with an error."""


class FarStore(Protocol):
    """One far store. Its calls come from threads that may wait; they raise FarFailure."""

    @property
    def most_bytes(self) -> int:
        """Size of the largest record that it takes, or that is read from it."""

    @property
    def most_names(self) -> int:
        """Names of one question."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Whether it has these records."""

    def get(self, name: str) -> bytes | None:
        """A record; None where there is none."""

    def put(self, name: str, record: bytes) -> None:
        """Keep a record, in the place of an older one."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove records; of those that it does not have, nothing."""

    def close(self) -> None:
        """End its connections."""


def label_of(url: str) -> str:
    """The URL without user, password and query, for logs and metrics."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
