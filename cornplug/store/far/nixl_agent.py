"""NIXL's agent of one process: memory that others may write into, and the way into theirs."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import secrets
import threading
import time
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any, Final

_ROOMS: Final = 2
"""Records that arrive at once."""
_PAUSE_S: Final = 0.00005
"""Between two looks at a transfer: other threads answer meanwhile."""
_QUARANTINE_S: Final = 10.0
"""How long a room stays unused after a record that did not come in time: it may come yet."""


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
