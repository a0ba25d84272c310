"""A writer that is stopped in the middle of an entry keeps its memory from others for a bounded time."""

from __future__ import annotations

from collections.abc import Callable

from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.testing.store import DEADLINE_S, key_of

from .conftest import ServerClock, eventually


def test_stopped_writers_room_is_free_again_within_two_minutes(
    serve_in_thread: Callable[..., StoreServer], connect: Callable[..., PoolStore], server_clock: ServerClock
) -> None:
    """A process that got SIGSTOP: its connection stays, and it says nothing."""
    serve_in_thread(size_bytes=1 << 20)
    stopped, other = connect(), connect()
    eventually(lambda: stopped.is_connected and other.is_connected)
    (room,) = stopped.reserve([(key_of("a"), 1 << 20)], ReserveTerms(""), deadline_s=DEADLINE_S)
    assert isinstance(room, Reservation)
    server_clock.ahead_s += 31
    assert other.reserve([(key_of("b"), 1 << 20)], ReserveTerms(""), deadline_s=DEADLINE_S) == [
        ReserveRefusal.FULL
    ]
    server_clock.ahead_s += 61
    (free,) = other.reserve([(key_of("b"), 1 << 20)], ReserveTerms(""), deadline_s=DEADLINE_S)
    assert isinstance(free, Reservation)
    assert stopped.commit([(room, b"")], deadline_s=DEADLINE_S) == [False]
