"""Pages that are being saved, with the blocks from which they are copied, and store operations (commits,
releases and deletes) that the KV scheduler collects and sends once per step.

vLLM's pool counts blocks as free while pages are still copied from them. A finished request releases its
blocks immediately, whether or not its pages are stored. vLLM removes the request, so a later request may have
the same id. `sleep` and `reset_prefix_cache` do not wait for copies. When vLLM assigns such a block to
another request, it calls a callback (`BlockPool.unpin_blocks`). The callback cancels the saves of the pages
in the block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from cornplug.engine_common.page_publish import PagePublisher
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.store.base import Answered, Posted, Reservation

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from cornplug.vllm_connector.kv.page_events import PageSpan
    from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest


class OpenSave(msgspec.Struct, eq=False):
    """Page that the worker halves are writing to a reservation in the store."""

    reservation: Reservation
    name: str
    """Name of the `PageSave` that contains the page."""
    index: int
    """Index of the page in its request."""
    tracked: TrackedRequest | None = None
    """Request of the page, or None if the request finished before the save began."""
    blocks: Sequence[KVCacheBlock] = ()
    """vLLM blocks that contain the page. Empty until the blocks are pinned or the request has finished."""
    pinned: bool = False
    """Whether this object holds a reference to the blocks. If so, vLLM does not reuse them."""
    checksums: dict[int, int] = msgspec.field(default_factory=dict)
    failed_segments: int = 0
    given_up: bool = False
    """Whether the save was cancelled, because the page's blocks were reused or its request was preempted.
    Worker halves then report segments as failed unless they have already acknowledged them. A page that every
    rank has already written is still committed."""
    announced: PageSpan | None = None
    """Span to announce in KV events when the page is stored. Used if `tracked` is None."""


class BlockReader(Protocol):
    """Page that is being saved and whose data must still be read from vLLM's blocks."""

    blocks: Sequence[KVCacheBlock]
    given_up: bool


_Reader = TypeVar("_Reader", bound=BlockReader)


class FreedBlocks(Generic[_Reader]):
    """Freed blocks of one cache group from which pages are still copied, and the pages that were lost because
    vLLM reused such blocks. Used by the engine's thread."""

    def __init__(self) -> None:
        self._readers: dict[int, list[_Reader]] = {}
        """Pages that are still being copied from a block, by block id."""
        self._lost: list[_Reader] = []

    def release(self, pool: BlockPool, reader: _Reader) -> None:
        """Release a page's references to its blocks, and notice when vLLM reuses these blocks."""
        self._add(reader)
        pool.unpin_blocks(reversed(reader.blocks), self._reused)

    def replace(self, before: _Reader, after: _Reader) -> None:
        """Replace the reader `before` by `after`. Both are readers of the same blocks."""
        self.forget(before)
        self._add(after)

    def forget(self, reader: _Reader) -> None:
        """Ignore reuse of this page's blocks from now on."""
        for block in reader.blocks:
            readers = self._readers.get(block.block_id, [])
            if reader in readers:
                readers.remove(reader)
                if not readers:
                    del self._readers[block.block_id]

    def lose(self, reader: _Reader) -> None:
        """Mark the save of a page as cancelled, because its blocks were reused."""
        if not reader.given_up:
            reader.given_up = True
            self._lost.append(reader)

    def take_lost(self) -> list[_Reader]:
        """Return the pages whose saves were cancelled since the last call, because their blocks were
        reused."""
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


class DeferredStoreOps:
    """Collects store operations during a step. `run` sends them to the store in at most three messages.

    `run` is called on the engine's own thread and does not wait for replies to commits. The next step reads
    the replies. A separate thread would have to wait for Python's interpreter lock, which vLLM's busy loop
    holds.
    """

    def __init__(self, runtime: EngineRuntime, publisher: PagePublisher) -> None:
        self._run = runtime
        self._publisher = publisher
        self._commit: list[OpenSave] = []
        self._release: list[int] = []
        self._delete: list[bytes] = []
        self._committed: deque[Posted[bool]] = deque()
        """Commits whose replies have not been read yet."""

    def __bool__(self) -> bool:
        return bool(self._commit or self._release or self._delete or self._committed)

    def commit(self, saves: list[OpenSave]) -> None:
        """Queue a commit of pages that every rank has written."""
        self._commit += saves

    def release(self, tokens: list[int]) -> None:
        """Queue the release of leases or reservations with these tokens."""
        self._release += tokens

    def delete(self, key: bytes) -> None:
        """Queue the deletion of an entry whose header or payload is corrupt."""
        self._delete.append(key)

    def run(self) -> None:
        """Send the queued operations to the store. An operation that fails is dropped, because the store
        releases all leases and reservations when the connection ends."""
        commit, self._commit = self._commit, []
        release, self._release = self._release, []
        delete, self._delete = self._delete, []
        while self._committed and self._committed[0].take() is not None:
            self._committed.popleft()
        if commit:
            written = [(save.reservation, save.checksums) for save in commit]
            posted = self._publisher.post_commit(written)
            if not isinstance(posted, Answered):
                self._committed.append(posted)
        with suppress(CornplugError):
            if release:
                self._run.store.release(release, deadline_s=self._run.deadline_s)
            if delete:
                self._run.store.delete(delete, deadline_s=self._run.deadline_s)
