"""Hits of the index beside an LRU that ignores place: payloads lie in one piece, victims need neighbours."""

from __future__ import annotations

import bisect
import itertools
import random
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from unittest import mock

import pytest

from cornplug.store.base import KEY_BYTES, Reservation, ReserveTerms
from cornplug.store.daemon import placement
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes

KIB: Final = 1 << 10
MIB: Final = 1 << 20
CAPACITY: Final = 1 << 30
PAYLOADS: Final = 5000
REQUESTS: Final = 10_000


def _five_sizes(draw: random.Random) -> int:
    return draw.choice([64 * KIB, 256 * KIB, MIB, 2 * MIB, 8 * MIB]) + draw.randrange(4096)


def _small_and_large(draw: random.Random) -> int:
    return draw.randrange(64 * KIB, 512 * KIB) if draw.random() < 0.9 else draw.randrange(32 * MIB, 64 * MIB)


def _pages_and_images(draw: random.Random) -> int:
    return 8 * MIB if draw.random() < 0.5 else draw.randrange(1, 40) * 144 * KIB


SIZES: Final[dict[str, Callable[[random.Random], int]]] = {
    "five sizes": _five_sizes,
    "many small, few large": _small_and_large,
    "16 KiB to 32 MiB": lambda draw: int(2 ** draw.uniform(14, 25)),
    "pages of 8 MiB and images": _pages_and_images,
    "pages of two models": lambda draw: draw.choice([8 * MIB, 20 * MIB]),
}


def requests(sizes: Callable[[random.Random], int]) -> Iterator[tuple[int, int]]:
    """(payload, bytes) of requests whose popularity follows Zipf's law with exponent 0.9."""
    draw = random.Random(1)
    sums = list(itertools.accumulate(1 / (rank + 1) ** 0.9 for rank in range(PAYLOADS)))
    payloads = draw.sample(range(PAYLOADS), PAYLOADS)
    for _ in range(REQUESTS):
        payload = payloads[bisect.bisect_left(sums, draw.random() * sums[-1])]
        yield payload, sizes(random.Random(payload))


def hits_of_lru(asked: Sequence[tuple[int, int]]) -> int:
    """Bytes that are found in an LRU of so many bytes, wherever they lie."""
    held: OrderedDict[int, int] = OrderedDict()
    used = found = 0
    for payload, size in asked:
        if payload in held:
            held.move_to_end(payload)
            found += size
            continue
        while used + size > CAPACITY:
            used -= held.popitem(last=False)[1]
        held[payload] = size
        used += size
    return found


def hits_of_index(asked: Sequence[tuple[int, int]]) -> int:
    """Bytes that are found in a store of as many, whose clients write what is absent."""
    index = StoreIndex(bytes(16), CAPACITY, times=ReservationTimes(0.0), grow=lambda missing: missing)
    found = 0
    for payload, size in asked:
        key = payload.to_bytes(KEY_BYTES, "big")
        if index.contains([key]) == b"\1":
            (lease,) = index.lease(1, [key], ttl_s=1.0, now_s=0.0)
            assert lease is not None
            index.release(1, [lease.token], now_s=0.0)
            found += size
            continue
        (room,) = index.reserve(1, [(key, size)], ReserveTerms("a"), now_s=0.0)
        if isinstance(room, Reservation):
            index.commit(1, room.token, b"")
    return found


@pytest.mark.more
@pytest.mark.parametrize("sizes", SIZES)
def test_byte_hits_are_those_of_an_lru_that_ignores_place(sizes: str) -> None:
    asked = list(requests(SIZES[sizes]))
    assert hits_of_index(asked) >= 0.98 * hits_of_lru(asked)


def test_byte_hits_of_first_run_alone_are_fewer() -> None:
    asked = list(requests(SIZES["16 KiB to 32 MiB"]))
    with mock.patch.multiple(placement, _MIN_RUNS=1, _MAX_RUNS=1):
        assert hits_of_index(asked) < 0.97 * hits_of_lru(asked)
