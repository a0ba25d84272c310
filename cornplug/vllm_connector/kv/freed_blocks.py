"""Blocks that vLLM's pool counts as free while pages are still copied from them.

A finished request releases its blocks immediately, whether or not its pages are stored. vLLM removes the
request, so a later request may have the same id, and neither `sleep` nor `reset_prefix_cache` waits for a
copy. When vLLM gives such a block to another request, it calls a callback (`BlockPool.unpin_blocks`), and the
saves of the pages in the block are given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class BlockReader(Protocol):
    """Page that is being saved, whose data must still be read from vLLM's blocks."""

    blocks: Sequence[KVCacheBlock]
    given_up: bool


_Reader = TypeVar("_Reader", bound=BlockReader)


class FreedBlocks(Generic[_Reader]):
    """Freed blocks of one cache group from which pages are still copied, and the pages lost because such
    blocks were reused. Used by the engine's thread."""

    def __init__(self) -> None:
        self._readers: dict[int, list[_Reader]] = {}
        """Pages that are still being copied from a block, by block id."""
        self._lost: list[_Reader] = []

    def release(self, pool: BlockPool, reader: _Reader) -> None:
        """Release a page's references to its blocks, and watch whether vLLM reuses these blocks."""
        self._add(reader)
        pool.unpin_blocks(reversed(reader.blocks), self._reused)

    def replace(self, before: _Reader, after: _Reader) -> None:
        """Watch the blocks on behalf of `after` instead of `before`. Both are readers of the same blocks."""
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
        """Mark a page as given up, because its blocks were reused."""
        if not reader.given_up:
            reader.given_up = True
            self._lost.append(reader)

    def take_lost(self) -> list[_Reader]:
        """Return the pages that were given up since the last call, because their blocks were reused."""
        lost, self._lost = self._lost, []
        return lost

    def _add(self, reader: _Reader) -> None:
        for block in reader.blocks:
            self._readers.setdefault(block.block_id, []).append(reader)

    def _reused(self, block: KVCacheBlock) -> None:
        """Handle vLLM's notification that it gives a block to a request or removes the block from its prefix
        cache."""
        for reader in self._readers.pop(block.block_id, ()):
            self.lose(reader)
