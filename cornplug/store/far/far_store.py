"""Interface of far stores, which map names to records. Records are sealed (`far_record.py`)
because far stores are not trusted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol
from urllib.parse import urlsplit

ASK_S: Final = 0.25
"""Deadline of a lookup in seconds."""
MOVE_S: Final = 2.0
"""Deadline of one record's transfer, in either direction, in seconds."""


class FarFailure(OSError):
    """Raised if a far store does not reply in time, or replies with an error."""


class FarStore(Protocol):
    """One far store. Its methods are called on threads that may wait, and raise FarFailure."""

    @property
    def most_bytes(self) -> int:
        """Maximum size in bytes of a record that can be written or read."""

    @property
    def most_names(self) -> int:
        """Maximum number of names in one lookup."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return whether each of these records exists."""

    def get(self, name: str) -> bytes | None:
        """Return the record of this name, or None if it does not exist."""

    def put(self, name: str, record: bytes) -> None:
        """Store a record under this name, and replace an older record of the same name."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete the records of these names. Names without a record are ignored."""

    def close(self) -> None:
        """Close the connections."""


def label_of(url: str) -> str:
    """Return the URL without user, password and query, for logs and metrics."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
