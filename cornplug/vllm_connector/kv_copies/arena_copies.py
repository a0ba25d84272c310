"""Copies of one rank's KV between vLLM's blocks on a GPU and the store's memory, without a CPU in between.

Several pages form a slab. The GPU gathers a slab in page order and computes its checksums
(`DeviceChecksums`). One call of vLLM's `swap_blocks_batch` then copies the slab to the pages' locations
in the store, one byte range per page. Loads do the reverse. All slabs of one direction use the same GPU
buffer and are ordered by the direction's stream. Therefore many slabs can be in flight, and the host does not
wait for them. The host receives only the checksums, 64 bytes per segment.

The caller checks directly before each copy to the store that the reservation still exists. A copy that is
nevertheless late overwrites another page. Readers of that page detect the corruption, because the page's
checksum was computed from the data on its writer's GPU.

The checksums are XXH3-64. XXH3 splits a payload into blocks of 1 KiB. Each block's contribution to the eight
accumulators does not depend on other blocks. Only the short step between two blocks depends on the blocks
before it. Therefore one kernel processes all blocks in parallel, and a second kernel combines the blocks of
each segment. The host reduces the resulting 64 bytes per segment to a checksum. The result equals
`xxhash.xxh3_64_intdigest`, so readers on a CPU can verify it.

This module needs torch and Triton, but not vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
import torch
import triton
import xxhash
from numpy.typing import NDArray
from triton import language as tl

from cornplug.vllm_connector.kv_copies.block_copies import CopyBackend, TokenIndex
from cornplug.vllm_connector.kv_copies.cache_blocks import CacheBlocks, Table

BLOCK_BYTES: Final = 1024
"""Size in bytes of an XXH3 block. A segment's size must be a multiple of this size. All but the smallest
layers meet this condition."""
STATE_WORDS: Final = 8
"""Number of 64-bit words that the kernels compute for each segment."""
_SLAB_BYTES = 32 << 20
"""Size in bytes of the GPU buffer for each direction. This is small compared to the memory that vLLM does not
use."""

ByteRanges = NDArray[np.int64]
"""Byte ranges to copy, as rows of (offset in the slab, address in the store's memory, number of bytes)."""
CopyBatch = Callable[..., None]
"""Signature of vLLM's `swap_blocks_batch`: (source addresses, target addresses, sizes,
is_src_access_order_any=...)."""

_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
"""XXH3's default secret, from its specification."""
_PRIMES_32: Final = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIMES_64: Final = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
_STRIPES, _LANES = 16, 8
_MASK_64: Final = (1 << 64) - 1


class ArenaSlab:
    """One slab of KV pages in transfer: token positions, checksums, and the event that marks the end of its
    copies."""

    def __init__(self, backend: CopyBackend, index: TokenIndex, sums: torch.Tensor) -> None:
        self._backend, self.index, self._words = backend, index, sums
        self.end: Any = None
        """Event at the end of the slab's copies, or None after they have completed."""
        self.segments = self.segment_bytes = 0

    def checksum_words(self, segments: int, segment_bytes: int) -> torch.Tensor:
        """Return host memory for the checksum words that the GPU computes for `segments` segments of
        `segment_bytes` bytes each."""
        self.segments, self.segment_bytes = segments, segment_bytes
        return self._words[:segments]

    def is_done(self) -> bool:
        """Return whether the slab's copies have completed."""
        if self.end is not None and self._backend.is_done(self.end):
            self.end = None
        return self.end is None

    def wait(self) -> None:
        """Wait until the slab's copies have completed."""
        if self.end is not None:
            end, self.end = self.end, None
            self._backend.wait(end)

    def checksums(self) -> NDArray[np.uint64]:
        """Return the checksums of all segments, shape (segments,), page by page. The GPU has computed them
        from its data. Call this after the slab's copies have completed."""
        return fold_checksums(self._words[: self.segments], self.segment_bytes)


class ArenaCopies:
    """Copies one rank's KV pages between GPU blocks and the store, in one direction. Used only by the
    engine's thread."""

    def __init__(
        self,
        blocks: CacheBlocks,
        backend: CopyBackend,
        checksums: DeviceChecksums,
        copy_batch: CopyBatch,
        *,
        slab_share: float = 1.0,
    ) -> None:
        """Prepare copies. `slab_share` is the fraction of the maximum slab size that these copies use."""
        self._blocks, self.backend = blocks, backend
        self._checksums, self._copy_batch = checksums, copy_batch
        heads, layers, planes, tokens, dim = blocks.shape
        self.page_bytes = heads * layers * planes * tokens * dim * blocks.dtype.itemsize
        self.slab_pages = max(1, int(_SLAB_BYTES * slab_share) // self.page_bytes)
        self._buffer: torch.Tensor | None = None
        self._free_slabs: list[ArenaSlab] = []

    def begin_copy_out(
        self,
        pages: Sequence[tuple[Table, int | NDArray[np.int64]]],
        byte_ranges: ByteRanges,
        segment_bytes: int,
        mark: Any,
    ) -> ArenaSlab:
        """Start to copy pages from vLLM's blocks to the store. The pages of each request are given as (block
        table of the request, index of the page or indices of some pages in the request)."""
        with self._copy_context(mark) as slab:
            blocks, slots = self._blocks.locate_pages(pages)
            there = self._device_buffer()[: len(blocks) // self._blocks.shape[3]]
            index = slab.index.send(blocks, slots, self._blocks.device)
            self._blocks.gather(there, *index)
            self._begin_checksums(slab, there, segment_bytes)
            self._copy_batch(*_to_columns(byte_ranges, _address(there)))
        return slab

    def begin_copy_in(
        self,
        table: Table,
        pages: range,
        byte_ranges: ByteRanges,
        segment_bytes: int,
        tokens: tuple[int, int],
        mark: Any,
    ) -> ArenaSlab:
        """Start to copy pages of a request from the store to the request's blocks.

        Only tokens from `tokens[0]` to before `tokens[1]` are written to the blocks. Their KV is valid if the
        result of `ArenaSlab.checksums` matches the pages' checksums.
        """
        size = self._blocks.shape[3]
        first = pages.start * size
        start, end = max(tokens[0], first), min(tokens[1], pages.stop * size)
        with self._copy_context(mark) as slab:
            there = self._device_buffer()[: len(pages)]
            here, addresses, sizes = _to_columns(byte_ranges, _address(there))
            # The source can be read in any order, because no process writes to the pages while their reader
            # holds leases.
            self._copy_batch(addresses, here, sizes, is_src_access_order_any=True)
            self._begin_checksums(slab, there, segment_bytes)
            if start < end:
                where = self._blocks.locate_tokens(table, np.arange(start, end))
                index = slab.index.send(*where, self._blocks.device)
                self._blocks.scatter(there, slice(start - first, end - first), *index)
        return slab

    def release_slab(self, slab: ArenaSlab) -> None:
        """Wait for a slab's copies to complete, and make its memory available to later slabs."""
        slab.wait()
        self._free_slabs.append(slab)

    def self_test(self, segment_bytes: int) -> bool:
        """Copy a test page from the GPU to host memory and back. Return whether its data and checksums are
        correct.

        Call this at start, because it also compiles the kernels and allocates all memory.
        """
        noise, back, again = (self.backend.allocate_host((self.page_bytes,), torch.int8) for _ in range(3))
        noise.copy_(torch.from_numpy(np.random.default_rng().integers(-128, 128, self.page_bytes, np.int8)))
        sizes = torch.tensor([self.page_bytes])
        with self._copy_context(self.backend.mark()) as slab:
            there = self._device_buffer()[:1].view(torch.int8).flatten()
            places, out = (torch.tensor([_address(one)]) for one in (there, back))
            there.copy_(noise, non_blocking=True)
            self._begin_checksums(slab, there, segment_bytes)
            self._copy_batch(places, out, sizes)
        self.release_slab(slab)
        found = slab.checksums().tolist()
        with self._copy_context(self.backend.mark()) as slab:
            there.zero_()
            self._copy_batch(out, places, sizes, is_src_access_order_any=True)
            again.copy_(there, non_blocking=True)
        self.release_slab(slab)
        whole = torch.equal(noise, back) and torch.equal(noise, again)
        rows = noise.numpy().reshape(-1, segment_bytes)
        return whole and found == [xxhash.xxh3_64_intdigest(row) for row in rows]

    def warm_up(self, segment_bytes: int) -> float:
        """Copy a slab of the maximum size from vLLM's blocks to host memory and back. Return the
        bandwidth in bytes per second.

        Call this at start, because it also allocates the device memory that later copies need. The values in
        the blocks stay the same.
        """
        size = self.slab_pages * self.page_bytes
        host = self.backend.allocate_host((size,), torch.int8)
        tokens = self.slab_pages * self._blocks.shape[3]
        # Copying a block to itself several times is harmless.
        table = self._blocks.cyclic_table(tokens)
        ranges = np.array([[0, _address(host), size]], np.int64)
        pages, began_s = range(self.slab_pages), 0.0
        for _ in range(2):  # The first copies also allocate memory.
            began_s = time.perf_counter()
            mark = self.backend.mark()
            out = self.begin_copy_out([(table, np.arange(self.slab_pages))], ranges, segment_bytes, mark)
            self.release_slab(out)
            self.release_slab(
                self.begin_copy_in(table, pages, ranges, segment_bytes, (0, tokens), self.backend.mark())
            )
        return 2 * size / (time.perf_counter() - began_s)

    def _device_buffer(self) -> torch.Tensor:
        """Return the device's buffer for slabs. The buffer is allocated on first use. Call this within
        `CopyBackend.start_after`, so that the allocator assigns the memory to that stream."""
        if self._buffer is None:
            shape = (self.slab_pages, *self._blocks.shape)
            self._buffer = torch.empty(shape, dtype=self._blocks.dtype, device=self._blocks.device)
        return self._buffer

    def _begin_checksums(self, slab: ArenaSlab, pages: torch.Tensor, segment_bytes: int) -> None:
        words = self._checksums.begin(pages, segment_bytes)
        slab.checksum_words(len(words), segment_bytes).copy_(words, non_blocking=True)

    @contextmanager
    def _copy_context(self, mark: Any) -> Iterator[ArenaSlab]:
        """Enter a context in which copies start after `mark`, and yield their slab. When the context exits,
        even by an exception, record the end of these copies in the slab."""
        slab = self._free_slabs.pop() if self._free_slabs else self._new_slab()
        whole = False
        try:
            with self.backend.start_after(mark):
                yield slab
            whole = True
        finally:
            slab.end = self.backend.record_end()
            if not whole:
                self.release_slab(slab)

    def _new_slab(self) -> ArenaSlab:
        heads, layers, _, tokens, _ = self._blocks.shape
        # A segment contains at least one layer of one head. This limits the number of segments.
        sums = self.backend.allocate_host((self.slab_pages * heads * layers, STATE_WORDS), torch.int64)
        return ArenaSlab(self.backend, TokenIndex(self.backend, self.slab_pages * tokens), sums)


# Triton's compiler accepts only its own annotations.
def sum_blocks(data, keys, sums, blocks, total, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Triton kernel: compute the contribution of each of `total` XXH3 blocks to the accumulators. `blocks` is
    the number of XXH3 blocks per segment."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lanes = tl.arange(0, 8)
    inside = (rows < total)[:, None]
    first = rows.to(tl.int64)[:, None] * 128 + lanes[None, :]
    # The last stripe of a segment has a different key.
    key_at = tl.where(rows % blocks == blocks - 1, 128, 0)[:, None] + lanes[None, :]
    added = tl.full((ROWS, 8), 0, tl.uint64)
    for stripe in range(16):
        at = first + stripe * 8
        here = tl.load(data + at, mask=inside, other=0).to(tl.uint64, bitcast=True)
        # Each accumulator also adds the word of its neighbour.
        beside = tl.load(data + (at ^ 1), mask=inside, other=0).to(tl.uint64, bitcast=True)
        mixed = here ^ tl.load(keys + key_at + stripe * 8).to(tl.uint64, bitcast=True)
        added += beside + (mixed & 0xFFFFFFFF) * (mixed >> 32)
    places = rows.to(tl.int64)[:, None] * 8 + lanes[None, :]
    tl.store(sums + places, added.to(tl.int64, bitcast=True), mask=inside)


def chain_blocks(sums, keys, state, blocks):  # type: ignore[no-untyped-def]
    """Triton kernel: compute the accumulators after the last block of each segment from the blocks'
    contributions."""
    lanes = tl.arange(0, 8)
    row = sums + tl.program_id(0).to(tl.int64) * blocks * 8 + lanes
    acc = tl.load(keys + 256 + lanes).to(tl.uint64, bitcast=True)
    scramble = tl.load(keys + 264 + lanes).to(tl.uint64, bitcast=True)
    prime = tl.load(keys + 272 + lanes).to(tl.uint64, bitcast=True)
    for block in range(0, blocks - 1):
        acc += tl.load(row + block * 8).to(tl.uint64, bitcast=True)
        acc = (acc ^ (acc >> 47) ^ scramble) * prime
    acc += tl.load(row + (blocks - 1) * 8).to(tl.uint64, bitcast=True)
    tl.store(state + tl.program_id(0) * 8 + lanes, acc.to(tl.int64, bitcast=True))


# These integers differ between slabs. If Triton specialized kernels for their values, it would recompile
# kernels while requests wait.
_sum_blocks = triton.jit(sum_blocks, do_not_specialize=["blocks", "total"])
_chain_blocks = triton.jit(chain_blocks, do_not_specialize=["blocks"])


class DeviceChecksums:
    """Computes segment checksums on one device, on the device's current stream."""

    ROWS = 64
    """Number of XXH3 blocks that each program of the Triton kernel processes."""

    def __init__(self, device: torch.device, kernels: tuple[Any, Any] = (_sum_blocks, _chain_blocks)) -> None:
        self._keys = torch.from_numpy(_key_table()).to(device)
        self._sum, self._chain = kernels

    def begin(self, data: torch.Tensor, segment_bytes: int) -> torch.Tensor:
        """Start to compute checksums, and return words of shape (segments, STATE_WORDS) on the device, which
        `fold_checksums` converts to checksums.

        `data` is contiguous and holds segments of `segment_bytes` bytes, a multiple of BLOCK_BYTES.
        """
        words = data.flatten().view(torch.int64)
        blocks = segment_bytes // BLOCK_BYTES
        total = words.numel() * 8 // BLOCK_BYTES
        sums = torch.empty(total * _LANES, dtype=torch.int64, device=data.device)
        state = torch.empty(total // blocks, STATE_WORDS, dtype=torch.int64, device=data.device)
        self._sum[(-(-total // self.ROWS),)](words, self._keys, sums, blocks, total, ROWS=self.ROWS)
        self._chain[(total // blocks,)](sums, self._keys, state, blocks, num_warps=1)
        return state


def fold_checksums(state: torch.Tensor, segment_bytes: int) -> NDArray[np.uint64]:
    """Return one checksum per segment, shape (segments,). `state` has shape (segments, STATE_WORDS) and
    contains the words from `DeviceChecksums.begin`, copied to the host. Each segment has `segment_bytes`
    bytes."""
    mixed = state.numpy().view(np.uint64) ^ _MERGE_KEYS
    start = np.array([segment_bytes * _PRIMES_64[0] & _MASK_64], np.uint64)
    digest = start + _multiply_fold(mixed[:, ::2], mixed[:, 1::2]).sum(axis=1, dtype=np.uint64)
    digest ^= digest >> np.uint64(37)
    digest *= np.uint64(0x165667919E3779F9)
    found: NDArray[np.uint64] = digest ^ (digest >> np.uint64(32))
    return found


def _multiply_fold(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Multiply two arrays of 64-bit words, and return the low word xor the high word of each 128-bit
    product."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a0, a1, b0, b1 = a & low, a >> half, b & low, b >> half
    lowest, cross, other = a0 * b0, a0 * b1, a1 * b0
    carry = (lowest >> half) + (cross & low) + (other & low)
    high: NDArray[np.uint64] = a1 * b1 + (cross >> half) + (other >> half) + (carry >> half)
    return high ^ (a * b)


def _secret_words(offsets: Sequence[int]) -> list[int]:
    return [int.from_bytes(_SECRET[at : at + 8], "little") for at in offsets]


def _key_table() -> NDArray[np.int64]:
    """Return the constants that the kernels use: the keys for the 16 stripes of a block, the keys for a
    segment's last block, the accumulators' initial values, and two words per accumulator for the step between
    two blocks."""
    stripes = [_secret_words([8 * (n + lane) for lane in range(_LANES)]) for n in range(_STRIPES)]
    last = [*stripes[:-1], _secret_words([121 + 8 * lane for lane in range(_LANES)])]
    p32, p64 = _PRIMES_32, _PRIMES_64
    first = [p32[2], p64[0], p64[1], p64[2], p64[3], p32[1], p64[4], p32[0]]
    scramble = _secret_words([128 + 8 * lane for lane in range(_LANES)])
    rows = [*stripes, *last, first, scramble, [p32[0]] * _LANES]
    return np.array(rows, np.uint64).ravel().view(np.int64)


_MERGE_KEYS: Final = np.array(_secret_words([11 + 8 * i for i in range(STATE_WORDS)]), np.uint64)


def _to_columns(byte_ranges: ByteRanges, slab: int) -> list[torch.Tensor]:
    """Convert byte ranges to three tensors: addresses in the slab at address `slab`, addresses in the store's
    memory, and sizes."""
    columns = byte_ranges.T.copy()
    columns[0] += slab
    return [torch.from_numpy(column) for column in columns]


def _address(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()
