"""State that all processes of one engine share: its start time, the source of its weights, and the measured
cost of embeddings.

The epoch is a counter that increases when the weights are replaced by identified weights, either from a
checkpoint or from a trainer that names them. It is odd during an update and even otherwise. Only the engine's
first rank makes it even, after every rank has loaded the new weights.

The state is in one page of anonymous memory. The process that resolves the engine's configuration creates it,
and child processes open it through /proc. When one process detects that weights were replaced, all API
servers and engine cores see this immediately. The memory is freed when the engine dies.
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
_TOKEN_AND_START: Final = struct.Struct(f"<{_TOKEN_BYTES}sQ")
_FLAG_OFFSET: Final = _TOKEN_AND_START.size
_COSTS: Final = struct.Struct("<d?")
_COSTS_OFFSET: Final = 32
_CORES_OFFSET: Final = 44
_EPOCH_OFFSET: Final = 48
_SOURCE: Final = struct.Struct("<QHB")
"""Layout of the weights' source in the state page: time before the source was read, length of the source's
name in bytes, and whether that name is a trainer's version."""
_SOURCE_OFFSET: Final = 56
_NAME_OFFSET: Final = _SOURCE_OFFSET + _SOURCE.size
_PAGE_BYTES: Final = mmap.PAGESIZE
FILE_CLOCK: Final = 5
"""CLOCK_REALTIME_COARSE (linux/time.h), which gives files their timestamps. It advances in ticks of 1 to
10 ms, so it is behind `time.time_ns()`."""
MAX_PATH_BYTES: Final = _PAGE_BYTES - _NAME_OFFSET
"""Maximum length in bytes of a path that `EngineState.end_update` accepts."""
MAX_VERSION_BYTES: Final = 1024
"""Maximum length in bytes of a version that `EngineState.end_named_update` accepts."""


class WeightSource(NamedTuple):
    """Source of an engine's weights in one epoch."""

    epoch: int
    path: str | None
    """Folder from which the weights were loaded in an update. None for the checkpoint at start and for
    weights from a trainer."""
    began_ns: int
    """Time in nanoseconds, taken before the folder was read, on the same clock as `EngineState.began_ns`."""
    version: str | None = None
    """Name that a trainer gave these weights, or None for the weights of a checkpoint."""


class EngineState:
    """Access to the memory page with the state that all processes of one engine share."""

    def __init__(self, page: mmap.mmap | None) -> None:
        """Create an accessor for a state page. None means that this process could not open the engine's
        page."""
        self._page = page
        # The epoch is one machine word, so a reader in another process never sees a partial value.
        self._epoch = (
            memoryview(page)[_EPOCH_OFFSET : _EPOCH_OFFSET + 8].cast("Q") if page is not None else None
        )
        self.epoch_word: Sequence[int] = (0,) if self._epoch is None else self._epoch
        """Sequence with the current value of `epoch()` as its only item, for fast reads in each step."""

    def start_ns(self) -> int:
        """Return a time in nanoseconds, taken before the engine was configured and before any weight was
        read, on the clock of file timestamps."""
        return int(_TOKEN_AND_START.unpack_from(self._page)[1]) if self._page is not None else _IMPORT_TIME_NS

    def has_replaced_weights(self) -> bool:
        """Return whether the engine's weights may differ from those of the identified checkpoint. True if
        this process cannot read the state."""
        page = self._page
        return page is None or page[_FLAG_OFFSET] != 0 or page[_EPOCH_OFFSET] & 1 != 0

    def has_unknown_weights(self) -> bool:
        """Return whether the weights cannot be identified until the engine restarts."""
        return self._page is None or self._page[_FLAG_OFFSET] != 0

    def mark_weights_unknown(self, value: bool = True) -> None:
        """Mark the weights as unknown, which ends sharing in all processes of the engine. Tests pass False to
        reset the mark."""
        if self._page is not None:
            self._page[_FLAG_OFFSET] = int(value)
            if self._epoch is not None and not value:
                self._epoch[0] = self._page[_CORES_OFFSET] = 0

    def record_core_start(self) -> None:
        """Record that another request scheduler has started: for a replica, or for the next engine in this
        process.

        All schedulers share one record of the weights' source. If there are several schedulers, the engine
        shares nothing after a weight update.
        """
        if self._page is not None:
            self._page[_CORES_OFFSET] = min(self._page[_CORES_OFFSET] + 1, 255)
            if self.epoch():
                self.mark_weights_unknown()

    def has_one_core(self) -> bool:
        """Return whether exactly one request scheduler of this engine has started."""
        return self._page is not None and self._page[_CORES_OFFSET] == 1

    def epoch(self) -> int:
        """Return the epoch of the weights, which is odd during an update, even otherwise, and 0 at the
        start."""
        return self._epoch[0] if self._epoch is not None else 0

    def begin_update(self) -> int:
        """Begin a weight update and return the epoch, which is now odd. Every participating process may call
        this repeatedly."""
        if self._epoch is None:
            return 1
        self._epoch[0] |= 1
        return self._epoch[0]

    def end_update(self, epoch: int, path: str, began_ns: int) -> None:
        """End a weight update with weights that were loaded from the folder `path`. `epoch` is the result of
        `begin_update`.

        Only the engine's first rank calls this, after every rank has loaded the weights. Raises ValueError if
        the path is too long.
        """
        name = os.fsencode(path)
        if len(name) > MAX_PATH_BYTES:
            raise ValueError(f"the path is too long: {len(name)} bytes")
        self._finish_update(epoch, name, began_ns, is_version=False)

    def end_named_update(self, epoch: int, version: str) -> None:
        """End a weight update with weights that a trainer sent and named `version`. Raises ValueError if the
        version is too long. Only the engine's first rank calls this, after every rank has loaded the
        weights."""
        name = version.encode("utf-8", errors="surrogatepass")
        if len(name) > MAX_VERSION_BYTES:
            raise ValueError(f"the weight version is too long: {len(name)} bytes")
        self._finish_update(epoch, name, 0, is_version=True)

    def _finish_update(self, epoch: int, name: bytes, began_ns: int, *, is_version: bool) -> None:
        if self._page is not None and self._epoch is not None:
            _SOURCE.pack_into(self._page, _SOURCE_OFFSET, began_ns, len(name), is_version)
            self._page[_NAME_OFFSET : _NAME_OFFSET + len(name)] = name
            self._epoch[0] = epoch + 1

    def source(self) -> WeightSource | None:
        """Return the source of the current weights, or None during an update or if the source is unknown."""
        epoch = self.epoch()
        if self._page is None or self.has_replaced_weights():
            return None
        if not epoch:
            return WeightSource(0, None, self.start_ns())
        began_ns, size, is_version = _SOURCE.unpack_from(self._page, _SOURCE_OFFSET)
        name = bytes(self._page[_NAME_OFFSET : _NAME_OFFSET + size])
        # Another update may have begun, or even ended, while the source was read.
        if self.epoch() != epoch:
            return None
        if is_version:
            version = name.decode("utf-8", errors="surrogatepass")
            return WeightSource(epoch, None, self.start_ns(), version)
        return WeightSource(epoch, os.fsdecode(name), began_ns)

    def publish_costs(self, *, encode_row_s: float, is_fetch_faster: bool) -> None:
        """Publish the measured cost of embeddings to all processes of the engine: the tower's seconds per
        row, and whether fetching from the store is faster than encoding. The process that runs the tower
        calls this. The processes that send requests to a service use the values."""
        if self._page is not None:
            _COSTS.pack_into(self._page, _COSTS_OFFSET, encode_row_s, not is_fetch_faster)

    def encode_row_s(self) -> float | None:
        """Return the measured seconds per row for the engine's own tower, or None if the tower has not run
        yet."""
        seconds = float(_COSTS.unpack_from(self._page, _COSTS_OFFSET)[0]) if self._page is not None else 0.0
        return seconds or None

    def is_fetch_faster(self) -> bool:
        """Return whether fetching an embedding from the store is faster than encoding. True until
        measured."""
        return self._page is None or not _COSTS.unpack_from(self._page, _COSTS_OFFSET)[1]

    def _set_start(self, began_ns: int) -> None:
        if self._page is not None:
            struct.pack_into("<Q", self._page, _TOKEN_BYTES, began_ns)


_IMPORT_TIME_NS: Final = time.clock_gettime_ns(FILE_CLOCK)
_lock: Final = threading.Lock()
_state: EngineState | None = None


def file_clock_ns() -> int:
    """Return a time in nanoseconds on the clock of file timestamps.

    Files that changed before the call have earlier timestamps. Files that change after it have the same or
    later timestamps. For this guarantee, the call waits until that clock has passed the current time, which
    takes at most two ticks.
    """
    asked_ns = time.time_ns()
    while (now_ns := time.clock_gettime_ns(FILE_CLOCK)) <= asked_ns:
        time.sleep(0.001)
        asked_ns = min(asked_ns, time.time_ns())  # The system clock may be set back.
    return now_ns


def record_engine_start(*, fresh: bool = False) -> None:
    """Record that an engine is about to be configured in this process. Calls in child processes
    have no effect.

    With `fresh`, the engine gets a new state. Engines that this process configured before keep their state.
    """
    global _state
    now = file_clock_ns()
    if fresh and multiprocessing.parent_process() is None:
        with _lock:
            _state = EngineState(_create())
    found = current()
    if os.environ[_VARIABLE].startswith(f"{os.getpid()}:"):
        found._set_start(now)


def current() -> EngineState:
    """Return the state of the engine to which this process belongs. Create it if it does not exist."""
    global _state
    if _state is None:
        with _lock:
            if _state is None:
                _state = EngineState(_attach() if _VARIABLE in os.environ else _create())
    return _state


def _create() -> mmap.mmap:
    token = secrets.token_bytes(_TOKEN_BYTES)
    # The memory file stays open, because child processes open it through /proc.
    fd = os.memfd_create("cornplug-engine")
    os.ftruncate(fd, _PAGE_BYTES)
    page = mmap.mmap(fd, _PAGE_BYTES)
    _TOKEN_AND_START.pack_into(page, 0, token, _IMPORT_TIME_NS)
    os.environ[_VARIABLE] = f"{os.getpid()}:{fd}:{token.hex()}"
    return page


def _attach() -> mmap.mmap | None:
    pid, fd, token = os.environ[_VARIABLE].split(":")
    try:
        with open(f"/proc/{int(pid)}/fd/{int(fd)}", "r+b") as file:
            page = mmap.mmap(file.fileno(), _PAGE_BYTES)
    except (OSError, ValueError) as e:
        _log.warning("cornplug: this process cannot read its engine's state, so it shares nothing: %s", e)
        return None
    if bytes(page[:_TOKEN_BYTES]) != bytes.fromhex(token):
        # The engine that set the environment variable has exited, and another process has its process id now.
        _log.warning("cornplug: the engine's state file was removed, so this process shares nothing")
        return None
    return page
