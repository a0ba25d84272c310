"""What valid requests, giant questions and slow answers must not do: end the daemon, hold up others,
or cost more than one miss."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from collaborators import kept
from time_limits import TimeLimits

from cornplug.codec import PayloadHeader, PayloadKind, encode_header
from cornplug.config import StoreConfig
from cornplug.errors import StoreUnavailable
from cornplug.local_socket import receive_frame
from cornplug.private_paths import read_secret
from cornplug.store import messages
from cornplug.store.arena import WriteFences
from cornplug.store.base import Reservation, ReserveRefusal, ReserveTerms
from cornplug.store.client import PoolStore
from cornplug.store.connection import CircuitBreaker
from cornplug.store.daemon.entry_watchers import EntryTableWriter
from cornplug.store.daemon.index import SWEEP_LIMIT, StoreIndex
from cornplug.store.daemon.placement import MAX_EXAMINED_ENTRIES
from cornplug.store.daemon.reservations import ExpiryBuckets, ReservationTimes
from cornplug.store.entry_table import NO_NOTES_PAGE, TableShape
from cornplug.store.store_stats import OTHER_APPS
from cornplug.testing.store import fill, key_of, lease, reserve

from .conftest import eventually

Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]


def _commit_many(
    store: PoolStore, keys: list[bytes], size: int, app: str = "test", meta: bytes = b"m"
) -> None:
    rooms = store.reserve([(each, size) for each in keys], ReserveTerms(app), deadline_s=60)
    held = [room for room in rooms if isinstance(room, Reservation)]
    assert len(held) == len(keys)
    assert all(store.commit([(room, meta) for room in held], deadline_s=60))


# -- no sequence of valid requests ends the daemon ------------------------------------------------


def test_client_lease_very_long_prompt_is_whole(connect: Connect, start_daemon: Start) -> None:
    """134,000 tokens of a model with 126 layers and 8 heads: 17 MB of headers, more than a frame."""
    daemon = start_daemon()
    store = connect()
    keys = [key_of(n) for n in range(2100)]
    meta = encode_header(
        PayloadHeader(PayloadKind.KV_PAGE, keys[0], "bfloat16", (8, 126, 2, 64, 128), tuple(range(1008)))
    )
    assert len(keys) * len(meta) > messages.MAX_FRAME_BYTES
    _commit_many(store, keys, 64, meta=meta)
    leases = store.lease([*keys, key_of("absent")], ttl_s=30, deadline_s=20)
    assert [each.key if each else None for each in leases] == [*keys, None]
    assert all(each.meta == meta for each in leases if each)
    store.release([each.token for each in leases if each], deadline_s=5)
    assert store.stat(deadline_s=5).leases == 0
    assert daemon.poll() is None


def test_store_stat_many_long_app_names_are_summed_up(connect: Connect, start_daemon: Start) -> None:
    daemon = start_daemon()
    store = connect()
    with pytest.raises(ValueError, match="name of an app"):
        reserve(store, "a", 64, app="x" * 10_000)
    for n in range(300):
        fill(store, n, b"x" * 64, app=f"{n:03}" + "x" * 250)
    fill(store, "large", b"x" * 1000, app="large")
    stat = store.stat(deadline_s=5)
    assert len(stat.bytes_by_app) == 257
    assert stat.bytes_by_app["large"] == 1024
    assert sum(stat.bytes_by_app.values()) == 300 * 64 + 1024
    assert stat.bytes_by_app[OTHER_APPS] == 45 * 64
    assert daemon.poll() is None


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), -1.0, 0.0, 1e6])
def test_client_lease_without_end_is_refused(connect: Connect, start_daemon: Start, ttl_s: float) -> None:
    start_daemon()
    store = connect()
    fill(store, "a", b"x")
    with pytest.raises(ValueError, match="ttl_s is"):
        lease(store, "a", ttl_s=ttl_s)


# -- nobody waits for another's large question ----------------------------------------------------


@contextmanager
def _waits_of(store: PoolStore) -> Iterator[list[float]]:
    """How long another client's small questions take meanwhile."""
    waits: list[float] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            began_s = time.perf_counter()
            store.contains_by_message([key_of("small")], deadline_s=5)
            waits.append(time.perf_counter() - began_s)
            time.sleep(0.001)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waits
    finally:
        done.set()
        thread.join()


def test_daemon_giant_requests_delay_no_other_client(
    connect: Connect, start_daemon: Start, store_config: StoreConfig
) -> None:
    """Asked by a process of their own, in the largest portions that the daemon takes, all at once."""
    start_daemon()
    small, large = connect(), connect()
    keys = [key_of(n) for n in range(40_000)]
    _commit_many(large, keys, 64)
    blob = b"".join(keys)

    def portions(make: Callable[[bytes], messages.Request]) -> bytes:
        step = 32 * messages.MAX_KEYS
        return b"".join(messages.frame(make(blob[at : at + step]), 1) for at in range(0, len(blob), step))

    asked = {  # A lease takes half a microsecond: several for each entry, to be long enough.
        "lease": (4, portions(lambda some: messages.LeaseRequest(some, 600.0))),
        "disconnect": (1, b""),
        "delete": (1, portions(messages.DeleteRequest)),
    }
    for what, (times, frame) in asked.items():
        if what != "disconnect":
            raw = _greeted(store_config)
        with _waits_of(small) as waits:
            began_s = time.perf_counter()
            sending = threading.Thread(target=raw.sendall, args=(times * frame,))
            sending.start()
            if what == "disconnect":
                sending.join()
                raw.close()
                eventually(lambda: small.stat(deadline_s=5).leases == 0)
            else:
                for _ in range(times * -(-len(keys) // messages.MAX_KEYS)):
                    assert not isinstance(_reply(raw), messages.RequestFault)
            took_s, meanwhile = time.perf_counter() - began_s, len(waits)
            sending.join()
        # Answered as one question, each of these let one or two others through. (How long the worst
        # of them waits is up to who else uses this machine's cores.)
        assert meanwhile > 8, (what, took_s, waits)
    raw.close()
    assert small.stat(deadline_s=5).entries == 0


def _greeted(config: StoreConfig) -> socket.socket:
    raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    raw.settimeout(20)
    raw.connect(str(config.socket))
    tag = messages.secret_tag(read_secret(config.secret_file))
    raw.sendall(messages.frame(messages.ClientHello(messages.PROTOCOL_VERSION, tag)))
    assert raw.recv(4096)
    return raw


def _reply(raw: socket.socket) -> messages.Reply:
    body = receive_frame(raw, limit=messages.MAX_FRAME_BYTES)
    return messages.reply_decoder.decode(messages.split_number(body)[1])


def _small_ones(entries: int, leased_every: int, room_for: int = 0) -> StoreIndex:
    """An index that is full of them, or has room for more."""
    index = StoreIndex(
        b"\1" * 16, (room_for or entries) * 4096, times=ReservationTimes(1.0), grow=lambda missing: missing
    )
    keys = [key_of(n) for n in range(entries)]
    for at in range(0, entries, 4096):
        for room in index.reserve(
            1, [(each, 4096) for each in keys[at : at + 4096]], ReserveTerms("a"), now_s=0.0
        ):
            assert isinstance(room, Reservation)
            index.commit(1, room.token, b"")
    leased = keys[::leased_every]
    for at in range(0, len(leased), 64):
        index.lease(1, leased[at : at + 64], ttl_s=1000.0, now_s=0.0)
    return index


def test_index_search_for_victims_ends(within: TimeLimits) -> None:
    """Every 64th entry is leased: nowhere is room for 2 MiB, and each ask looked at all entries."""
    index = _small_ones(16_384, 64)
    for n in range(3):
        with within.cpu(0.1):
            answers = index.reserve(
                1, [(key_of(("big", n, i)), 2 << 20) for i in range(100)], ReserveTerms("a"), now_s=0.0
            )
        assert set(answers) == {ReserveRefusal.FULL}
    assert index.stat().evictions == 0


def test_index_search_that_was_cut_goes_on_where_it_ended() -> None:
    """There is room, but far from the oldest entries."""
    entries = 4 * MAX_EXAMINED_ENTRIES
    index = _small_ones(entries, 2)
    keys = [key_of(n) for n in range(entries)]
    # Two neighbours that nobody leases any more, and that were used last.
    (again,) = index.lease(1, [keys[-2]], ttl_s=1000.0, now_s=0.0)
    index.delete([keys[-2]])
    assert again is not None
    index.end_owner(1, now_s=0.0)
    index.lease(2, keys[:-8:2], ttl_s=1000.0, now_s=0.0)
    tries = 0
    while index.reserve(2, [(key_of("big"), 8192)], ReserveTerms("a"), now_s=0.0)[0] is ReserveRefusal.FULL:
        tries += 1
        assert tries < 10, "never found"


def test_index_large_entry_among_tiny_ones_is_stored_in_the_end() -> None:
    index = StoreIndex(
        b"\1" * 16, 64 * 4 * MAX_EXAMINED_ENTRIES, times=ReservationTimes(1.0), grow=lambda missing: missing
    )
    for room in index.reserve(
        1, [(key_of(n), 64) for n in range(4 * MAX_EXAMINED_ENTRIES)], ReserveTerms("a"), now_s=0.0
    ):
        assert isinstance(room, Reservation)
        index.commit(1, room.token, b"")
    tries = 0
    while (
        index.reserve(2, [(key_of("big"), 128 * MAX_EXAMINED_ENTRIES)], ReserveTerms("a"), now_s=0.0)[0]
        is ReserveRefusal.FULL
    ):
        tries += 1
        assert tries < 10, "never found"


def test_index_released_leases_leave_nothing_behind() -> None:
    index = _small_ones(8, 1, room_for=16)
    for _ in range(2000):
        leases = index.lease(1, [key_of(n) for n in range(8)], ttl_s=3600.0, now_s=0.0)
        index.release(1, [each.token for each in leases if each], now_s=0.0)
    expiries = [one for one in set(kept(index, ExpiryBuckets)) if len(one)]
    assert [len(one) for one in expiries] == [1], "those of `_small_ones`, which have one token"
    assert len(expiries[0]._order) == 2


def test_index_sweep_ends_some_the_next_the_rest() -> None:
    index = _small_ones(SWEEP_LIMIT + 100, 1, room_for=2 * SWEEP_LIMIT)
    index.sweep(2000.0)
    assert 0 < index.stat().leases <= 100
    index.sweep(2000.0)
    assert index.stat().leases == 0


# -- slow answers ---------------------------------------------------------------------------------


def test_client_late_answer_gives_its_grants_back(connect: Connect, start_daemon: Start) -> None:
    daemon = start_daemon()
    store, other = connect(), connect()
    fill(store, "a", b"x")
    os.kill(daemon.pid, signal.SIGSTOP)
    with pytest.raises(StoreUnavailable):
        store.lease([key_of("a")], ttl_s=60, deadline_s=0.05)
    with pytest.raises(StoreUnavailable):
        store.reserve([(key_of("b"), 64)], ReserveTerms("test"), deadline_s=0.3)
    os.kill(daemon.pid, signal.SIGCONT)
    eventually(lambda: other.stat(deadline_s=5).leases + other.stat(deadline_s=5).reservations == 2)
    eventually(lambda: _works(store))
    stat = other.stat(deadline_s=5)
    assert (stat.leases, stat.reservations) == (0, 0)
    assert isinstance(reserve(other, "b", 64), Reservation)


def _works(store: PoolStore) -> bool:
    try:
        store.stat(deadline_s=5)
    except StoreUnavailable:
        return False
    return True


@pytest.mark.more
def test_client_scheduler_does_not_wait_for_background_threads(
    connect: Connect, start_daemon: Start, within: TimeLimits
) -> None:
    daemon = start_daemon()
    store = connect()
    _works(store)
    os.kill(daemon.pid, signal.SIGSTOP)
    background = threading.Thread(target=lambda: _times_out(store, 4.0))
    background.start()
    time.sleep(0.02)
    waits = []
    for _ in range(8):
        began_s = time.perf_counter()
        _times_out(store, 0.1)
        waits.append(time.perf_counter() - began_s)
    within.check(waits[0], 3.5, "not until the thread's deadline")
    within.check(sum(wait_s > 0.08 for wait_s in waits), 4, "one wait, not eight")
    background.join()


def _times_out(store: PoolStore, deadline_s: float) -> str:
    with pytest.raises(StoreUnavailable) as e:
        store.delete([key_of("a")], deadline_s=deadline_s)
    return e.value.reason


def test_threads_do_not_wait_for_each_others_answers(
    connect: Connect, slow_daemon: Callable[[float], None], within: TimeLimits
) -> None:
    """Thirty threads ask a store that takes 200 ms for an answer, all that it was asked by then at once."""
    slow_daemon(0.2)
    store = connect()
    answers: list[int] = []

    def ask() -> None:
        answers.append(store.delete([key_of("a")], deadline_s=30))

    threads = [threading.Thread(target=ask) for _ in range(30)]
    with within(4.5, "one after the other takes 6 s"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [0] * 30


def test_circuit_breaker_slow_store_is_asked_ever_less_often(
    connect: Connect, slow_daemon: Callable[[float], None], within: TimeLimits
) -> None:
    """It is alive, but 80 ms late at each answer: of 200 steps only a few wait for nothing."""
    slow_daemon(0.08)
    store = connect()
    reasons, waits = [], 0
    for _ in range(200):
        began_s = time.perf_counter()
        try:
            store.delete([key_of("a")], deadline_s=0.02)
        except StoreUnavailable as e:
            reasons.append(e.reason)
        waits += time.perf_counter() - began_s > 0.015
        time.sleep(0.01)
    assert 2 <= reasons.count("store_timeout") <= 12
    within.check(waits, 40, "each may have waited that long")
    assert store.is_connected
    assert store.delete([key_of("a")], deadline_s=30) == 0, "a caller that waits longer is served"


@pytest.fixture
def slow_daemon(store_config: StoreConfig) -> Iterator[Callable[[float], None]]:
    """A server between clients and a socket of its own, that answers `DeleteRequest` late."""
    stop = threading.Event()
    threads: list[threading.Thread] = []
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def serve(delay_s: float) -> None:
        listener.bind(str(store_config.socket))
        listener.listen()
        threads.append(threading.Thread(target=_answer_late, args=(listener, delay_s, stop)))
        threads[0].start()

    yield serve
    stop.set()
    listener.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join()
    listener.close()


def _answer_late(listener: socket.socket, delay_s: float, stop: threading.Event) -> None:
    with listener.accept()[0] as peer:
        peer.recv(4096)
        arena, fences = os.memfd_create("test"), WriteFences(shared=True)
        table = EntryTableWriter(TableShape.for_capacity(4096))
        os.truncate(arena, 4096)
        welcome = messages.frame(messages.DaemonWelcome(b"\1" * 16, 4096, NO_NOTES_PAGE))
        socket.send_fds(peer, [welcome], [arena, fences.fd, table.fd, fences.fd])
        os.close(arena)
        fences.close()
        received = bytearray()
        peer.settimeout(0.5)
        while not stop.is_set():
            try:
                data = peer.recv(1 << 16)
            except TimeoutError:
                continue
            if not data:
                return
            stop.wait(delay_s)
            received += data
            peer.setblocking(False)
            while True:
                try:
                    received += peer.recv(1 << 16)
                except BlockingIOError:
                    break
            peer.settimeout(0.5)
            while (body := messages.take_frame(received)) is not None:
                number, _ = messages.split_number(body)
                peer.sendall(messages.frame(messages.DeleteReply(0), number))


def test_circuit_breaker_counts_each_deadline_apart() -> None:
    breaker = CircuitBreaker()
    breaker.record_failure(0.1, 100.0)
    assert breaker.is_open(0.1, 100.05)
    assert not breaker.is_open(1.0, 100.05)
    assert not breaker.is_open(0.1, 100.11)
    breaker.record_failure(0.1, 100.2)
    breaker.record_failure(0.1, 100.2)
    assert breaker.is_open(0.1, 100.39)
    assert not breaker.is_open(0.1, 100.41)
    breaker.record_success(1.0)
    breaker.record_failure(0.1, 100.5)
    assert breaker.is_open(0.1, 100.9)
    breaker.record_success(0.1)
    assert not breaker.is_open(0.1, 100.9)
