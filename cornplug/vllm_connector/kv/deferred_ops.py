"""Store operations of the KV scheduler, sent once per step: commits, releases and deletes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from cornplug.engine_common.page_publish import PagePublisher
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import CornplugError
from cornplug.store.base import Reservation
from cornplug.store.posted import Answered, Posted

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from cornplug.vllm_connector.kv.page_events import PageSpan
    from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest


class OpenSave(msgspec.Struct, eq=False):
    """Reserved page that the worker halves are writing."""

    reservation: Reservation
    name: str
    """Name of the `PageSave` that contains the page."""
    index: int
    """Index of the page in its request."""
    tracked: TrackedRequest | None = None
    """The page's request, or None if the request finished before the save began."""
    blocks: Sequence[KVCacheBlock] = ()
    """Blocks that hold the page, set when they are pinned or the request has finished."""
    pinned: bool = False
    """Whether its blocks hold a reference for it."""
    checksums: dict[int, int] = msgspec.field(default_factory=dict)
    failed_segments: int = 0
    given_up: bool = False
    """Whether its blocks were reused."""
    announced: PageSpan | None = None
    """Page to announce in KV events once it is stored, if `tracked` is None."""


class DeferredStoreOps:
    """Operations collected during a step. `run` sends them to the store in at most three messages.

    They run on the engine's own thread, which does not wait for replies to commits: the next step reads them.
    Another thread would wait for the interpreter's lock, which vLLM's busy loop holds.
    """

    def __init__(self, runtime: EngineRuntime, publisher: PagePublisher) -> None:
        self._run = runtime
        self._publisher = publisher
        self._commit: list[OpenSave] = []
        self._release: list[int] = []
        self._delete: list[bytes] = []
        self._committed: deque[Posted[bool]] = deque()
        """Commits whose replies have not arrived yet."""

    def __bool__(self) -> bool:
        return bool(self._commit or self._release or self._delete or self._committed)

    def commit(self, saves: list[OpenSave]) -> None:
        """Commit written pages."""
        self._commit += saves

    def release(self, tokens: list[int]) -> None:
        """End leases, or release reservations."""
        self._release += tokens

    def delete(self, key: bytes) -> None:
        """Delete an entry whose header or payload is damaged."""
        self._delete.append(key)

    def run(self) -> None:
        """Send the operations once. Operations that fail now are dropped, because the store releases
        everything when the connection ends."""
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
