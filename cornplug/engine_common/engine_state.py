"""State that all processes of one engine share: its start time, the origin of its weights, and its measured
cost of an embedding.

The epoch counts replacements of the weights by known ones, of a checkpoint or of a trainer that names them:
it is odd while they are replaced, and even after. Only the engine's first rank makes it even, once every
rank holds the new weights.

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
from collections.abc import Sequence
from typing import Final, NamedTuple

_log: Final = logging.getLogger("cornplug")
_VARIABLE: Final = "_CORNPLUG_ENGINE"
_TOKEN_BYTES: Final = 16
_BEGAN: Final = struct.Struct(f"<{_TOKEN_BYTES}sQ")
_FLAG: Final = _BEGAN.size
_COSTS: Final = struct.Struct("<d?")
_COSTS_AT: Final = 32
_CORES: Final = 44
_EPOCH: Final = 48
_SOURCE: Final = struct.Struct("<QHB")
"""When it was about to be read, bytes of its name, and whether that is a version."""
_SOURCE_AT: Final = 56
_NAME_AT: Final = _SOURCE_AT + _SOURCE.size
_PAGE: Final = mmap.PAGESIZE
LONGEST_PATH_BYTES: Final = _PAGE - _NAME_AT
"""Of `EngineState.end_update`."""
LONGEST_VERSION_BYTES: Final = 1024
"""Of `EngineState.end_named_update`."""


class WeightSource(NamedTuple):
    """The origin of an engine's weights in one epoch."""

    epoch: int
    path: str | None
    """The folder that they were replaced from; None for the checkpoint that the engine started with, and for
    a trainer's weights."""
    began_ns: int
    """As `EngineState.began_ns`, of the time when that folder was about to be read."""
    version: str | None = None
    """The name that a trainer gave these weights; None for a checkpoint's."""


class EngineState:
    """One page that an engine's processes share."""

    def __init__(self, page: mmap.mmap | None) -> None:
        """`page` None: this process could not reach the others'."""
        self._page = page
        # One machine word: a reader in another process sees the old number or the new one.
        self._epoch = memoryview(page)[_EPOCH : _EPOCH + 8].cast("Q") if page is not None else None
        self.epoch_word: Sequence[int] = (0,) if self._epoch is None else self._epoch
        """`epoch()` is its only item: for the engine's thread, which reads it in each step."""

    def began_ns(self) -> int:
        """When the engine was about to be configured, by the clock of files; before any weight was read."""
        return int(_BEGAN.unpack_from(self._page)[1]) if self._page is not None else _HERE_SINCE_NS

    def replaced(self) -> bool:
        """Whether the weights may not be the checkpoint's. True if this process cannot see the state."""
        page = self._page
        return page is None or page[_FLAG] != 0 or page[_EPOCH] & 1 != 0

    def unknown(self) -> bool:
        """Whether no further update makes the weights known."""
        return self._page is None or self._page[_FLAG] != 0

    def note_replaced(self, value: bool = True) -> None:
        """The weights are unknown from here on. False, for tests: they are those of the start."""
        if self._page is not None:
            self._page[_FLAG] = int(value)
            if self._epoch is not None and not value:
                self._epoch[0] = self._page[_CORES] = 0

    def core_began(self) -> None:
        """Another scheduler of requests began here: of a replica, or of the process's next engine.

        The source of weights is one for all of them, so after an update none of them shares.
        """
        if self._page is not None:
            self._page[_CORES] = min(self._page[_CORES] + 1, 255)
            if self.epoch():
                self.note_replaced()

    def one_core(self) -> bool:
        """Whether one scheduler of requests began here, and no other."""
        return self._page is not None and self._page[_CORES] == 1

    def epoch(self) -> int:
        """Odd while the weights are replaced by known ones, even otherwise; 0 at the start."""
        return self._epoch[0] if self._epoch is not None else 0

    def begin_update(self) -> int:
        """The epoch, which is odd from now on. From every process that takes part, any number of times."""
        if self._epoch is None:
            return 1
        self._epoch[0] |= 1
        return self._epoch[0]

    def end_update(self, epoch: int, path: str, began_ns: int) -> None:
        """The weights are those of a folder, in the epoch after an odd one.

        From the engine's first rank, once every rank has loaded them. Raises ValueError for a path that is
        too long.
        """
        name = os.fsencode(path)
        if len(name) > LONGEST_PATH_BYTES:
            raise ValueError(f"path too long: {len(name)} bytes")
        self._end(epoch, name, began_ns, is_version=False)

    def end_named_update(self, epoch: int, version: str) -> None:
        """The weights are those that a trainer calls by this name. Otherwise as `end_update`."""
        name = version.encode("utf-8", errors="surrogatepass")
        if len(name) > LONGEST_VERSION_BYTES:
            raise ValueError(f"version too long: {len(name)} bytes")
        self._end(epoch, name, 0, is_version=True)

    def _end(self, epoch: int, name: bytes, began_ns: int, *, is_version: bool) -> None:
        if self._page is not None and self._epoch is not None:
            _SOURCE.pack_into(self._page, _SOURCE_AT, began_ns, len(name), is_version)
            self._page[_NAME_AT : _NAME_AT + len(name)] = name
            self._epoch[0] = epoch + 1

    def source(self) -> WeightSource | None:
        """The origin of the weights; None while they are replaced, and where it is unknown."""
        epoch = self.epoch()
        if self._page is None or self.replaced():
            return None
        if not epoch:
            return WeightSource(0, None, self.began_ns())
        began_ns, size, is_version = _SOURCE.unpack_from(self._page, _SOURCE_AT)
        name = bytes(self._page[_NAME_AT : _NAME_AT + size])
        # Another update may have begun, and even ended, meanwhile.
        if self.epoch() != epoch:
            return None
        if is_version:
            version = name.decode("utf-8", errors="surrogatepass")
            return WeightSource(epoch, None, self.began_ns(), version)
        return WeightSource(epoch, os.fsdecode(name), began_ns)

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
        _log.warning("cornplug: this process cannot read its engine's state and shares nothing: %s", e)
        return None
    if bytes(page[:_TOKEN_BYTES]) != bytes.fromhex(token):
        # The engine that this environment is of has ended, and its process id is another's.
        _log.warning("cornplug: the engine's state file was removed; this process shares nothing")
        return None
    return page
