"""Ranks of one engine write their parts of a page; ranks of any other split read theirs, verified."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch

from cornplug.codec import checksum
from cornplug.engine_common.rank_pages import RankPages, page_header
from cornplug.errors import CodecError
from cornplug.kv_page import PageGeometry, RankSlice
from cornplug.store.base import Lease, Reservation, ReserveTerms
from cornplug.store.memory import MemoryStore

PAGE = PageGeometry(page_tokens=16, heads=4, layers=6, dim=8, dtype="bfloat16")
KEY = b"k" * 32
SPLITS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 3), (4, 6)]


def staged(layers: int) -> PageGeometry:
    """The page as an engine with so many pipeline stages writes it."""
    return dataclasses.replace(PAGE, layer_runs=layers)


def parts(heads: int, layers: int) -> Iterator[RankSlice]:
    """The slices of `heads` tensor-parallel by `layers` pipeline-parallel ranks."""
    for h, n in itertools.product(range(heads), range(layers)):
        per_head, per_layer = PAGE.heads // heads, PAGE.layers // layers
        yield RankSlice(
            heads=range(h * per_head, (h + 1) * per_head),
            layers=range(n * per_layer, (n + 1) * per_layer),
            writes=True,
        )


def cut(kv: torch.Tensor, held: RankSlice) -> torch.Tensor:
    heads = kv[held.heads.start : held.heads.stop]
    return heads[:, held.layers.start : held.layers.stop].contiguous()


@pytest.fixture
def kv() -> torch.Tensor:
    return torch.randn(PAGE.shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(capacity_bytes=8 << 20)


def save(store: MemoryStore, kv: torch.Tensor, split: tuple[int, int] = (1, 1)) -> dict[int, int]:
    """Write a page with all ranks of a split; segment -> checksum."""
    client = store.connect()
    [reserved] = client.reserve([(KEY, PAGE.page_bytes)], ReserveTerms("test"), deadline_s=1)
    assert isinstance(reserved, Reservation)
    sums: dict[int, int] = {}
    page = staged(split[1])
    for held in parts(*split):
        sums |= RankPages(page, held, client).write(cut(kv, held), reserved.location)
    assert client.commit([(reserved, page_header(KEY, page, sums))], deadline_s=1) == [True]
    return sums


def leased(store: MemoryStore) -> Lease:
    lease = store.connect().lease([KEY], ttl_s=60, deadline_s=1)[0]
    assert lease is not None
    return lease


@pytest.mark.parametrize("writers", SPLITS)
@pytest.mark.parametrize("readers", SPLITS)
def test_rank_pages_of_any_split_read_another_splits_page(
    store: MemoryStore, kv: torch.Tensor, writers: tuple[int, int], readers: tuple[int, int]
) -> None:
    save(store, kv, writers)
    client, lease = store.connect(), leased(store)
    for held in parts(*readers):
        mine = RankPages(staged(readers[1]), held, client)
        into = mine.allocate_shard()
        mine.read(lease, into)
        assert torch.equal(into, cut(kv, held))


def test_rank_pages_write_sums_each_segment_of_the_source(kv: torch.Tensor) -> None:
    for layers in (1, 3):
        page = staged(layers)
        flat = kv.view(torch.uint8).reshape(page.segments, -1).numpy()
        expected = {i: checksum(flat[i].data) for i in range(page.segments)}
        assert save(MemoryStore(capacity_bytes=8 << 20), kv, (2, layers)) == expected


def test_rank_pages_bytes_of_all_ranks_are_the_page(store: MemoryStore) -> None:
    client = store.connect()
    for split in SPLITS:
        page = staged(split[1])
        ranks = [RankPages(page, held, client) for held in parts(*split)]
        assert sum(mine.size_bytes for mine in ranks) == PAGE.page_bytes
        assert sum(mine.segments for mine in ranks) == page.segments
        assert all(mine.allocate_shard().nbytes == mine.size_bytes for mine in ranks)


@pytest.mark.parametrize("writer_stages", [1, 2, 3, 6])
@pytest.mark.parametrize("reader_stages", [1, 2, 3, 6])
def test_rank_pages_read_damaged_segment_is_corrupt_for_each_rank_that_reads_it(
    store: MemoryStore, kv: torch.Tensor, writer_stages: int, reader_stages: int
) -> None:
    """A rank verifies all layers of the segments that its layers lie in, and no others."""
    save(store, kv, (1, writer_stages))
    client, lease = store.connect(), leased(store)
    client.raw(lease.location)[5 * PAGE.layer_bytes] ^= 1  # head 0, layer 5
    size = PAGE.layers // writer_stages
    for held in parts(2, reader_stages):
        mine = RankPages(staged(reader_stages), held, client)
        if 0 in held.heads and 5 // size in {layer // size for layer in held.layers}:
            with pytest.raises(CodecError) as raised:
                mine.read(lease, mine.allocate_shard())
            assert (raised.value.reason, raised.value.is_damage) == ("corrupt", True)
        else:
            into = mine.allocate_shard()
            mine.read(lease, into)
            assert torch.equal(into, cut(kv, held))


def test_rank_pages_read_page_of_other_geometry_is_wrong_shape(store: MemoryStore, kv: torch.Tensor) -> None:
    save(store, kv)
    other = PageGeometry(page_tokens=16, heads=4, layers=6, dim=8, dtype="float16")
    mine = RankPages(other, next(parts(1, 1)), store.connect())
    with pytest.raises(CodecError) as raised:
        mine.read(leased(store), mine.allocate_shard())
    assert (raised.value.reason, raised.value.is_damage) == ("wrong_shape", True)
