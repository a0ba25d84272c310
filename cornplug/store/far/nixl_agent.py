"""NIXL agent of one process, and the ring of records in its registered memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any, Final

_OVERWRITE_TIMEOUT_S: Final = 2.0
"""Maximum time in seconds that a new record waits until the transfer of an older record in the same location
is complete."""
_RECEIVE_BUFFERS: Final = 2
"""Number of receive buffers, each of which can receive one record at a time."""
_POLL_INTERVAL_S: Final = 0.00005
"""Time between two checks of a transfer in seconds, during which other threads run."""
_QUARANTINE_S: Final = 10.0
"""Seconds for which a receive buffer stays unused if its record was late, because the record may still
arrive."""


class RecordRing:
    """Ring buffer with the records of one member (a host of the far store). A new record overwrites the
    oldest records. Thread-safe.

    Args:
        memory: Memory for the records. Each record is contiguous.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._end = 0
        """Offset at which the newest record ends."""
        self._locations: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """(offset, bytes) of each record by name, oldest first."""
        self._held_ranges: list[tuple[int, int]] = []
        self._put_lock = threading.Lock()
        self._changed = threading.Condition()

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._locations

    def put(self, name: str, record: bytes) -> None:
        """Store a record, and replace an older record of the same name.

        Raises ValueError if the record is larger than the ring. Raises TimeoutError if an older record in the
        same location is held for longer than 2 s.
        """
        size = len(record)
        if size > self._memory.nbytes:
            raise ValueError(f"a record of {size} bytes exceeds the memory of {self._memory.nbytes} bytes")
        with self._put_lock, self._changed:
            self._locations.pop(name, None)
            width = max(size, 1)  # An empty record also has its own byte, so that its position shows its age.
            start = self._end if self._end + width <= self._memory.nbytes else 0
            while self._locations:
                oldest, place = next(iter(self._locations.items()))
                # If the new record starts again at the front, the records behind the newest record are the
                # oldest.
                if not (start < self._end <= place[0] or _overlaps(place, (start, size))):
                    break
                del self._locations[oldest]
            self._end = start + width
            free = self._changed.wait_for(
                lambda: not any(_overlaps(place, (start, size)) for place in self._held_ranges),
                _OVERWRITE_TIMEOUT_S,
            )
            if not free:
                raise TimeoutError(f"the transfer of a record has taken {_OVERWRITE_TIMEOUT_S:g} s")
            self._memory[start : start + size] = record
            self._locations[name] = start, size

    def delete(self, name: str) -> None:
        """Delete a record, if it exists."""
        with self._changed:
            self._locations.pop(name, None)

    def get(self, name: str) -> bytes | None:
        """Return a copy of a record, or None if it does not exist."""
        with self.hold(name) as place:
            return None if place is None else bytes(self._memory[place[0] : place[0] + place[1]])

    @contextlib.contextmanager
    def hold(self, name: str) -> Iterator[tuple[int, int] | None]:
        """Yield the (offset, bytes) of a record, or None if it does not exist. The record is not overwritten
        during the context."""
        with self._changed:
            place = self._locations.get(name)
            if place is not None:
                self._held_ranges.append(place)
        try:
            yield place
        finally:
            if place is not None:
                with self._changed:
                    self._held_ranges.remove(place)
                    self._changed.notify_all()


def _overlaps(first: tuple[int, int], second: tuple[int, int]) -> bool:
    return first[0] < second[0] + max(second[1], 1) and second[0] < first[0] + max(first[1], 1)


class TransferMemory:
    """Memory that NIXL transfers records from or to, and its address.

    The kernel allocates its pages when they are used.
    """

    def __init__(self, size_bytes: int) -> None:
        pages = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.view = memoryview(pages)


class NixlAgent:
    """NIXL agent. Thread-safe. Calls raise ConnectionError if NIXL cannot reach the other agent.

    Args:
        segment_bytes: Size of the memory from which the agent sends records.
        buffer_bytes: Maximum size of a record that the agent receives.
    """

    def __init__(self, *, segment_bytes: int, buffer_bytes: int) -> None:
        # Imported here because the daemon also imports this module, and does not need the library.
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        # NIXL's progress thread would use half of a core. `progress` is called during transfers instead.
        config = nixl_agent_config(
            enable_prog_thread=False, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        # Each process has a new name, because other agents cache addresses by name.
        self._nixl: Any = nixl_agent(secrets.token_hex(8), config)
        self.segment = TransferMemory(segment_bytes)
        self._nixl.register_memory([_memory_descriptor(self.segment)], "DRAM")
        buffers = [TransferMemory(buffer_bytes) for _ in range(_RECEIVE_BUFFERS)]
        registered = self._nixl.register_memory([_memory_descriptor(buffer) for buffer in buffers], "DRAM")
        self.metadata: bytes = self._nixl.get_partial_agent_metadata(registered, True, ["UCX"])
        """Data with which other agents can connect to this agent, and write only into its receive buffers."""
        self._free_buffers: SimpleQueue[TransferMemory] = SimpleQueue()
        for buffer in buffers:
            self._free_buffers.put(buffer)

    def add_agent(self, metadata: bytes) -> str:
        """Add another agent and return its name, which `send` needs. `metadata` must come from a trusted
        source, because NIXL does not check metadata."""
        with _convert_errors():
            name: str | bytes = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def remove_agent(self, name: str) -> None:
        """Remove another agent."""
        with contextlib.suppress(ConnectionError), _convert_errors():
            self._nixl.remove_remote_agent(name)

    def send(self, location: tuple[int, int], name: str, address: int, within_s: float) -> None:
        """Write part of the segment to an address in another agent's receive buffers.

        Raises TimeoutError if the transfer takes longer than `within_s`.

        Args:
            location: (offset, bytes) of the part in the segment.
        """
        offset, size_bytes = location
        with _convert_errors():
            way = self._nixl.initialize_xfer(
                "WRITE",
                self._nixl.get_xfer_descs([(self.segment.address + offset, size_bytes, 0)], "DRAM"),
                self._nixl.get_xfer_descs([(address, size_bytes, 0)], "DRAM"),
                name,
            )
            try:
                end_s = time.monotonic() + within_s
                state = self._nixl.transfer(way)
                while state == "PROC":
                    if time.monotonic() > end_s:
                        raise TimeoutError(f"a record has not arrived within {within_s:g} s")
                    time.sleep(_POLL_INTERVAL_S)
                    state = self._nixl.check_xfer_state(way)
            finally:
                self._nixl.release_xfer_handle(way)
        if state != "DONE":
            raise ConnectionError(f"NIXL's transfer ended as {state}")

    def progress(self) -> None:
        """Let NIXL process incoming data."""
        self._nixl.get_new_notifs()

    @contextlib.contextmanager
    def receive_buffer(self, within_s: float) -> Iterator[TransferMemory]:
        """Yield a receive buffer for a record of another agent. Raises TimeoutError if no buffer is free."""
        try:
            buffer = self._free_buffers.get(timeout=within_s)
        except Empty:
            raise TimeoutError(f"no memory for a record is free within {within_s:g} s") from None
        try:
            yield buffer
        except BaseException:
            late = threading.Timer(_QUARANTINE_S, self._free_buffers.put, [buffer])
            late.daemon = True
            late.start()
            raise
        self._free_buffers.put(buffer)


def _memory_descriptor(memory: TransferMemory) -> tuple[int, int, int, str]:
    return memory.address, memory.view.nbytes, 0, ""


@contextlib.contextmanager
def _convert_errors() -> Iterator[None]:
    """Convert NIXL's errors, whose only common class is Exception, to ConnectionError."""
    try:
        yield
    except TimeoutError:
        raise
    except Exception as e:
        raise ConnectionError(f"NIXL: {type(e).__name__} {e}") from e
