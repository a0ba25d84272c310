"""A far store that is changed, stopped, killed, slow or gone: counted misses, and near answers as before."""

from __future__ import annotations

import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from time_limits import TimeLimits

from cornplug.store.base import Tier
from cornplug.store.payload import recall_and_wait
from cornplug.testing.store import DEADLINE_S, key_of
from devkit.far_servers import RedisServer

from ..conftest import eventually
from ..disk.disk_stage import KIB, get, payload_of, put
from .far_stage import Host, client_of
from .test_far_tier import found

Hosts = Callable[..., Host]
ENTRIES = 300


def records(share: Path) -> list[Path]:
    return sorted((share / "cp1").iterdir())


def damage(share: Path, how: str) -> None:
    """Change every record."""
    chance, files = random.Random(how), records(share)
    data = [file.read_bytes() for file in files]
    for i, file in enumerate(files):
        changed = bytearray(data[i])
        if how == "flip":
            changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        elif how == "truncate":
            del changed[chance.randrange(len(changed)) :]
        else:
            changed = bytearray(data[i - 1])
        file.write_bytes(changed)


@pytest.mark.parametrize(
    "how", ["flip", *(pytest.param(how, marks=pytest.mark.more) for how in ("truncate", "swap"))]
)
def test_far_tier_changed_records_are_counted_misses_only(host: Hosts, share: Path, how: str) -> None:
    url = f"file://{share}"
    first, second = host(url, size_bytes=16 << 20), host(url, size_bytes=16 << 20)
    for name in range(ENTRIES):
        put(first.store, name, 4 * KIB)
    eventually(lambda: first.written(ENTRIES))
    damage(share, how)
    keys = [key_of(name) for name in range(ENTRIES)]

    def sought() -> bool:
        second.store.start_far_lookup(keys)  # again: a busy far store may have answered some too late
        return second.far().asks.get("found", 0) >= ENTRIES

    eventually(sought)
    tiers = recall_and_wait(second.store, keys, within_s=60, deadline_s=DEADLINE_S)
    assert tiers == bytes([Tier.ABSENT] * ENTRIES)
    assert second.far().reads == {"damaged": ENTRIES}
    put(second.store, 0, 4 * KIB)
    eventually(lambda: second.written(1), within_s=60)
    assert found(host(url), 0) == payload_of(0, 4 * KIB), "a recomputed entry takes the damaged one's place"


def test_far_tier_replayed_record_of_the_same_key_is_that_entry(host: Hosts, share: Path) -> None:
    url = f"file://{share}"
    first = host(url)
    put(first.store, "a")
    eventually(lambda: first.written(1))
    (file,) = records(share)
    old = file.read_bytes()
    first.store.delete([key_of("a")], deadline_s=DEADLINE_S)
    put(first.store, "a")
    eventually(lambda: first.written(2))
    assert file.read_bytes() != old
    file.write_bytes(old)
    assert found(host(url), "a") == payload_of("a", 20 * KIB)


def near_is_quick(one: Host, name: object, within: TimeLimits) -> None:
    """Reads of entries in memory, and misses, take no time that far stores could cause."""
    waits = []
    for number in range(50):
        began_s = time.monotonic()
        assert get(one.store, name) is not None
        assert get(one.store, ("none", number), recall_s=0.1) is None
        waits.append(time.monotonic() - began_s)
    within.check(statistics.median(waits), 0.1, "each of 50 would wait for what it may")


def test_far_tier_stopped_server_costs_near_nothing_and_is_found_again(
    host: Hosts, redis: RedisServer, within: TimeLimits
) -> None:
    first, second = host(redis.url), host(redis.url)
    put(first.store, "a")
    put(second.store, "near")
    eventually(lambda: first.written(1) and second.written(1))
    redis.freeze()
    second.store.start_far_lookup([key_of("x")])
    eventually(lambda: not second.store.is_far_up, within_s=10)
    near_is_quick(second, "near", within)
    redis.resume()
    eventually(lambda: second.store.is_far_up, within_s=60)
    time.sleep(1.1)  # until the answer of before is forgotten
    assert found(second, "a") == payload_of("a", 20 * KIB)


def test_far_tier_killed_server_costs_near_nothing_and_is_found_again_empty(
    host: Hosts, redis: RedisServer, within: TimeLimits
) -> None:
    first, second = host(redis.url), host(redis.url)
    put(first.store, "a")
    put(second.store, "near")
    eventually(lambda: first.written(1) and second.written(1))
    second.store.start_far_lookup([key_of("a")])
    eventually(lambda: second.store.tiers([key_of("a")], deadline_s=DEADLINE_S) == bytes([Tier.DISK]))
    redis.kill()
    second.store.start_far_lookup([key_of("x")])
    eventually(lambda: not second.store.is_far_up, within_s=10)
    eventually(lambda: second.store.tiers([key_of("a")], deadline_s=DEADLINE_S) == bytes([Tier.ABSENT]))
    near_is_quick(second, "near", within)
    redis.start()
    eventually(lambda: second.store.is_far_up and first.store.is_far_up, within_s=60)
    put(first.store, "b")
    eventually(lambda: first.written(2), within_s=60)
    assert found(second, "b") == payload_of("b", 20 * KIB)


def test_far_tier_record_that_went_meanwhile_is_a_miss(host: Hosts, redis: RedisServer) -> None:
    first, second = host(redis.url), host(redis.url)
    put(first.store, "a")
    eventually(lambda: first.written(1))
    second.store.start_far_lookup([key_of("a")])
    eventually(lambda: second.store.tiers([key_of("a")], deadline_s=DEADLINE_S) == bytes([Tier.DISK]))
    client_of(redis).flushall()
    assert get(second.store, "a") is None
    assert second.far().reads == {"gone": 1}


@pytest.fixture
def deaf() -> Iterator[int]:
    """The port of a server that takes connections, and answers after 1 s with what is no answer."""
    listener = socket.create_server(("127.0.0.1", 0))
    ended = threading.Event()

    def answer(sock: socket.socket) -> None:
        with sock:
            sock.recv(1 << 16)
            ended.wait(1)
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    def serve() -> None:
        while not ended.is_set():
            sock, _ = listener.accept()
            threading.Thread(target=answer, args=(sock,)).start()

    thread = threading.Thread(target=serve)
    thread.start()
    yield listener.getsockname()[1]
    ended.set()
    socket.create_connection(listener.getsockname()).close()
    thread.join()
    listener.close()


def test_far_tier_slow_server_of_another_protocol_is_left_alone(
    host: Hosts, deaf: int, within: TimeLimits
) -> None:
    one = host(f"valkey://127.0.0.1:{deaf}/0", answer=False)
    put(one.store, "near")
    near_is_quick(one, "near", within)
    assert not one.store.is_far_up
    assert (one.far().queued, one.far().writes) == (1, {})
    assert one.daemon.poll() is None
