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
from cornplug.store.base import CompletedRequest, PostedRequest, Reservation

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
    is_pinned: bool = False
    """Whether this object holds a reference to the blocks. If so, vLLM does not reuse them."""
    checksums: dict[int, int] = msgspec.field(default_factory=dict)
    failed_segments: int = 0
    is_cancelled: bool = False
    """Whether the save was cancelled, because the page's blocks were reused or its request was preempted.
    Worker halves then report segments as failed unless they have already acknowledged them. A page that every
    rank has already written is still committed."""
    event_span: PageSpan | None = None
    """Span to announce in KV events when the page is stored. Used if `tracked` is None."""


class BlockReader(Protocol):
    """Page that is being saved and whose data must still be read from vLLM's blocks."""

    blocks: Sequence[KVCacheBlock]
    is_cancelled: bool


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
        self._add_reader(reader)
        pool.unpin_blocks(reversed(reader.blocks), self._on_reuse)

    def replace(self, before: _Reader, after: _Reader) -> None:
        """Replace the reader `before` by `after`. Both are readers of the same blocks."""
        self.forget(before)
        self._add_reader(after)

    def forget(self, reader: _Reader) -> None:
        """Ignore reuse of this page's blocks from now on."""
        for block in reader.blocks:
            readers = self._readers.get(block.block_id, [])
            if reader in readers:
                readers.remove(reader)
                if not readers:
                    del self._readers[block.block_id]

    def mark_lost(self, reader: _Reader) -> None:
        """Mark the save of a page as cancelled, because its blocks were reused."""
        if not reader.is_cancelled:
            reader.is_cancelled = True
            self._lost.append(reader)

    def take_lost(self) -> list[_Reader]:
        """Return the pages whose saves were cancelled because their blocks were reused, and forget these
        pages."""
        lost, self._lost = self._lost, []
        return lost

    def _add_reader(self, reader: _Reader) -> None:
        for block in reader.blocks:
            self._readers.setdefault(block.block_id, []).append(reader)

    def _on_reuse(self, block: KVCacheBlock) -> None:
        """Handle vLLM's notification that it gives a block to a request or removes the block from its prefix
        cache."""
        for reader in self._readers.pop(block.block_id, ()):
            self.mark_lost(reader)


class DeferredStoreOps:
    """Collects store operations during a step. `run` sends them to the store in at most three messages.

    `run` is called on the engine's own thread and does not wait for replies to commits. The next step reads
    the replies. A separate thread would have to wait for Python's interpreter lock, which vLLM's busy loop
    holds.
    """

    def __init__(self, runtime: EngineRuntime, publisher: PagePublisher) -> None:
        self._runtime = runtime
        self._publisher = publisher
        self._commits: list[OpenSave] = []
        self._releases: list[int] = []
        self._deletes: list[bytes] = []
        self._sent_commits: deque[PostedRequest[bool]] = deque()
        """Commits whose replies have not been read yet."""

    def __bool__(self) -> bool:
        return bool(self._commits or self._releases or self._deletes or self._sent_commits)

    def commit(self, saves: list[OpenSave]) -> None:
        """Queue a commit of pages that every rank has written."""
        self._commits += saves

    def release(self, tokens: list[int]) -> None:
        """Queue the release of leases or reservations with these tokens."""
        self._releases += tokens

    def delete(self, key: bytes) -> None:
        """Queue the deletion of an entry whose header or payload is corrupt."""
        self._deletes.append(key)

    def run(self) -> None:
        """Send the queued operations to the store. An operation that fails is dropped, because the store
        releases all leases and reservations when the connection ends."""
        commit, self._commits = self._commits, []
        release, self._releases = self._releases, []
        delete, self._deletes = self._deletes, []
        while self._sent_commits and self._sent_commits[0].poll() is not None:
            self._sent_commits.popleft()
        if commit:
            written = [(save.reservation, save.checksums) for save in commit]
            posted = self._publisher.post_commit(written)
            if not isinstance(posted, CompletedRequest):
                self._sent_commits.append(posted)
        with suppress(CornplugError):
            if release:
                self._runtime.store.release(release, deadline_s=self._runtime.deadline_s)
            if delete:
                self._runtime.store.delete(delete, deadline_s=self._runtime.deadline_s)
