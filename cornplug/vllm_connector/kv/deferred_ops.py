"""Store operations that the KV scheduler collects and sends once per step: commits, releases and deletes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from cornplug.engine_common.page_publish import PagePublisher
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.store.base import Answered, Posted, Reservation

if TYPE_CHECKING:
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
    """The page's request, or None if the request finished before the save began."""
    blocks: Sequence[KVCacheBlock] = ()
    """vLLM blocks that contain the page. Empty until the blocks are pinned or the request has finished."""
    pinned: bool = False
    """Whether this object holds a reference to the blocks, so that vLLM does not reuse them."""
    checksums: dict[int, int] = msgspec.field(default_factory=dict)
    failed_segments: int = 0
    given_up: bool = False
    """Whether the page's blocks were reused or its request was preempted. Worker halves then report segments
    that they have not acknowledged as failed. A page that every rank has already written is still
    committed."""
    announced: PageSpan | None = None
    """Span to announce in KV events once the page is stored. Used if `tracked` is None."""


class DeferredStoreOps:
    """Collects store operations during a step. `run` sends them to the store in at most three messages.

    `run` is called on the engine's own thread and does not wait for replies to commits, which the next step
    reads. A separate thread would have to wait for Python's interpreter lock, which vLLM's busy loop holds.
    """

    def __init__(self, runtime: EngineRuntime, publisher: PagePublisher) -> None:
        self._run = runtime
        self._publisher = publisher
        self._commit: list[OpenSave] = []
        self._release: list[int] = []
        self._delete: list[bytes] = []
        self._committed: deque[Posted[bool]] = deque()
        """Commits that were sent and whose replies have not been read yet."""

    def __bool__(self) -> bool:
        return bool(self._commit or self._release or self._delete or self._committed)

    def commit(self, saves: list[OpenSave]) -> None:
        """Add a commit of pages that every rank has written."""
        self._commit += saves

    def release(self, tokens: list[int]) -> None:
        """Add the release of leases or reservations with these tokens."""
        self._release += tokens

    def delete(self, key: bytes) -> None:
        """Add the deletion of an entry whose header or payload is damaged."""
        self._delete.append(key)

    def run(self) -> None:
        """Send the collected operations to the store. Operations that fail are dropped, because the store
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
