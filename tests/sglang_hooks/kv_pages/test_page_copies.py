"""Tiles between host pools of every layout and pages of the store: the bytes and checksums of `RankPages`."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cornplug.engine_common.rank_pages import RankPages, page_header
from cornplug.errors import CodecError, StoreUnavailable
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.sglang_hooks.kv_pages import page_copies
from cornplug.sglang_hooks.kv_pages.layout import host_pages
from cornplug.sglang_hooks.kv_pages.page_copies import PageCopies, PageSlice, copy_thread_count
from cornplug.store.base import Lease, Reservation, ReserveTerms
from cornplug.store.memory import MemoryConnection, MemoryStore

from ..kv_rig import DIM, HEADS, LAYERS, LAYOUTS, device_pool, host_pool, latent_pool, page_of

PAGE = PageGeometry(page_tokens=64, heads=HEADS, layers=LAYERS, dim=DIM, dtype="bfloat16")
WHOLE = slice(0, 64)
# The whole page, tiles of three heads and one, and each segment by itself.
TILES = (1 << 20, 3 * PAGE.segment_bytes, 1)


def never() -> bool:
    return False


class HostRank:
    """A rank's host pool of one layout, and a connection to a store."""

    def __init__(
        self,
        store: MemoryStore,
        layout: str = "page_first",
        *,
        heads: range = range(HEADS),
        page_size: int = 64,
        threads: int = 1,
        page: PageGeometry = PAGE,
    ) -> None:
        self.pages = host_pages(host_pool(device_pool(page_size, heads=len(heads)), layout))
        self.store: MemoryConnection = store.connect()
        held = RankSlice(heads=heads, layers=range(LAYERS), writes=True)
        self.mine = RankPages(page, held, self.store)
        self.copies = PageCopies(self.mine, self.pages, threads=threads)

    def fill(self, slot: int, seed: int) -> torch.Tensor:
        """Put this rank's heads of a page of noise into the host pool; the page."""
        page = page_of(self.mine.page, seed)
        self.pages.page(slot).copy_(page[self.mine.rank_slice.heads.start : self.mine.rank_slice.heads.stop])
        return page

    def reserve(self, *keys: int) -> list[Reservation]:
        entries = [(bytes([key]) * 32, self.mine.page.page_bytes) for key in keys]
        found = self.store.reserve(entries, ReserveTerms("test"), deadline_s=1)
        return [one for one in found if isinstance(one, Reservation)]

    def commit(self, reservation: Reservation, sums: dict[int, int]) -> Lease:
        header = page_header(reservation.key, self.mine.page, sums)
        assert self.store.commit([(reservation, header)], deadline_s=1) == [True]
        lease = self.store.lease([reservation.key], ttl_s=60, deadline_s=1)[0]
        assert lease is not None
        return lease

    def part(self, slot: int) -> list[PageSlice]:
        return [PageSlice(WHOLE, self.copies.host_page(slot))]


def stored(store: MemoryStore, reservation: Reservation) -> bytes:
    at = reservation.location
    return bytes(store.arena[at.offset : at.offset + at.size])


def bytes_of(page: torch.Tensor) -> bytes:
    return page.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(capacity_bytes=16 << 20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_copies_at_equals_host_page(store: MemoryStore, layout: str) -> None:
    rank = HostRank(store, layout, page_size=16)
    buffer = rank.pages.pool.kv_buffer
    buffer.view(torch.int16).copy_((torch.arange(buffer.numel()) % 30011).view(buffer.shape))
    last = rank.pages.pool.size - 16
    for slot in (0, 16, 272, last):
        assert rank.copies.host_page(slot).tobytes() == bytes_of(rank.pages.page(slot))
    rank.copies.host_page(32)[2, 1, 0, 5] = np.void(b"\1" * 2 * DIM)
    assert (rank.pages.page(32)[2, 1, 0, 5].view(torch.int16) == 0x0101).all()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_page_copies_at_equals_host_page_of_latents(store: MemoryStore, layout: str) -> None:
    pages = host_pages(host_pool(latent_pool(16), layout))
    geometry = PageGeometry(page_tokens=64, heads=1, layers=LAYERS, dim=16, dtype="float32", planes=1)
    held = RankSlice(heads=range(1), layers=range(LAYERS), writes=True)
    copies = PageCopies(RankPages(geometry, held, store.connect()), pages)
    pages.pool.kv_buffer.normal_()
    for slot in (0, 48, pages.pool.size - 16):
        assert copies.host_page(slot).tobytes() == bytes_of(pages.page(slot))


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_page_copies_at_slot_inside_page_equals_host_page(store: MemoryStore, layout: str) -> None:
    rank = HostRank(store, layout)
    rank.pages.pool.kv_buffer.normal_()
    assert rank.copies.host_page(17).tobytes() == bytes_of(rank.pages.page(17))


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("heads", [range(HEADS), range(1, 4)], ids=["all", "three"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_copies_write_equals_rank_pages(
    store: MemoryStore, layout: str, heads: range, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As every release has written them: keys, bytes and checksums of stored pages stay as they are."""
    monkeypatch.setattr(page_copies, "_TILE_BYTES", tile_bytes)
    rank = HostRank(store, layout, heads=heads)
    pages = [rank.fill(slot, seed) for seed, slot in enumerate((128, 0))]
    reservations, others = rank.reserve(1, 2), rank.reserve(3, 4)
    found = rank.copies.write(
        [
            (rank.part(slot), reservation.location)
            for slot, reservation in zip((128, 0), reservations, strict=True)
        ],
        never,
    )
    for sums, page, reservation, other in zip(found, pages, reservations, others, strict=True):
        part = page[heads.start : heads.stop].contiguous()
        assert sums == rank.mine.write(part, other.location)
        assert stored(store, reservation) == stored(store, other)
        assert set(sums) == set(heads)


def test_page_copies_write_sums_before_the_room_is_touched(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sum of the room would call the bytes of a late writer right."""
    rank, untouched, digest = HostRank(store), [], page_copies.xxhash.xxh3_64_intdigest
    rank.fill(0, seed=1)
    (reservation,) = rank.reserve(1)

    def noted(segment: memoryview) -> int:
        untouched.append(not any(stored(store, reservation)))
        return digest(segment)

    monkeypatch.setattr(page_copies.xxhash, "xxh3_64_intdigest", noted)
    assert rank.copies.write([(rank.part(0), reservation.location)], never)[0]
    assert untouched == [True] * HEADS
    assert any(stored(store, reservation))


@pytest.mark.parametrize("tile_bytes", TILES)
@pytest.mark.parametrize("runs", [1, LAYERS])
@pytest.mark.parametrize("heads", [range(HEADS), range(1, 4)], ids=["all", "three"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_copies_read_pages_of_any_writer(
    store: MemoryStore,
    layout: str,
    heads: range,
    runs: int,
    tile_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of an engine whose pipeline stages sum each layer by itself."""
    monkeypatch.setattr(page_copies, "_TILE_BYTES", tile_bytes)
    writer = HostRank(store, page=dataclasses.replace(PAGE, layer_runs=runs))
    pages = [writer.fill(0, seed) for seed in (1, 2)]
    reservations = writer.reserve(1, 2)
    leases = [
        writer.commit(reservation, writer.mine.write(page, reservation.location))
        for reservation, page in zip(reservations, pages, strict=True)
    ]
    rank = HostRank(store, layout, heads=heads)
    targets = [rank.part(slot) for slot in (64, 192)]
    assert rank.copies.read(list(zip(leases, targets, strict=True)), never) == (2, None)
    for slot, page in zip((64, 192), pages, strict=True):
        assert torch.equal(rank.pages.page(slot), page[heads.start : heads.stop])


def test_page_copies_read_of_some_layers_verifies_whole_segments(store: MemoryStore) -> None:
    """A rank of another pipeline stage than the writer's segments are made of."""
    writer = HostRank(store)
    page = writer.fill(0, 1)
    (reservation,) = writer.reserve(1)
    lease = writer.commit(reservation, writer.mine.write(page, reservation.location))
    held = RankSlice(heads=range(2, 4), layers=range(1, 3), writes=True)
    there = torch.zeros(2, 2, 2, 64, DIM, dtype=torch.bfloat16)
    copies = PageCopies(RankPages(PAGE, held, writer.store), writer.pages)
    parts = [PageSlice(WHOLE, copies.as_rows(there))]
    assert copies.read([(lease, parts)], never) == (1, None)
    assert torch.equal(there, page[2:4, 1:3])
    # A layer that this rank does not have.
    store.arena[reservation.location.offset + 2 * PAGE.segment_bytes] ^= 1
    whole, error = copies.read([(lease, parts)], never)
    assert whole == 0
    assert isinstance(error, CodecError)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_page_copies_of_small_parts_meet_in_one_page(store: MemoryStore, layout: str) -> None:
    rank = HostRank(store, layout, page_size=16)
    page, slots = page_of(PAGE, 1), (48, 16, 256, 0)
    insides = [slice(16 * i, 16 * i + 16) for i in range(4)]
    for inside, slot in zip(insides, slots, strict=True):
        rank.pages.page(slot).copy_(page[:, :, :, inside])
    parts = [
        PageSlice(inside, rank.copies.host_page(slot)) for inside, slot in zip(insides, slots, strict=True)
    ]
    (reservation,) = rank.reserve(1)
    (sums,) = rank.copies.write([(parts, reservation.location)], never)
    assert stored(store, reservation) == bytes_of(page)
    assert sums is not None
    lease = rank.commit(reservation, sums)
    for slot in slots:
        rank.pages.page(slot).zero_()
    # One of them is not asked for.
    assert rank.copies.read([(lease, [*parts[:2], parts[3]])], never) == (1, None)
    for inside, slot in zip(insides, slots, strict=True):
        expected = torch.zeros_like(page[:, :, :, inside]) if slot == 256 else page[:, :, :, inside]
        assert torch.equal(rank.pages.page(slot), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("tile_bytes", [1 << 20, 1])
def test_page_copies_read_of_corrupt_page_ends_there(
    store: MemoryStore, threads: int, tile_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copies, "_TILE_BYTES", tile_bytes)
    rank = HostRank(store, threads=threads)
    reservations = rank.reserve(*range(1, 7))
    for i in range(6):
        rank.fill(64 * i, seed=i)
    sums = rank.copies.write(
        [(rank.part(64 * i), reservation.location) for i, reservation in enumerate(reservations)], never
    )
    leases = [
        rank.commit(reservation, one) for reservation, one in zip(reservations, sums, strict=True) if one
    ]
    store.arena[reservations[3].location.offset + PAGE.page_bytes - 1] ^= 1
    jobs = [(lease, rank.part(64 * i)) for i, lease in enumerate(leases)]
    rank.pages.pool.kv_buffer.zero_()
    whole, error = rank.copies.read(jobs, never)
    assert whole == 3
    assert isinstance(error, CodecError)
    assert error.reason == "corrupt"
    # The damaged head went nowhere.
    assert rank.pages.page(128)[-1].any()
    assert not rank.pages.page(192)[-1].any()


def test_page_copies_write_of_ended_reservation_writes_others(store: MemoryStore) -> None:
    rank = HostRank(store, threads=2)
    reservations = rank.reserve(1, 2, 3)
    rank.store.release([reservations[1].token], deadline_s=1)
    before = stored(store, reservations[1])
    found = rank.copies.write([(rank.part(0), reservation.location) for reservation in reservations], never)
    assert [bool(sums) for sums in found] == [True, False, True]
    assert found[1] == {}
    assert stored(store, reservations[1]) == before


@pytest.mark.parametrize("threads", [1, 2])
def test_page_copies_begin_no_page_after_stop(store: MemoryStore, threads: int) -> None:
    rank, asked = HostRank(store, threads=threads), iter(range(9))
    reservations = rank.reserve(*range(1, 7))
    found = rank.copies.write(
        [(rank.part(0), reservation.location) for reservation in reservations], lambda: next(asked) >= 3
    )
    assert sorted(sums is None for sums in found) == [False] * 3 + [True] * 3
    leases = [
        rank.commit(reservation, sums)
        for reservation, sums in zip(reservations, found, strict=True)
        if sums is not None
    ]
    assert rank.copies.read([(lease, rank.part(64)) for lease in leases], lambda: True) == (0, None)


class MeetingStore:
    """A store whose views wait until two threads ask for one."""

    def __init__(self, inner: MemoryConnection) -> None:
        self._inner, self._meeting = inner, threading.Barrier(2)

    def view(self, location: Any, *, writable: bool = False) -> memoryview:
        self._meeting.wait(60)
        return self._inner.view(location, writable=writable)


def test_page_copies_of_one_call_run_side_by_side(store: MemoryStore) -> None:
    rank = HostRank(store)
    met: Any = MeetingStore(rank.store)
    copies = PageCopies(dataclasses.replace(rank.mine, store=met), rank.pages, threads=2)
    reservations = rank.reserve(1, 2)
    pages = [rank.fill(64 * i, seed=i) for i in range(2)]
    found = copies.write(
        [(rank.part(64 * i), reservation.location) for i, reservation in enumerate(reservations)], never
    )
    for reservation, sums, page in zip(reservations, found, pages, strict=True):
        assert stored(store, reservation) == bytes_of(page)
        assert sums == rank.mine.write(page, reservation.location)
    copies.close()


def test_page_copies_fault_in_thread_reaches_caller(store: MemoryStore) -> None:
    """A bug is no page that could not be written; no thread is left running."""
    rank = HostRank(store, threads=3)
    broken: Sequence[Any] = [(WHOLE, None)]
    reservations = rank.reserve(*range(1, 5))
    with pytest.raises(TypeError):
        rank.copies.write([(broken, reservation.location) for reservation in reservations], never)
    assert rank.copies.write([(rank.part(0), reservations[0].location)], never)[0]


def test_page_copies_after_close_copy_on_callers_thread(store: MemoryStore) -> None:
    rank = HostRank(store, threads=3)
    rank.copies.close()
    reservations = rank.reserve(1, 2, 3)
    found = rank.copies.write([(rank.part(0), reservation.location) for reservation in reservations], never)
    assert all(found)


def test_page_copies_read_from_ended_store_is_error(store: MemoryStore) -> None:
    rank, other = HostRank(store), MemoryStore(capacity_bytes=1 << 20)
    (reservation,) = rank.reserve(1)
    (sums,) = rank.copies.write([(rank.part(0), reservation.location)], never)
    assert sums
    lease = rank.commit(reservation, sums)
    copies = PageCopies(dataclasses.replace(rank.mine, store=other.connect()), rank.pages)
    whole, error = copies.read([(lease, rank.part(0))], never)
    assert (whole, type(error)) == (0, StoreUnavailable)


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "threads"),
    [("cpu", 64, 1, 1), ("cuda", 16, 1, 4), ("cuda:3", 192, 8, 4), ("cuda", 64, 8, 2), ("cuda", 2, 1, 1)],
)
def test_copy_threads_follow_cores_beside_a_gpu(
    device: str, cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_copies.os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert copy_thread_count(device, ranks) == threads
