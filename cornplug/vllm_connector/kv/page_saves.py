"""Saves of KV pages: room is reserved when a step completes a page, and committed when all ranks wrote it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cornplug.engine_common.page_publish import PagePublisher
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Reservation, ReserveRefusal
from cornplug.vllm_connector.kv.deferred_ops import DeferredStoreOps, OpenSave
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata, PageSave, PageWrite
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


class PageSaves:
    """One per scheduler half; used by the engine's thread.

    A request offers each of its pages once: also those that it has from the engine's own prefix cache, as
    their blocks are valid while it runs, so a prefix that only this engine serves is stored too.
    """

    def __init__(
        self,
        runtime: EngineRuntime,
        page: PageGeometry,
        requests: TrackedRequests,
        publisher: PagePublisher,
        store_ops: DeferredStoreOps,
    ) -> None:
        self._page = page
        self._requests = requests
        self._publisher = publisher
        self._store_ops = store_ops
        self._most_open = runtime.config.engine.max_open_saves_bytes // page.page_bytes
        self._saves = runtime.config.engine.save != "never"
        self._open: dict[int, OpenSave] = {}
        self.manager: KVCacheManager | None = None

    def __bool__(self) -> bool:
        return bool(self._open)

    def give_up(self, tracked: TrackedRequest) -> None:
        """A preempted request's blocks are gone: pages that no worker has acknowledged are not
        written, and are offered again when they are computed again."""
        tracked.unsaved.clear()
        for token in tracked.open_saves:
            save = self._open[token]
            save.given_up = True
            tracked.save_again_from(save.index)

    def of_step(self, output: SchedulerOutput) -> list[PageSave]:
        """Reserved pages that this step's forward completes, for the worker halves to write."""
        wanted = self._new_pages(output)
        return self._reserve(wanted) if wanted else []

    def _new_pages(self, output: SchedulerOutput) -> list[tuple[TrackedRequest, int, bytes]]:
        """(request, page index, key) of pages that this step's forward completes."""
        if not (self._saves and self._requests.sharing):
            return []
        found = []
        for tracked, end in self._requests.completing(output.num_scheduled_tokens):
            offered = tracked.pages_to_save(end, self._page.page_tokens)
            found += [(tracked, i, key) for i, key in offered if i not in tracked.unseen]
        return found

    def _reserve(self, wanted: list[tuple[TrackedRequest, int, bytes]]) -> list[PageSave]:
        assert self.manager is not None
        room = max(0, self._most_open - len(self._open))
        if len(wanted) > room:
            self._publisher.count_outcome("busy", len(wanted) - room)
            for tracked, index, key in wanted[room:]:
                tracked.unsaved[index] = key
            wanted = wanted[:room]
            if not wanted:
                return []
        answers = self._publisher.reserve([key for _, _, key in wanted])
        writes: dict[str, list[PageWrite]] = {}
        for (tracked, index, key), answer in zip(wanted, answers, strict=True):
            if answer is ReserveRefusal.GROWING:
                self._publisher.count_outcome(answer.value)
                tracked.refused.add(index)
                tracked.unsaved[index] = key
            elif answer is ReserveRefusal.FIRST_SIGHT:
                tracked.unseen.add(index)
                tracked.unsaved[index] = key
            if not isinstance(answer, Reservation):
                continue
            request_id = tracked.request.request_id
            self.begin(answer, request_id, index)
            tracked.open_saves.add(answer.token)
            writes.setdefault(request_id, []).append(PageWrite(index, answer.token, answer.location))
        return [
            PageSave(request_id, tuple(pages), tuple(self.manager.get_block_ids(request_id)[0]))
            for request_id, pages in writes.items()
        ]

    def begin(self, reservation: Reservation, name: str, index: int) -> OpenSave:
        """The save of a page, of this request or under a name that stands for none."""
        save = self._open[reservation.token] = OpenSave(reservation, name, index)
        return save

    def is_open(self, token: int) -> bool:
        """Whether the worker halves are still filling this reservation."""
        return token in self._open

    def acknowledged(self, acks: CornplugKVWorkerMetadata) -> None:
        """Commit pages that every rank has written; give up pages that a rank could not write."""
        for token, sums in acks.written.items():
            if token in self._open:
                self._open[token].checksums |= sums
        for token, segments in acks.failed_writes.items():
            if token in self._open:
                self._open[token].failed_segments += segments
        # In the order of pages, so that prefixes are whole at any time.
        for token in sorted(acks.written.keys() | acks.failed_writes.keys()):
            if token in self._open and self._open[token].answered(self._page):
                self._close(token)

    def _close(self, token: int) -> None:
        save = self._open.pop(token)
        if save.failed_segments:
            self._store_ops.release([token])
            self._publisher.count_outcome("preempted" if save.given_up else "write_failed")
        else:
            self._store_ops.commit(save)
        tracked = self._requests.get(save.request_id)
        if tracked is not None:
            tracked.open_saves.discard(token)
            self._requests.forget_if_over(tracked)
