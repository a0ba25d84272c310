"""Blocks that vLLM's pool counts as free while pages are still copied from them.

A finished request releases its blocks immediately, whether or not its pages are stored. vLLM forgets the
request, so a later request may have the same id, and neither `sleep` nor `reset_prefix_cache` waits for a
copy. When vLLM gives such a block to another request, it calls back (`BlockPool.unpin_blocks`), and the pages
in it are given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockReader(Protocol):
    """Page whose data is in blocks."""

    blocks: Sequence[KVCacheBlock]
    given_up: bool


_Reader = TypeVar("_Reader", bound=BlockReader)


class FreedBlocks(Generic[_Reader]):
    """Freed blocks of one cache group. Used by the engine's thread."""

    def __init__(self) -> None:
        self._readers: dict[int, list[_Reader]] = {}
        """Pages that are copied from a block, by block id."""
        self._lost: list[_Reader] = []

    def release(self, pool: BlockPool, reader: _Reader) -> None:
        """Release the page's blocks, each of which holds a reference for it, and watch for their reuse."""
        self._add(reader)
        pool.unpin_blocks(reversed(reader.blocks), self._reused)

    def replace(self, before: _Reader, after: _Reader) -> None:
        """Transfer the blocks of `before` to `after`."""
        self.forget(before)
        self._add(after)

    def forget(self, reader: _Reader) -> None:
        """Stop watching the blocks of this page."""
        for block in reader.blocks:
            readers = self._readers.get(block.block_id, [])
            if reader in readers:
                readers.remove(reader)
                if not readers:
                    del self._readers[block.block_id]

    def lose(self, reader: _Reader) -> None:
        """Give up a page whose blocks were reused."""
        if not reader.given_up:
            reader.given_up = True
            self._lost.append(reader)

    def take_lost(self) -> list[_Reader]:
        """Return the pages whose blocks were reused since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def _add(self, reader: _Reader) -> None:
        for block in reader.blocks:
            self._readers.setdefault(block.block_id, []).append(reader)

    def _reused(self, block: KVCacheBlock) -> None:
        """Handle a block that vLLM gives to a request or removes from its prefix cache."""
        for reader in self._readers.pop(block.block_id, ()):
            self.lose(reader)
