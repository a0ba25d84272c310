"""Loading of KV pages. A request's stored pages are leased, offered to vLLM, and loaded if vLLM accepts the
offer. Pages on disk or in far stores are read first, while vLLM continues with other requests."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cornplug.engine_common.rank_pages import check_page_headers
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime, count_as_miss
from cornplug.errors import StoreUnavailable
from cornplug.kv_page import PageGeometry, pages_between
from cornplug.metrics import Tally
from cornplug.store.base import NO_LEASES, Leases, Tier
from cornplug.store.payload import LEASE_S, MAX_FAR_LOOKUP_KEYS
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.metadata import PageLoad
from cornplug.vllm_connector.kv.open_saves import DeferredStoreOps
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.pauses import ResetFilter
from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest

if TYPE_CHECKING:
    from cornplug.vllm_connector.kv.page_events import PageEvents


_FIRST_PAGES: Final = 32
"""Number of pages in the first query of a lookup. Computing the keys of this many pages takes about as long
as the query."""

_CHECK_INTERVAL_S: Final = 1e-3
"""Minimum seconds between two checks for newly arrived pages of a recall. vLLM polls once per step, and idle
steps are short."""
_REREQUEST_S: Final = 0.05
"""Seconds after which pages that have not arrived are requested again. The store reads only a part of a long
prompt at a time."""

_WAIT_TIMEOUT_S: Final = 0.05
"""Seconds after which a waiting request that was not polled again is assumed to be aborted."""


@dataclass(slots=True)
class LeasedPages:
    """Leased pages that are offered to one request. The offer is valid until `expires`."""

    computed: int
    """Number of the request's leading tokens that are in the engine's own cache. The leased pages follow
    these tokens."""
    expires: float
    """Time on the monotonic clock, in seconds, when the offer expires."""
    first_page: int = 0
    pages: Leases = NO_LEASES
    """Leases of pages with valid headers, starting with page `first_page` of the request."""
    groups: list[tuple[int, Leases]] = field(default_factory=list)
    """(index of the first page, leased pages) for each cache group, if the model has several. `pages` then
    has the pages of one of these groups."""
    lease_tokens: list[int] = field(default_factory=list)
    """Lease tokens of all leased pages, including pages that are not offered."""
    end: int = 0
    """Index of the first token after the load. Set when loading begins."""
    stored: list[tuple[TrackedRequest, int]] = field(default_factory=list)
    """(request, number of its leading pages that need no save) for each cache group, if the store has the
    pages but loading them does not pay."""


class LoadOffers:
    """Looks up a request's stored pages, leases them and offers them to vLLM. Used by the engine's thread."""

    def __init__(
        self,
        runtime: EngineRuntime,
        page: PageGeometry,
        tally: Tally,
        costs: LoadCosts,
        store_ops: DeferredStoreOps,
    ) -> None:
        self._runtime = runtime
        self._page = page
        self._tally = tally
        self._costs = costs
        self._store_ops = store_ops
        self._reset_filter = ResetFilter(runtime)
        self._recalls = PageRecalls(runtime, costs)
        self._accepted_loads: list[PageLoad] = []
        self.events: PageEvents | None = None

    @property
    def has_open_recall(self) -> bool:
        """Whether any request waits for pages that are read from disk."""
        return self._recalls.has_waiting_requests

    def offered_tokens(self, tracked: TrackedRequest, computed: int) -> int | None:
        """Return the number of tokens after the first `computed` tokens that are in leased pages, or None
        while pages are read from disk or far stores are queried. vLLM calls this often. Most calls need no
        message to the store."""
        if tracked.load_failed:
            return 0
        if (
            tracked.recall is not None
            and not tracked.recall.is_over
            and self._waits_for_recall(tracked.recall)
        ):
            return None
        if tracked.far_lookup is not None and self._waits_for_far(tracked):
            return None
        offer = tracked.offer
        if offer is None or offer.computed != computed or time.monotonic() > offer.expires:
            self.withdraw(tracked)
            expires = time.monotonic() + LEASE_S / 3
            offer = tracked.offer = LeasedPages(computed, expires)
            with count_as_miss(self._tally, self._runtime.app, KV_PAGE):
                self._look_up(tracked, offer)
            recalls = tracked.recall is not None and not tracked.recall.is_over
            if recalls or (tracked.far_lookup is not None and tracked.far_lookup.end_s > time.monotonic()):
                tracked.offer = None
                return None
            if self.events is not None and offer.pages:
                # Include the pages before the offer, which are in the engine's own cache, because a router
                # follows the chain of blocks from the start of the prompt.
                self.events.register_pages(tracked, range(offer.first_page + len(offer.pages)))
        if not offer.pages:
            return 0
        return (offer.first_page + len(offer.pages)) * self._page.page_tokens - computed

    def _waits_for_recall(self, recall: PageRecall) -> bool:
        """Return whether the request still waits for pages from disk. Pages that did not arrive in time are
        counted as misses once."""
        late: int | None = 0
        with count_as_miss(self._tally, self._runtime.app, KV_PAGE):
            late = self._recalls.poll_recall(recall)
        if late:
            self._count_misses("disk_late", late)
        return late is None

    def _waits_for_far(self, tracked: TrackedRequest) -> bool:
        """Return whether the request still waits for far stores' replies."""
        assert tracked.far_lookup is not None
        waits = self._recalls.is_waiting_for_far(tracked.far_lookup)
        if not waits:
            tracked.far_lookup.end_s = 0.0
        return waits

    def _start_far_lookup(
        self, tracked: TrackedRequest, absent: range, keys_of: Callable[[range], Sequence[bytes]]
    ) -> bool:
        """Start to look up absent pages in far stores, at most once per request. Returns True if the request
        now waits for replies, so that the caller must end its own lookup."""
        if not absent or not self._runtime.store.is_far_up:
            return False
        if tracked.far_lookup is not None or not self._can_recall(tracked):
            return False
        some = range(absent.start, min(absent.stop, absent.start + MAX_FAR_LOOKUP_KEYS))
        tokens = len(absent) * self._page.page_tokens
        tracked.far_lookup = self._recalls.start_far_lookup(keys_of(some), tokens=tokens)
        return tracked.far_lookup is not None

    def _begin_recall(
        self, tracked: TrackedRequest, keys: Sequence[bytes], *, tokens: int, pages: int
    ) -> bool:
        """Start to read those pages of `keys` that are only on disk. Returns True if the caller must end the
        lookup, because the request waits for these pages or was looked up again without them."""
        if not self._can_recall(tracked):
            return False
        on_disk = self._recalls.find_on_disk(keys)
        if not on_disk:
            return False
        if not self._recalls.begin(tracked, on_disk, tokens=tokens, pages=pages):
            self._count_misses("cheaper", len(on_disk))
            assert tracked.offer is not None
            self._look_up(tracked, tracked.offer)
        return True

    def _can_recall(self, tracked: TrackedRequest) -> bool:
        # For a page on disk, it is unknown whether it was stored before or after a reset.
        return tracked.recall is None and self._runtime.store.has_disk and not self._reset_filter.was_reset

    def _presence_query(self, tracked: TrackedRequest) -> Callable[..., bytes]:
        """Return the query that gives one byte per key, nonzero if the store has the page in memory, or on
        disk if this request may wait for reads from disk."""
        store = self._runtime.store
        return store.tiers if self._can_recall(tracked) else store.contains

    def _look_up(self, tracked: TrackedRequest, offer: LeasedPages) -> None:
        request, page = tracked.request, self._page
        assert tracked.keys is not None
        # The last token is always computed, because the next token is sampled from its output.
        wanted = pages_between(offer.computed, request.num_tokens - 1, page.page_tokens)
        nameable = range(wanted.start, tracked.keys.count_pages(request.num_tokens - 1))
        keys = self._find_stored(tracked, tracked.keys, nameable)
        end_page = wanted.start + len(keys)
        if self._runtime.store.is_far_up:
            keys_of = functools.partial(tracked.keys.keys_for, request.all_token_ids)
            if self._start_far_lookup(tracked, range(end_page, nameable.stop), keys_of):
                return
        tokens = end_page * page.page_tokens - offer.computed
        if self._begin_recall(tracked, keys, tokens=tokens, pages=len(keys)):
            return
        if len(keys) < len(nameable):
            self._count_misses("absent", len(wanted) - len(keys))
        if not keys:
            return
        store, config = self._runtime.store, self._runtime.config.store
        if not self._costs.should_load(tokens=tokens, pages=len(keys)):
            self._count_misses("cheaper", len(keys))
            offer.stored.append((tracked, end_page))
            return
        leases = store.lease(keys, ttl_s=LEASE_S, deadline_s=config.deadline_s)
        offer.lease_tokens = leases.unique_tokens
        there = leases.metas.index(None) if None in leases.metas else len(leases)
        whole, error = check_page_headers(
            leases[: self._reset_filter.count_since_reset(leases[:there])], page
        )
        offer.first_page, offer.pages = wanted.start, leases[:whole]
        if error is not None:
            self._count_misses(error.reason)
            if error.is_damage:
                self._store_ops.delete(keys[whole])

    def _find_stored(self, tracked: TrackedRequest, keys: PageKeys, pages: range) -> list[bytes]:
        """Return the keys of `pages` up to the first page that the store does not have.

        Queries grow in size, so that few keys are computed after the first absent page, and a complete hit
        needs few calls.
        """
        if not self._reset_filter.can_distinguish():
            return []
        deadline_s = self._runtime.config.store.deadline_s
        end_s = time.monotonic() + deadline_s
        present_of = self._presence_query(tracked)
        found: list[bytes] = []
        at, count = pages.start, _FIRST_PAGES
        while at < pages.stop:
            asked = keys.keys_for(tracked.request.all_token_ids, range(at, min(at + count, pages.stop)))
            present = present_of(asked, deadline_s=deadline_s).find(0)
            if present >= 0:
                return found + asked[:present]
            found += asked
            at, count = at + count, 2 * count
            deadline_s = max(0.0, end_s - time.monotonic())
        return found

    def _count_misses(self, reason: str, pages: int = 1) -> None:
        self._tally.count("cornplug_misses_total", self._runtime.app, KV_PAGE, reason, amount=pages)

    def forget_stored(self, requests: Iterable[TrackedRequest]) -> None:
        """Ignore pages that were stored before this call, and withdraw the offers to these requests."""
        for tracked in requests:
            self.withdraw(tracked)
        self._reset_filter.begin_reset()

    def withdraw(self, tracked: TrackedRequest) -> None:
        """Release the leases of the pages offered to a request, because the engine does not load them."""
        if tracked.offer is not None and tracked.offer.lease_tokens:
            self._store_ops.release(tracked.offer.lease_tokens)
        tracked.offer = None

    def handle_allocation(
        self, tracked: TrackedRequest, blocks: Sequence[Sequence[int]], external_tokens: int
    ) -> None:
        """Handle the engine's decision about an offer. The engine loads `external_tokens` tokens into
        `blocks`, one list per cache group, or has declined the offer if `external_tokens` is 0."""
        offer = tracked.offer
        if offer is None:
            return
        if not external_tokens:
            # After the offer has expired, the store may have evicted the pages.
            if time.monotonic() <= offer.expires:
                for own, pages in offer.stored:
                    own.mark_saved_until(pages)
            self.withdraw(tracked)
            return
        tracked.offer, tracked.loading = None, offer
        offer.end = offer.computed + external_tokens
        self._begin_load(tracked, offer, blocks)

    def _begin_load(
        self, tracked: TrackedRequest, offer: LeasedPages, blocks: Sequence[Sequence[int]]
    ) -> None:
        # The engine may accept only a part of the offer.
        offer.pages = offer.pages[: -(-offer.end // self._page.page_tokens) - offer.first_page]
        request_id = tracked.request.request_id
        self._costs.begin_load(request_id, len(offer.pages))
        self._accepted_loads.append(
            PageLoad(
                request_id,
                offer.computed,
                offer.end,
                offer.first_page,
                offer.pages,
                array("q", blocks[0]),
                self._costs.deadline_s(offer.end - offer.computed),
            )
        )
        tracked.mark_saved_until(offer.end // self._page.page_tokens)

    def take_new_loads(self) -> list[PageLoad]:
        """Return the loads that the engine has accepted since the last call, for the worker halves."""
        taken, self._accepted_loads = self._accepted_loads, []
        return taken

    def record_failed_load(self, tracked: TrackedRequest | None, reason: str) -> None:
        """Record that a rank could not load a page of a request. Ranks may report a failed load in different
        steps, but the load counts as one miss."""
        if tracked is None or not tracked.load_failed:
            self._count_misses(reason)
        if tracked is not None:
            tracked.load_failed = True

    def end_load(self, tracked: TrackedRequest) -> None:
        """Record that the worker halves have ended the load of a request, successfully or not, and release
        its leases."""
        if tracked.loading is None:
            return
        load, tracked.loading = tracked.loading, None
        self._store_ops.release(load.lease_tokens)
        whole, app = not tracked.load_failed, self._runtime.app
        tracked.skip_once = not whole
        waited = self._costs.end_load(tracked.request.request_id, is_complete=whole)
        self._tally.observe("cornplug_wait_seconds", waited, app, KV_PAGE)
        if whole:
            self._tally.count("cornplug_hits_total", app, KV_PAGE, "store", amount=len(load.pages))
            self._tally.count("cornplug_saved_tokens_total", app, amount=load.end - load.computed)
            if tracked.own_tokens is not None:
                tracked.own_tokens.extend(load.computed, load.end)


@dataclass(slots=True)
class PageRecall:
    """Progress of reading a request's pages from disk. A request has at most one recall."""

    keys: Sequence[bytes]
    """Keys of the request's pages that are read from disk."""
    began_s: float
    end_s: float
    """Time after which pages that have not arrived are computed instead."""
    missing_pages: int
    """Number of the recall's pages that have not arrived yet."""
    is_over: bool = False
    last_arrival_s: float = 0.0
    """Time of the last check that found a newly arrived page."""
    last_request_s: float = 0.0
    last_check_s: float = 0.0


@dataclass(slots=True)
class FarLookup:
    """Pending lookup of a request's absent pages in far stores. A request has at most one such lookup."""

    ticket: int
    end_s: float
    """Time after which the request continues even if some replies are missing."""


class PageRecalls:
    """Reads pages from disk and looks up pages in far stores for one scheduler half. Used by the engine's
    thread."""

    def __init__(self, runtime: EngineRuntime, costs: LoadCosts) -> None:
        self._runtime, self._costs = runtime, costs
        self._last_wait_s = -1.0
        """Time when a request last had to wait for pages. Negative before the first wait."""

    @property
    def has_waiting_requests(self) -> bool:
        """Whether any request waits for pages from disk or far stores. vLLM polls this in every step."""
        return time.monotonic() - self._last_wait_s < _WAIT_TIMEOUT_S

    def start_far_lookup(self, keys: Sequence[bytes], *, tokens: int) -> FarLookup | None:
        """Start to look up the pages with these keys, which contain the first of `tokens` absent tokens, in
        far stores. Returns None if a recent lookup of these pages is complete, or if no far store responds.
        Raises StoreUnavailable."""
        ticket = self._runtime.store.start_far_lookup(keys)
        if not ticket:
            return None
        now_s = self._last_wait_s = time.monotonic()
        return FarLookup(ticket, now_s + self._costs.far_wait_s(tokens))

    def is_waiting_for_far(self, lookup: FarLookup) -> bool:
        """Return whether the request should still wait for far stores' replies to a lookup. A few pages of a
        long prompt are looked up at a time, so the arrival of the first pages does not end the wait. Sends no
        message."""
        now_s = time.monotonic()
        if now_s >= lookup.end_s or self._runtime.store.is_far_lookup_done(lookup.ticket):
            return False
        self._last_wait_s = now_s
        return True

    def find_on_disk(self, keys: Sequence[bytes]) -> list[bytes]:
        """Return those of the keys whose pages are only on disk. Raises StoreUnavailable."""
        tiers = self._runtime.store.tiers(keys, deadline_s=self._runtime.config.store.deadline_s)
        return [key for key, tier in zip(keys, tiers, strict=True) if tier == Tier.DISK]

    def begin(self, tracked: TrackedRequest, keys: Sequence[bytes], *, tokens: int, pages: int) -> bool:
        """Start to read the pages of `keys` from disk for a request, if that is faster than computing them,
        and return whether it is. The pages belong to a hit of `pages` pages and `tokens` tokens. Call it at
        most once per request. Raises StoreUnavailable."""
        now_s = time.monotonic()
        pays = self._costs.should_recall(tokens=tokens, pages=pages, on_disk=len(keys))
        end_s = now_s + self._costs.deadline_s(tokens)
        tracked.recall = recall = PageRecall(
            keys, now_s, end_s, len(keys), is_over=not pays, last_arrival_s=now_s
        )
        if pays:
            self._request_pages(recall, keys, now_s)
        return pays

    def _request_pages(self, recall: PageRecall, keys: Sequence[bytes], now_s: float) -> None:
        recall.last_request_s = now_s
        self._runtime.store.recall(keys)

    def poll_recall(self, recall: PageRecall) -> int | None:
        """Return the number of pages that had not arrived when the recall ended, or None while it is in
        progress.

        Raises StoreUnavailable, which also ends the recall.
        """
        now_s = self._last_wait_s = time.monotonic()
        if now_s - max(recall.last_request_s, recall.last_check_s) < _CHECK_INTERVAL_S:
            return None
        recall.last_check_s = now_s
        try:
            missing = self.find_on_disk(recall.keys)
            if len(missing) < recall.missing_pages:
                recall.missing_pages, recall.last_arrival_s = len(missing), now_s
            patience_s = self._runtime.config.store.background_timeout_s
            if missing and now_s < min(recall.end_s, recall.last_arrival_s + patience_s):
                if now_s - recall.last_request_s > _REREQUEST_S:
                    self._request_pages(recall, missing, now_s)
                return None
        except StoreUnavailable:
            recall.is_over = True
            raise
        recall.is_over = True
        # If no page arrived, record that one page takes at least the time that has passed.
        self._costs.record_recall(max(1, len(recall.keys) - len(missing)), now_s - recall.began_s)
        return len(missing)
