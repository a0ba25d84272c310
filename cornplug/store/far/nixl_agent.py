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

_WAIT_S: Final = 2.0
"""Maximum time in seconds that a new record waits until the transfer of an older record in the same location
is complete."""
_ROOMS: Final = 2
"""Number of receive buffers, each of which can receive one record at a time."""
_PAUSE_S: Final = 0.00005
"""Time between two checks of a transfer in seconds, during which other threads run."""
_QUARANTINE_S: Final = 10.0
"""Seconds for which a receive buffer stays unused if its record was late, because the record may still
arrive."""


class RecordRing:
    """Ring buffer with the records of one member (a host of the far store). A new record overwrites the
    oldest records. Thread-safe.

    Args:
        room: Memory for the records. Each record is contiguous.
    """

    def __init__(self, room: memoryview) -> None:
        self._room = room
        self._end = 0
        """Offset at which the newest record ends."""
        self._places: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """(offset, bytes) of each record by name, oldest first."""
        self._held: list[tuple[int, int]] = []
        self._putting = threading.Lock()
        self._changed = threading.Condition()

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._places

    def put(self, name: str, record: bytes) -> None:
        """Store a record, and replace an older record of the same name.

        Raises ValueError if the record is larger than the ring. Raises TimeoutError if an older record in the
        same location is held for longer than 2 s.
        """
        size = len(record)
        if size > self._room.nbytes:
            raise ValueError(f"a record of {size} bytes exceeds the memory of {self._room.nbytes} bytes")
        with self._putting, self._changed:
            self._places.pop(name, None)
            width = max(size, 1)  # An empty record also has its own byte, so that its position shows its age.
            start = self._end if self._end + width <= self._room.nbytes else 0
            while self._places:
                oldest, place = next(iter(self._places.items()))
                # If the new record starts again at the front, the records behind the newest record are the
                # oldest.
                if not (start < self._end <= place[0] or _overlap(place, (start, size))):
                    break
                del self._places[oldest]
            self._end = start + width
            free = self._changed.wait_for(
                lambda: not any(_overlap(place, (start, size)) for place in self._held), _WAIT_S
            )
            if not free:
                raise TimeoutError(f"the transfer of a record has taken {_WAIT_S:g} s")
            self._room[start : start + size] = record
            self._places[name] = start, size

    def delete(self, name: str) -> None:
        """Delete a record, if it exists."""
        with self._changed:
            self._places.pop(name, None)

    def get(self, name: str) -> bytes | None:
        """Return a copy of a record, or None if it does not exist."""
        with self.held(name) as place:
            return None if place is None else bytes(self._room[place[0] : place[0] + place[1]])

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[tuple[int, int] | None]:
        """Yield the (offset, bytes) of a record, or None if it does not exist. The record is not overwritten
        during the context."""
        with self._changed:
            place = self._places.get(name)
            if place is not None:
                self._held.append(place)
        try:
            yield place
        finally:
            if place is not None:
                with self._changed:
                    self._held.remove(place)
                    self._changed.notify_all()


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[0] + max(other[1], 1) and other[0] < one[0] + max(one[1], 1)


class Memory:
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
        room_bytes: Maximum size of a record that the agent receives.
    """

    def __init__(self, *, segment_bytes: int, room_bytes: int) -> None:
        # Imported here because the daemon also imports this module, and does not need the library.
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        # NIXL's progress thread would use half of a core. `progress` is called during transfers instead.
        config = nixl_agent_config(
            enable_prog_thread=False, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        # Each process has a new name, because other agents cache addresses by name.
        self._nixl: Any = nixl_agent(secrets.token_hex(8), config)
        self.segment = Memory(segment_bytes)
        self._nixl.register_memory([_described(self.segment)], "DRAM")
        rooms = [Memory(room_bytes) for _ in range(_ROOMS)]
        registered = self._nixl.register_memory([_described(room) for room in rooms], "DRAM")
        self.metadata: bytes = self._nixl.get_partial_agent_metadata(registered, True, ["UCX"])
        """Data with which other agents can connect to this agent, and write only into its receive buffers."""
        self._rooms: SimpleQueue[Memory] = SimpleQueue()
        for room in rooms:
            self._rooms.put(room)

    def join(self, metadata: bytes) -> str:
        """Add another agent and return its name, which `send` needs. `metadata` must come from a trusted
        source, because NIXL does not check metadata."""
        with _as_connection_error():
            name: str | bytes = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def leave(self, name: str) -> None:
        """Remove another agent."""
        with contextlib.suppress(ConnectionError), _as_connection_error():
            self._nixl.remove_remote_agent(name)

    def send(self, place: tuple[int, int], name: str, address: int, within_s: float) -> None:
        """Write part of the segment to an address in another agent's receive buffers.

        Raises TimeoutError if the transfer takes longer than `within_s`.

        Args:
            place: (offset, bytes) of the part in the segment.
        """
        offset, size_bytes = place
        with _as_connection_error():
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
                    time.sleep(_PAUSE_S)
                    state = self._nixl.check_xfer_state(way)
            finally:
                self._nixl.release_xfer_handle(way)
        if state != "DONE":
            raise ConnectionError(f"NIXL's transfer ended as {state}")

    def progress(self) -> None:
        """Let NIXL process incoming data."""
        self._nixl.get_new_notifs()

    @contextlib.contextmanager
    def room(self, within_s: float) -> Iterator[Memory]:
        """Yield a receive buffer for a record of another agent. Raises TimeoutError if no buffer is free."""
        try:
            room = self._rooms.get(timeout=within_s)
        except Empty:
            raise TimeoutError(f"no memory for a record is free within {within_s:g} s") from None
        try:
            yield room
        except BaseException:
            late = threading.Timer(_QUARANTINE_S, self._rooms.put, [room])
            late.daemon = True
            late.start()
            raise
        self._rooms.put(room)


def _described(memory: Memory) -> tuple[int, int, int, str]:
    return memory.address, memory.view.nbytes, 0, ""


@contextlib.contextmanager
def _as_connection_error() -> Iterator[None]:
    """Convert NIXL's errors, whose only common class is Exception, to ConnectionError."""
    try:
        yield
    except TimeoutError:
        raise
    except Exception as e:
        raise ConnectionError(f"NIXL: {type(e).__name__} {e}") from e
