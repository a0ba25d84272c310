"""NIXL agent of one process, and the ring of records in the memory that it registers."""

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
"""Longest wait of a new record for one in its place that is being sent."""
_ROOMS: Final = 2
"""Records that arrive at once."""
_PAUSE_S: Final = 0.00005
"""Between two looks at a transfer: other threads answer meanwhile."""
_QUARANTINE_S: Final = 10.0
"""How long a room stays unused after a record that did not come in time: it may come yet."""


class RecordRing:
    """The records of one member. Thread-safe.

    Args:
        room: Where records lie, each in one piece.
    """

    def __init__(self, room: memoryview) -> None:
        self._room = room
        self._end = 0
        """Where the newest record ends."""
        self._places: OrderedDict[str, tuple[int, int]] = OrderedDict()
        """Name -> (offset, bytes), the oldest first."""
        self._held: list[tuple[int, int]] = []
        self._putting = threading.Lock()
        self._changed = threading.Condition()

    def __contains__(self, name: str) -> bool:
        with self._changed:
            return name in self._places

    def put(self, name: str, record: bytes) -> None:
        """Keep a record, in the place of an older one of its name.

        Raises ValueError for a record that is larger than the room, TimeoutError if bytes in its place are
        held for longer than 2 s.
        """
        size = len(record)
        if size > self._room.nbytes:
            raise ValueError(f"a record of {size} bytes, in a room of {self._room.nbytes}")
        with self._putting, self._changed:
            self._places.pop(name, None)
            width = max(size, 1)  # an empty record, too, has a byte of its own: its age then follows from it
            start = self._end if self._end + width <= self._room.nbytes else 0
            while self._places:
                oldest, place = next(iter(self._places.items()))
                # Where the record begins in front, those behind the newest one are the oldest.
                if not (start < self._end <= place[0] or _overlap(place, (start, size))):
                    break
                del self._places[oldest]
            self._end = start + width
            free = self._changed.wait_for(
                lambda: not any(_overlap(place, (start, size)) for place in self._held), _WAIT_S
            )
            if not free:
                raise TimeoutError(f"a record has been on its way for {_WAIT_S:g} s")
            self._room[start : start + size] = record
            self._places[name] = start, size

    def delete(self, name: str) -> None:
        """Remove a record, if there is one."""
        with self._changed:
            self._places.pop(name, None)

    def get(self, name: str) -> bytes | None:
        """A copy of a record; None where there is none."""
        with self.held(name) as place:
            return None if place is None else bytes(self._room[place[0] : place[0] + place[1]])

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[tuple[int, int] | None]:
        """Where a record lies, as (offset, bytes), which nothing is written over meanwhile; None where there
        is none."""
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
    """Memory of this process, and its address.

    Pages are taken when they are used.
    """

    def __init__(self, size_bytes: int) -> None:
        pages = mmap.mmap(-1, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self.view = memoryview(pages)


class NixlAgent:
    """Thread-safe. Its calls raise ConnectionError where NIXL does not reach the other one.

    Args:
        segment_bytes: Memory whose content it sends.
        room_bytes: The largest record that it takes.
    """

    def __init__(self, *, segment_bytes: int, room_bytes: int) -> None:
        # Not above: the daemon, which imports the module of the process, does without the library.
        from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        # Its thread that takes what has come would use half of a core; `progress` does while something comes.
        config = nixl_agent_config(
            enable_prog_thread=False, sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
        )
        # A new name in each process: others keep addresses by it.
        self._nixl: Any = nixl_agent(secrets.token_hex(8), config)
        self.segment = Memory(segment_bytes)
        self._nixl.register_memory([_described(self.segment)], "DRAM")
        rooms = [Memory(room_bytes) for _ in range(_ROOMS)]
        registered = self._nixl.register_memory([_described(room) for room in rooms], "DRAM")
        self.metadata: bytes = self._nixl.get_partial_agent_metadata(registered, True, ["UCX"])
        """For others: the address of this agent, and the right to write into its rooms alone."""
        self._rooms: SimpleQueue[Memory] = SimpleQueue()
        for room in rooms:
            self._rooms.put(room)

    def join(self, metadata: bytes) -> str:
        """The name of another agent, for `send`. Its metadata come from who is trusted: NIXL does not check
        them."""
        with _as_connection_error():
            name: str | bytes = self._nixl.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else name

    def leave(self, name: str) -> None:
        """Forget another agent."""
        with contextlib.suppress(ConnectionError), _as_connection_error():
            self._nixl.remove_remote_agent(name)

    def send(self, place: tuple[int, int], name: str, address: int, within_s: float) -> None:
        """Write bytes of the segment, (offset, bytes), to an address in another agent's rooms.

        Raises TimeoutError.
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
        """Let NIXL take what has come."""
        self._nixl.get_new_notifs()

    @contextlib.contextmanager
    def room(self, within_s: float) -> Iterator[Memory]:
        """Memory for a record of another agent. Raises TimeoutError if none is free."""
        try:
            room = self._rooms.get(timeout=within_s)
        except Empty:
            raise TimeoutError(f"no room for a record within {within_s:g} s") from None
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
    """NIXL's errors, which have no class in common but Exception, by one name."""
    try:
        yield
    except TimeoutError:
        raise
    except Exception as e:
        raise ConnectionError(f"NIXL: {type(e).__name__} {e}") from e
