"""The scheduler half of the KV connector: page keys of requests, loads of pages, and saves."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cornplug.engine_common import weights_guard
from cornplug.engine_common.background_identity import BackgroundIdentity
from cornplug.engine_common.kv_root import page_root
from cornplug.engine_common.lora_digests import LaterAdapters
from cornplug.engine_common.page_envelope import read_page_header
from cornplug.engine_common.page_publish import PagePublisher
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime, miss
from cornplug.errors import CodecError, CornplugError
from cornplug.kv_page import PageGeometry, pages_between
from cornplug.metrics import Tally
from cornplug.store.base import Lease, Reservation, ReserveRefusal
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv import provenance
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.deferred_ops import DeferredStoreOps, OpenSave
from cornplug.vllm_connector.kv.metadata import (
    CornplugKVMetadata,
    CornplugKVWorkerMetadata,
    PageLoad,
    PageRead,
    PageSave,
    PageWrite,
)
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.provenance import OwnTokens
from cornplug.vllm_connector.model.model_config import kv_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


@dataclass(slots=True)
class _Match:
    """Leased pages for one request, good until `expires`."""

    computed: int
    reads: list[PageRead]
    tokens: list[int]
    expires: float
    end: int = 0
    """Once it is loading: the token before which it ends."""


@dataclass(slots=True)
class _Tracked:
    request: Request
    keys: PageKeys | None
    """None: nothing of this request is shared."""
    later: bool = False
    """Its keys cannot be made yet: the checkpoint or the adapter is still being read."""
    saved_pages: int = 0
    """Pages offered to the store, or known to be there."""
    again: set[int] = field(default_factory=set)
    """Pages below `saved_pages` that a growing store refused: they are offered again at the next step."""
    match: _Match | None = None
    loading: _Match | None = None
    barred: bool = False
    """A load of it failed once: all further tokens are computed."""
    open_saves: set[int] = field(default_factory=set)
    own: OwnTokens | None = None
    """The tokens whose pages may be saved, beside connectors that load KV too; else None."""


class KVScheduler:
    """One per engine core. Every call into the store has the store's deadline."""

    def __init__(
        self, config: VllmConfig, runtime: EngineRuntime, geometry: PageGeometry, tally: Tally
    ) -> None:
        self._run = runtime
        self._page = geometry
        self._tally = tally
        self._manager: KVCacheManager | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._loads: list[PageLoad] = []
        self._open: dict[int, OpenSave] = {}
        self._finishing: list[str] = []
        self._publisher = PagePublisher(runtime, geometry, tally, deadline_s=runtime.deadline_s)
        self._errands = DeferredStoreOps(runtime, self._publisher)
        self._unusable = ""
        """Why a rank cannot move KV."""
        self._others_load = provenance.others_load()
        self._identity = BackgroundIdentity(lambda: kv_identity(config), "KV", compat.logger.warning)
        self._adapters = LaterAdapters()
        self._costs = LoadCosts(runtime.config.store, geometry)
        self._identity.first_wait()

    def bind(self, manager: KVCacheManager) -> None:
        self._manager = manager

    # -- identity ---------------------------------------------------------------------------

    @property
    def _off(self) -> str:
        """Why this engine shares no KV until it restarts; "" if it does."""
        return self._unusable or self._identity.failure

    def _why_off(self, request: Request) -> str:
        """Why this request shares no KV; "" when it does."""
        if self._off:
            return self._off
        if weights_guard.replaced():
            return "weights_updated"
        if self._identity.found is None:
            return "identifying"
        if request.prompt_embeds is not None:
            return "prompt_embeds"
        if request.resumable:
            # Its prompt grows, with media that page keys made now would not know.
            return "streaming"
        return ""

    def _root(self, request: Request) -> bytes:
        lora = request.lora_request
        adapter = self._adapters.digest(lora.lora_path) if lora is not None else None
        return page_root(
            self._run.secret, self._identity.get(), self._page, adapter=adapter, salt=request.cache_salt
        )

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            own = OwnTokens() if self._others_load else None
            tracked = self._tracked[request.request_id] = _Tracked(request, None, own=own)
            reason = self._name(tracked)
            if reason:
                self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, reason)
        elif tracked.later:
            self._name(tracked)
        return tracked

    def _name(self, tracked: _Tracked) -> str:
        """Make a request's keys. Returns the reason why it has none; "" if it has."""
        request, why = tracked.request, self._why_off(tracked.request)
        if not why:
            try:
                tracked.keys = PageKeys(
                    self._run.secret, self._root(request), self._page.page_tokens, request.mm_features
                )
            except CornplugError as e:
                why = e.reason
        # A checkpoint that is still being read may be identified by the time of the first save.
        tracked.later = why == "identifying"
        return why

    # -- loading ----------------------------------------------------------------------------

    def matched_tokens(self, request: Request, computed: int) -> int:
        """Tokens beyond `computed` that leased pages hold. Asked often; answers from memory."""
        tracked = self._track(request)
        if tracked.keys is None or tracked.barred or request.skip_reading_prefix_cache:
            return 0
        if self._off or weights_guard.replaced():
            return 0
        match = tracked.match
        if match is None or match.computed != computed or time.monotonic() > match.expires:
            self._drop_match(tracked)
            match = tracked.match = _Match(
                computed, [], [], time.monotonic() + self._run.config.store.lease_s / 3
            )
            with miss(self._tally, self._run.app, KV_PAGE):
                self._look_up(tracked, match)
        if not match.reads:
            return 0
        return (match.reads[-1].index + 1) * self._page.page_tokens - computed

    def _look_up(self, tracked: _Tracked, match: _Match) -> None:
        request, page = tracked.request, self._page
        assert tracked.keys is not None
        # The last token is always computed here: it is what the next one is sampled from.
        wanted = pages_between(match.computed, request.num_tokens - 1, page.page_tokens)
        keys = tracked.keys.upto(request.all_token_ids, request.num_tokens - 1)[wanted.start :]
        if not keys:
            return
        store, config = self._run.store, self._run.config.store
        present = store.contains(keys, deadline_s=config.deadline_s).find(0)
        keys = keys if present < 0 else keys[:present]
        if present >= 0:
            self._tally.count(
                "cornplug_misses_total", self._run.app, KV_PAGE, "absent", by=len(wanted) - present
            )
        if not keys:
            return
        end = (wanted.start + len(keys)) * page.page_tokens
        if not self._costs.pays(tokens=end - match.computed, pages=len(keys)):
            self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, "cheaper", by=len(keys))
            tracked.saved_pages = max(tracked.saved_pages, wanted.start + len(keys))
            return
        leases = store.lease(keys, ttl_s=config.lease_s, deadline_s=config.deadline_s)
        for index, lease in zip(wanted, leases, strict=False):
            read = self._read(index, lease)
            if lease is None or read is None:
                break
            match.tokens.append(lease.token)
            match.reads.append(read)
        unread = leases[len(match.reads) :]
        self._errands.release([lease.token for lease in unread if lease is not None])

    def _read(self, index: int, lease: Lease | None) -> PageRead | None:
        if lease is None:
            return None
        try:
            header = read_page_header(lease, self._page)
        except CodecError as e:
            self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, e.reason)
            if e.is_damage:
                self._errands.delete(lease.key)
            return None
        return PageRead(index, lease.key, lease.location, header.checksums)

    def allocated(self, request: Request, blocks: Sequence[int], external: int) -> None:
        """The engine took the offer: `external` tokens go into `blocks`."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.match is None:
            return
        if not external:
            self._drop_match(tracked)
            return
        match, tracked.match = tracked.match, None
        tracked.loading = match
        end = match.computed + external
        # The engine may take less than it was offered.
        match.reads = [read for read in match.reads if read.index * self._page.page_tokens < end]
        match.end = end
        self._costs.load_began(request.request_id, len(match.reads))
        self._loads.append(
            PageLoad(
                request.request_id,
                match.computed,
                end,
                tuple(match.reads),
                tuple(blocks),
                self._costs.deadline_s(external),
            )
        )
        tracked.saved_pages = max(tracked.saved_pages, end // self._page.page_tokens)

    def _drop_match(self, tracked: _Tracked) -> None:
        if tracked.match is not None and tracked.match.tokens:
            self._errands.release(tracked.match.tokens)
        tracked.match = None

    def loaded(self, request_id: str) -> None:
        """The worker halves have ended a load, whole or failed."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.loading is None:
            return
        match, tracked.loading = tracked.loading, None
        self._errands.release(match.tokens)
        app, waited = self._run.app, self._costs.load_ended(request_id, whole=not tracked.barred)
        self._tally.observe("cornplug_wait_seconds", waited, app, KV_PAGE)
        if not tracked.barred:
            self._tally.count("cornplug_hits_total", app, KV_PAGE, "store", by=len(match.reads))
            self._tally.count("cornplug_saved_tokens_total", app, by=match.end - match.computed)
            if tracked.own is not None:
                tracked.own.extend(match.computed, match.end)
        self._forget_if_over(tracked)

    # -- saving -----------------------------------------------------------------------------

    def moves(self, output: SchedulerOutput) -> CornplugKVMetadata:
        """The moves of the step that was just scheduled."""
        loads, self._loads = self._loads, []
        finishing, self._finishing = self._finishing, []
        moves = CornplugKVMetadata(
            loads=loads, finishing=finishing, preempted=list(output.preempted_req_ids or ())
        )
        for request_id in moves.preempted:
            self._give_up_saves(request_id)
        if self._errands:
            self._errands.run()
        moves.timed = self._costs.time_step(output) if not self._off else 0
        wanted = self._new_pages(output)
        if wanted:
            moves.saves = self._reserve(wanted)
        return moves

    def _give_up_saves(self, request_id: str) -> None:
        """A preempted request's blocks are gone: pages that no worker has acknowledged are not
        written, and are offered again when they are computed again."""
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        for token in tracked.open_saves:
            save = self._open[token]
            save.given_up = True
            tracked.saved_pages = min(tracked.saved_pages, save.index)

    def _new_pages(self, output: SchedulerOutput) -> list[tuple[_Tracked, int, bytes]]:
        """(request, page index, key) of pages that this step's forward completes."""
        if self._off or weights_guard.replaced():
            return []
        found = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is not None and tracked.later:
                self._name(tracked)
            if tracked is None or tracked.keys is None:
                continue
            request = tracked.request
            # Draft tokens and async placeholders lie beyond the tokens that are known: not saved.
            end = min(request.num_computed_tokens + scheduled, len(request.all_token_ids))
            if tracked.own is not None:
                end = tracked.own.extend(request.num_computed_tokens, end)
            if end // self._page.page_tokens <= tracked.saved_pages and not tracked.again:
                continue
            keys = tracked.keys.upto(request.all_token_ids, end)
            offered = {*tracked.again, *range(tracked.saved_pages, len(keys))}
            # After a preemption a page may lie beyond the computed tokens: it is offered once they are.
            found += [(tracked, i, keys[i]) for i in sorted(offered) if i < len(keys)]
            tracked.again = {i for i in tracked.again if i >= len(keys)}
            tracked.saved_pages = max(tracked.saved_pages, len(keys))
        return found

    def _reserve(self, wanted: list[tuple[_Tracked, int, bytes]]) -> list[PageSave]:
        assert self._manager is not None
        room = max(0, self._run.config.engine.max_open_saves_bytes // self._page.page_bytes - len(self._open))
        if len(wanted) > room:
            self._publisher.count_outcome("busy", len(wanted) - room)
            wanted = wanted[:room]
            if not wanted:
                return []
        answers = self._publisher.reserve([key for _, _, key in wanted])
        writes: dict[str, list[PageWrite]] = {}
        for (tracked, index, _), answer in zip(wanted, answers, strict=True):
            if answer is ReserveRefusal.GROWING:
                self._publisher.count_outcome(answer.value)
                tracked.again.add(index)
            if not isinstance(answer, Reservation):
                continue
            request_id = tracked.request.request_id
            self._open[answer.token] = OpenSave(answer, request_id, index)
            tracked.open_saves.add(answer.token)
            writes.setdefault(request_id, []).append(PageWrite(index, answer.token, answer.location))
        return [
            PageSave(request_id, tuple(pages), tuple(self._manager.get_block_ids(request_id)[0]))
            for request_id, pages in writes.items()
        ]

    # -- acknowledgements -------------------------------------------------------------------

    def acknowledged(self, acks: CornplugKVWorkerMetadata) -> None:
        """Commit pages that every rank has written; give up pages that a rank could not write."""
        self._costs.acknowledged(acks)
        self._unusable = self._unusable or acks.unusable
        for request_id, reason in acks.failed_loads.items():
            tracked = self._tracked.get(request_id)
            # Ranks may fail a load in different steps: it is one miss.
            if tracked is None or not tracked.barred:
                self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, reason)
            if tracked is not None:
                tracked.barred = True
                if tracked.loading is not None:
                    # The pages that it computes now may be those that the store has lost.
                    tracked.saved_pages = tracked.loading.computed // self._page.page_tokens
        if acks.loaded_bytes:
            self._tally.count("cornplug_bytes_total", self._run.app, KV_PAGE, "load", by=acks.loaded_bytes)
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

    def step_ended(self) -> None:
        """The engine has read the output of a step."""
        self._costs.step_ended()

    def _close(self, token: int) -> None:
        save = self._open.pop(token)
        if save.failed_segments:
            self._errands.release([token])
            self._publisher.count_outcome("preempted" if save.given_up else "write_failed")
        else:
            self._errands.commit(save)
        tracked = self._tracked.get(save.request_id)
        if tracked is not None:
            tracked.open_saves.discard(token)
            self._forget_if_over(tracked)

    # -- the end of a request ---------------------------------------------------------------

    def finished(self, request: Request) -> bool:
        """True when its blocks must stay until the worker halves have read them."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return False
        self._drop_match(tracked)
        self._forget_if_over(tracked)
        # While it loads, vLLM itself keeps the blocks until the load has ended, and frees them
        # then: it must not hear of them twice. Saves that are still open were begun before the
        # request was preempted, and given up.
        if tracked.open_saves and tracked.loading is None:
            self._finishing.append(request.request_id)
            return True
        return False

    def _forget_if_over(self, tracked: _Tracked) -> None:
        if tracked.request.is_finished() and not tracked.open_saves and tracked.loading is None:
            self._tracked.pop(tracked.request.request_id, None)

    def saves_open(self) -> bool:
        """Whether the engine must keep stepping for acknowledgements."""
        return bool(self._open or self._finishing or self._errands)
