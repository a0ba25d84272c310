"""The daemon's log, which no client can fill: repeated lines are left out, and the file of a daemon that an
engine started is emptied when it is large."""

from __future__ import annotations

import logging
import os
import time
from typing import Final, TextIO

MOST_LINES: Final = 10
"""Lines of one kind within PERIOD_S. Further ones are counted in the next line of that kind."""
PERIOD_S: Final = 60.0


class BoundedLog(logging.StreamHandler[TextIO]):
    """Writes at most `MOST_LINES` lines of one kind a minute. Lines are of one kind if their text is the same
    before its arguments are filled in.

    Args:
        most_bytes: Size beyond which the log is emptied, if it is a file opened for appending; None: never.
    """

    def __init__(self, stream: TextIO, *, most_bytes: int | None = None) -> None:
        super().__init__(stream)
        self._most_bytes = most_bytes
        self._kinds: dict[tuple[str, str], _Kind] = {}
        self.addFilter(self._may_pass)

    def emit(self, record: logging.LogRecord) -> None:
        if self._most_bytes is not None:
            fd = self.stream.fileno()
            if os.fstat(fd).st_size > self._most_bytes:
                os.ftruncate(fd, 0)
        super().emit(record)

    def _may_pass(self, record: logging.LogRecord) -> bool:
        now_s = time.monotonic()
        kind = self._kinds.setdefault((record.name, str(record.msg)), _Kind(now_s))
        if now_s - kind.began_s >= PERIOD_S:
            kind.began_s, kind.lines = now_s, 0
        kind.lines += 1
        if kind.lines > MOST_LINES:
            kind.left_out += 1
            return False
        if kind.left_out:
            record.msg = f"{record.getMessage()} ({kind.left_out} lines like this were left out)"
            record.args, kind.left_out = (), 0
        return True


class _Kind:
    """Lines of one kind in the period that began at `began_s`."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.lines = self.left_out = 0
