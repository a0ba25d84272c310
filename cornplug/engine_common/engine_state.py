"""State that all processes of one engine share: its start time, whether its weights still hold, and its
measured cost of an embedding.

It lies in a page of anonymous memory. The process that resolves the engine's configuration makes the page,
its children open it through /proc. So a process that learns of replaced weights tells every API server and
engine core in the same instant, and nothing is left behind when the engine dies.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
import os
import secrets
import struct
import threading
import time
from typing import Final

_log: Final = logging.getLogger("cornplug")
_VARIABLE: Final = "_CORNPLUG_ENGINE"
_TOKEN_BYTES: Final = 16
_BEGAN: Final = struct.Struct(f"<{_TOKEN_BYTES}sQ")
_FLAG: Final = _BEGAN.size
_COSTS: Final = struct.Struct("<d?")
_COSTS_AT: Final = 32
_PAGE: Final = mmap.PAGESIZE


class EngineState:
    """One page that an engine's processes share."""

    def __init__(self, page: mmap.mmap | None) -> None:
        """`page` None: this process could not reach the others'."""
        self._page = page

    def began_ns(self) -> int:
        """When the engine was about to be configured, by the clock of files; before any weight was read."""
        return int(_BEGAN.unpack_from(self._page)[1]) if self._page is not None else _HERE_SINCE_NS

    def replaced(self) -> bool:
        """Whether the weights may not be the checkpoint's. True if this process cannot see the state."""
        return self._page is None or self._page[_FLAG] != 0

    def note_replaced(self, value: bool = True) -> None:
        if self._page is not None:
            self._page[_FLAG] = int(value)

    def note_costs(self, *, encode_row_s: float, fetch_pays: bool) -> None:
        """Publish the measured cost of an embedding: seconds that the tower takes for a row, and whether a
        fetch from the store is quicker. From the process that runs the tower to those that ask a service.
        """
        if self._page is not None:
            _COSTS.pack_into(self._page, _COSTS_AT, encode_row_s, not fetch_pays)

    def encode_row_s(self) -> float | None:
        """Seconds that the engine's own tower takes for a row; None before it has run."""
        seconds = float(_COSTS.unpack_from(self._page, _COSTS_AT)[0]) if self._page is not None else 0.0
        return seconds or None

    def fetch_pays(self) -> bool:
        """Whether to take embeddings from the store; True until it was measured."""
        return self._page is None or not _COSTS.unpack_from(self._page, _COSTS_AT)[1]

    def _begin(self, began_ns: int) -> None:
        if self._page is not None:
            struct.pack_into("<Q", self._page, _TOKEN_BYTES, began_ns)


_HERE_SINCE_NS: Final = time.time_ns()
_lock: Final = threading.Lock()
_state: EngineState | None = None


def begin(*, anew: bool = False) -> None:
    """Say that an engine is about to be configured here. In its children: nothing, they know already.

    `anew`: it is another engine than those that this process began before, which keep their own state.
    """
    global _state
    now = time.time_ns()
    if anew and multiprocessing.parent_process() is None:
        with _lock:
            _state = EngineState(_create())
    found = current()
    if os.environ[_VARIABLE].startswith(f"{os.getpid()}:"):
        found._begin(now)


def current() -> EngineState:
    """The state of the engine that this process is part of; made where there is none."""
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = EngineState(_attach() if _VARIABLE in os.environ else _create())
    return _state


def _create() -> mmap.mmap:
    token = secrets.token_bytes(_TOKEN_BYTES)
    fd = os.memfd_create("cornplug-engine")  # stays open: children come by it
    os.ftruncate(fd, _PAGE)
    page = mmap.mmap(fd, _PAGE)
    _BEGAN.pack_into(page, 0, token, _HERE_SINCE_NS)
    os.environ[_VARIABLE] = f"{os.getpid()}:{fd}:{token.hex()}"
    return page


def _attach() -> mmap.mmap | None:
    pid, fd, token = os.environ[_VARIABLE].split(":")
    try:
        with open(f"/proc/{int(pid)}/fd/{int(fd)}", "r+b") as file:
            page = mmap.mmap(file.fileno(), _PAGE)
    except (OSError, ValueError) as e:
        _log.warning("cornplug: this process cannot see its engine's state and shares nothing: %s", e)
        return None
    if bytes(page[:_TOKEN_BYTES]) != bytes.fromhex(token):
        # The engine that this environment is of has ended, and its process id is another's.
        _log.warning("cornplug: the engine's state is gone; this process shares nothing")
        return None
    return page
