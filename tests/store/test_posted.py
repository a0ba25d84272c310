"""Requests whose answers are taken later: none waits, and what comes too late is given back."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from cornplug.errors import StoreUnavailable
from cornplug.store import messages
from cornplug.store.base import CompletedRequest, PostedRequest, Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.memory import MemoryStore
from cornplug.testing.store import contains, fill
from cornplug.testing.store_writing import key_of

from .conftest import eventually

Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]
T = TypeVar("T")


def taken(posted: PostedRequest[T], within_s: float = 30.0) -> T:
    end_s = time.monotonic() + within_s
    while (answer := posted.poll()) is None:
        assert time.monotonic() < end_s, "no answer"
        time.sleep(0.001)
    return answer


def reserve(store: PoolStore, *names: object, deadline_s: float = 5.0) -> PostedRequest[list[object]]:
    entries = [(key_of(name), 100) for name in names]
    return store.post_reserve(entries, ReserveTerms("test"), deadline_s=deadline_s)  # type: ignore[return-value]


def test_pool_store_posts_and_memory_store_answers_at_once(connect: Connect, start_daemon: Start) -> None:
    start_daemon()
    assert not isinstance(reserve(connect(), "a"), CompletedRequest)
    (room,) = taken(reserve(MemoryStore(capacity_bytes=1 << 20).connect(), "a"), within_s=0)  # type: ignore[arg-type]
    assert isinstance(room, Reservation)


def test_posted_reserve_and_commit_do_as_reserve_and_commit(connect: Connect, start_daemon: Start) -> None:
    start_daemon()
    store = connect()
    fill(store, "there", b"x")
    room, refusal = taken(reserve(store, "a", "there"))
    assert refusal is ReserveRefusal.PRESENT
    assert isinstance(room, Reservation)
    store.view(room.location, writable=True)[:] = bytes(100)
    gone = Reservation(room.token + 1000, key_of("gone"), room.location)
    assert taken(store.post_commit([(room, b"meta"), (gone, b"meta")], deadline_s=5)) == [True, False]
    assert contains(store, "a") == b"\1"


def test_posted_reserve_of_many_keys_is_answered_for_all(connect: Connect, start_daemon: Start) -> None:
    start_daemon()
    store = connect()
    names = range(2 * messages.MAX_KEYS + 7)
    rooms = taken(reserve(store, *names))
    assert [room.key for room in rooms if isinstance(room, Reservation)] == [key_of(name) for name in names]


@pytest.mark.more
def test_posted_requests_of_stopped_daemon_never_wait_and_give_back(
    connect: Connect, start_daemon: Start
) -> None:
    daemon = start_daemon()
    store = connect()
    fill(store, "x", b"x")
    os.kill(daemon.pid, signal.SIGSTOP)
    posted = reserve(store, "a", deadline_s=3.0)
    assert posted.poll() is None, "not after the deadline"
    with pytest.raises(StoreUnavailable) as late:
        taken(posted, within_s=60)
    assert late.value.reason == "store_timeout"
    with pytest.raises(StoreUnavailable) as slow:
        reserve(store, "b", deadline_s=0.2)
    assert slow.value.reason == "store_slow"
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: store.stat(deadline_s=5).reservations == 0)
    assert store.is_connected


def test_posted_answer_that_came_in_time_counts_however_late_it_is_taken(
    connect: Connect, start_daemon: Start
) -> None:
    """A step may be longer than the deadline; other calls of the connection go on meanwhile."""
    start_daemon()
    store = connect()
    posted = reserve(store, "a", deadline_s=1.0)
    time.sleep(1.2)
    assert contains(store, "a") == b"\0"
    assert isinstance(taken(posted)[0], Reservation)


def test_posted_request_of_killed_daemon_is_down(connect: Connect, start_daemon: Start) -> None:
    daemon = start_daemon()
    store = connect()
    os.kill(daemon.pid, signal.SIGSTOP)
    posted = reserve(store, "a")
    commit = store.post_commit([], deadline_s=5)
    daemon.kill()
    daemon.wait()
    for each in (posted, commit):
        with pytest.raises(StoreUnavailable) as down:
            taken(each)  # type: ignore[arg-type]
        assert down.value.reason == "store_down"
