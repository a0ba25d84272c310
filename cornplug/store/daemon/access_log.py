"""Log of a store's reads and writes for `cornplug replay`, with one JSON line per call and app.

    {"t": 12.5, "app": "chat", "op": "get", "entries": [["3f…", 8388608, 0.0048], …]}

`t` is the host's monotonic clock in seconds. An entry consists of the first 16 hex digits of its key, its
size in bytes, and the seconds of recomputation that its writer reported (0 if the writer reported none).
"get" lists entries that were present and read. "put" lists entries that were absent and written. Keys are
keyed digests, so the log shows which entries are equal, and nothing about their content.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Protocol

import msgspec

from cornplug.errors import ConfigError

MAX_LOG_BYTES: Final = 1 << 30
"""Size in bytes at which logging stops. The log then has about 15 million entries."""
_TAG_BYTES: Final = 8
_BUFFER_BYTES: Final = 1 << 18

Count = Annotated[int, msgspec.Meta(ge=0)]
_log = logging.getLogger("cornplug.store")
_encoder: Final = msgspec.json.Encoder()


class LoggedEntry(msgspec.Struct, frozen=True, array_like=True):
    """Entry that a logged call read or wrote. `tag` is the start of its key in hex."""

    tag: str
    size_bytes: Count
    cost_s: float = 0.0


class LoggedCall(msgspec.Struct, frozen=True):
    """Line of the log: one call of a client, at the time `t`."""

    t: float
    app: str
    op: Literal["get", "put"]
    entries: list[LoggedEntry]


class LoggableEntry(Protocol):
    """Fields of a stored entry that the log uses."""

    @property
    def key(self) -> bytes: ...
    @property
    def app(self) -> str: ...
    @property
    def aligned_bytes(self) -> int: ...
    @property
    def cost_s(self) -> float: ...


class AccessLog:
    """Access log in a file that only this user can access. If a write fails, logging stops, but the store
    continues."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Open the file. Raises ConfigError if it cannot be written."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._file = os.fdopen(os.open(path, flags, 0o600), "ab", buffering=_BUFFER_BYTES)
        except OSError as e:
            raise ConfigError(
                "store.access_log",
                f"cannot write {path}: {e.strerror}",
                "Choose a file in a folder that belongs to you.",
            ) from e
        self._path, self._left_bytes = path, max_bytes - os.fstat(self._file.fileno()).st_size
        self._stopped = False

    def log(self, op: Literal["get", "put"], entries: Sequence[LoggableEntry], now_s: float) -> None:
        """Log one call's entries, in their order."""
        by_app: dict[str, list[LoggedEntry]] = {}
        for one in entries:
            tag = one.key[:_TAG_BYTES].hex()
            by_app.setdefault(one.app, []).append(LoggedEntry(tag, one.aligned_bytes, one.cost_s))
        for app, noted in by_app.items():
            self._write(_encoder.encode(LoggedCall(round(now_s, 6), app, op, noted)) + b"\n")

    def close(self) -> None:
        """Write buffered lines and close the file."""
        try:
            self._file.close()
        except OSError as e:
            _log.warning("cannot close the access log %s: %s", self._path, e.strerror)

    def _write(self, line: bytes) -> None:
        self._left_bytes -= len(line)
        if self._stopped:
            return
        if self._left_bytes < 0:
            self._stop("the file has reached its maximum size")
            return
        try:
            self._file.write(line)
        except OSError as e:
            self._stop(e.strerror)

    def _stop(self, why: str | None) -> None:
        self._stopped = True
        _log.warning("reads and writes are no longer logged to %s: %s", self._path, why)
