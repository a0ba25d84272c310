"""State of the requests that the scheduler half of the KV connector tracks: their page keys, and which pages
are being loaded and saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cornplug.engine_common import lora_digests, weights_guard
from cornplug.engine_common.lora_digests import BackgroundLoraDigests, was_rewritten
from cornplug.engine_common.model_identity import page_root
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.engine_common.weights_guard import CurrentIdentity
from cornplug.errors import CornplugError
from cornplug.kv_page import PageGeometry
from cornplug.metrics import Tally
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv import page_keys
from cornplug.vllm_connector.kv.page_keys import OtherLoads, OwnTokens, PageKeys
from cornplug.vllm_connector.model.model_config import kv_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from cornplug.vllm_connector.kv.load_offers import FarLookup, LeasedPages, PageRecall
    from cornplug.vllm_connector.kv.page_saves import PendingPage

_DECODED_TOKENS: Final = 16
"""Maximum number of tokens that a decoding request computes in one step, including draft tokens."""
_GATHER_STEPS: Final = 8
"""Maximum number of steps that a completed page of a decoding request waits, so that its reservation is sent
together with other requests' reservations."""
_GATHER_REQUESTS: Final = 32
"""Number of requests with a possibly completed page at which the store reservations for their pages are sent
without waiting any longer. Sending these reservations takes about 0.5 ms of one step."""


@dataclass(slots=True)
class TrackedRequest:
    """State of one engine request, from its first lookup until it has finished and its loads have ended."""

    request: Request
    keys: PageKeys | None = None
    """The request's page keys, or None if its KV is not shared."""
    is_identifying: bool = False
    """Whether the page keys cannot be computed yet, because the checkpoint or the adapter is still being
    read."""
    done_pages: int = 0
    """Number of leading pages that need no further save, because they were offered to the store, are already
    stored, or are not worth saving."""
    retry_pages: set[int] = field(default_factory=set)
    """Indices of pages below `done_pages` for which the store had no memory yet. They are offered again at
    the next step."""
    unseen_pages: set[int] = field(default_factory=set)
    """Indices of pages that no other request had used when this request offered them to the store. They are
    not offered again."""
    unsaved_keys: dict[int, bytes] = field(default_factory=dict)
    """Keys of computed pages that the store has not reserved space for, by page index. An idle engine may
    save these pages after the request has finished."""
    offer: LeasedPages | None = None
    loading: LeasedPages | None = None
    recall: PageRecall | None = None
    """The read of the request's pages from disk, or None if none has begun."""
    far_lookup: FarLookup | None = None
    """Pending far-store lookup for this request's missing pages, if any."""
    load_failed: bool = False
    """Whether a load for this request has failed. The engine then computes all remaining tokens."""
    skip_once: bool = False
    """Whether vLLM should skip the request once, because its load has just failed. The request is still first
    in vLLM's queue. If it were not skipped, a later request could keep the blocks that this request needs
    indefinitely."""
    pending_pages: list[PendingPage] = field(default_factory=list)
    """Pages of the request whose store reservations are pending or will be sent in the next step."""
    open_saves: set[int] = field(default_factory=set)
    """Reservation tokens of the request's pages that the worker halves are writing."""
    own_tokens: OwnTokens | None = None
    """Tracks which leading tokens have KV that may be saved. None if the engine's own prefix cache contains
    only KV that this engine may save."""

    def mark_saved_until(self, pages: int) -> None:
        """Record that the request's first `pages` pages need no save."""
        self.done_pages = max(self.done_pages, pages)

    def save_again_from(self, page: int) -> None:
        """Record that the page with this index and all later pages will be computed again, and should then be
        offered to the store again."""
        self.done_pages = min(self.done_pages, page)

    def computed_after(self, scheduled: int) -> int:
        """Return the number of the request's known tokens that have KV after `scheduled` more tokens are
        computed."""
        request = self.request
        computed = request.num_computed_tokens
        # Draft tokens and placeholders of asynchronous scheduling come after the known tokens and are not
        # saved.
        end = min(computed + scheduled, request.num_tokens)
        return end if self.own_tokens is None else self.own_tokens.extend(computed, end)

    def tokens_to_page(self, end: int, scheduled: int, page_tokens: int) -> int:
        """Return the number of further tokens that must be scheduled before the request can complete a page,
        if the current step schedules `scheduled` tokens and leaves it with `end` computed tokens. Returns 0
        if the request must be checked in the next step in any case."""
        if self.own_tokens is not None or self.retry_pages:
            return 0
        left = (end // page_tokens + 1) * page_tokens - (self.request.num_computed_tokens + scheduled)
        return max(1, left)

    def pages_to_save(self, end: int, page_tokens: int) -> list[tuple[int, bytes]]:
        """Return (index, key) of each page within the first `end` tokens that should be offered to the store
        now."""
        if self.keys is None or (end // page_tokens <= self.done_pages and not self.retry_pages):
            return []
        there = self.keys.count_pages(end)
        wanted: Sequence[int] = range(self.done_pages, there)
        if self.retry_pages:
            wanted = sorted({i for i in self.retry_pages if i < there}.union(wanted))
            # After a preemption, a refused page may not be computed yet. It is then offered later.
            self.retry_pages = {i for i in self.retry_pages if i >= there}
        self.mark_saved_until(there)
        return list(zip(wanted, self.keys.keys_for(self.request.all_token_ids, wanted), strict=True))


class TrackedRequests:
    """Tracks the requests of one engine core for the KV scheduler, and whether the engine shares KV at
    all."""

    def __init__(self, config: VllmConfig, runtime: EngineRuntime, page: PageGeometry, tally: Tally) -> None:
        self._runtime = runtime
        self._page = page
        self._tally = tally
        self._tracked: dict[str, TrackedRequest] = {}
        self._check_next: set[str] = set()
        """Ids of requests to check for a completed page in the next step that schedules tokens for them."""
        self._clock = 0
        """Logical clock, in tokens. Each step advances it by the largest number of tokens that a decoding
        request receives in that step."""
        self._due: dict[int, list[str]] = {}
        """Ids of requests by the time on `_clock` when they may complete a page. Some of the requests may
        already have finished or have been checked, which does no harm."""
        self._gathered: set[str] = set()
        """Ids of requests that, according to `_clock`, may have completed a page since the last check."""
        self._gather_steps = 0
        """Number of steps since the first request was added to `_gathered`."""
        exact = page_keys.is_own_cache_exact(config)
        self._tracks_origin = page_keys.has_other_connectors() or not exact
        self.other_loads = OtherLoads()
        if not exact:
            self.other_loads.record_load()
            compat.logger.warning(
                "cornplug: KV from vLLM's own prefix cache is not saved, because hashes of the chosen "
                "--prefix-caching-hash-algo may collide. Use sha256 or sha256_cbor to save this KV."
            )
        self._may_apply_foreign_adapter = compat.may_apply_foreign_adapter(config)
        self._identity = CurrentIdentity(lambda: kv_identity(config), "KV", compat.logger.warning)
        self._adapters = BackgroundLoraDigests()
        self._current = self._identity.current()
        """(epoch, identity of the weights in this epoch), as of the last call of `handle_update`."""
        self.epoch = self._current[0]
        """Epoch of the engine's weights as of the last call of `handle_update`. Odd during an update."""
        self.reread_count = lora_digests.reread_count()
        """Number of adapters that vLLM reads again while requests run, as of the last call of
        `handle_reread`."""
        self._current[1].wait_initially()
        if runtime.config.engine.save != "never":
            # Saving needs all page keys of a prompt, whether or not the store already has the pages.
            page_keys.set_key_maker(self)
        self.unusable_reason = ""
        """Reason why a rank cannot copy KV, or "" if all ranks can."""

    def __bool__(self) -> bool:
        return bool(self._tracked)

    @property
    def disabled_reason(self) -> str:
        """Reason why this engine shares no KV until its weights are replaced again, or "" if it shares KV."""
        return self.unusable_reason or self._current[1].failure

    @property
    def is_sharing(self) -> bool:
        """Whether KV computed with this engine's weights may be shared now."""
        return not self.disabled_reason and not weights_guard.has_replaced_weights()

    @property
    def has_gathered_requests(self) -> bool:
        """Whether any request waits to be checked for completed pages. A step that computes no tokens also
        makes this check."""
        return bool(self._gathered)

    def has_unfinished(self) -> bool:
        """Return whether any tracked request is still unfinished."""
        return not all(tracked.request.is_finished() for tracked in self._tracked.values())

    def list_all(self) -> list[TrackedRequest]:
        """Return all tracked requests."""
        return list(self._tracked.values())

    def handle_update(self) -> list[TrackedRequest]:
        """Handle replaced weights. Returns all tracked requests and drops their page keys, because the
        previous weights may have computed a part of their KV."""
        self.epoch, self._current, found = weights_guard.epoch(), self._identity.current(), self.list_all()
        self._drop_keys(found, "weights_updated")
        return found

    def handle_reread(self) -> list[TrackedRequest]:
        """Handle adapters that vLLM reads again while requests run. Returns the tracked requests that use
        such an adapter, and drops their page keys."""
        self.reread_count, found = (
            lora_digests.reread_count(),
            [t for t in self.list_all() if _is_reread(t.request)],
        )
        self._drop_keys(found, "lora_reread")
        return found

    def _drop_keys(self, found: Sequence[TrackedRequest], reason: str) -> None:
        for tracked in found:
            if tracked.keys is not None and not tracked.request.is_finished():
                self._tally.count("cornplug_misses_total", self._runtime.app, KV_PAGE, reason)
            tracked.keys, tracked.is_identifying = None, False

    def can_trust_cache(self, request: Request) -> bool:
        """Return whether all blocks in the engine's own prefix cache that this request may use were computed
        with the request's model and adapter."""
        lora = request.lora_request
        return not self.other_loads.are_possible and (lora is None or not was_rewritten(lora.lora_path))

    def get(self, request_id: str) -> TrackedRequest | None:
        """Return the tracked request with this id, or None if it is not tracked."""
        return self._tracked.get(request_id)

    def state_of(self, tracked: TrackedRequest) -> TrackedRequest:
        """Return the record of a request's pages in the model's only cache group, which is `tracked` itself.
        Models with several groups use `GroupRequests`."""
        return tracked

    def find_state(self, tracked: TrackedRequest) -> TrackedRequest | None:
        """Return `tracked`, which has the record of its own pages."""
        return tracked

    def track(self, request: Request) -> TrackedRequest:
        """Return the tracked request for `request`, and start to track it if it is new. A request whose KV is
        not shared is counted as one miss."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            if request.lora_request is not None and request.lora_request.load_inplace:
                # An in-process `LLM` loads the adapter in a step, without a call of `EngineCore.add_lora`.
                lora_digests.record_reread(request.lora_request.lora_int_id)
            own = OwnTokens() if self._tracks_origin else None
            tracked = self._tracked[request.request_id] = TrackedRequest(request, own_tokens=own)
            reason = self._create_keys(tracked)
            if reason:
                self._tally.count("cornplug_misses_total", self._runtime.app, KV_PAGE, reason)
        elif tracked.is_identifying:
            self._create_keys(tracked)
        # The request is admitted, possibly again, and the number of computed tokens then depends on the
        # engine's own cache and on loads.
        self.schedule_check(tracked)
        return tracked

    def schedule_check(self, tracked: TrackedRequest) -> None:
        """Check the request for a completed page in the next step that schedules it."""
        if self._is_tracked(tracked):
            self._check_next.add(tracked.request.request_id)

    def find_completing(
        self, scheduled_tokens: Mapping[str, int], total: int
    ) -> list[tuple[TrackedRequest, int]]:
        """Return requests that may have completed a page by the end of a step, each with its computed tokens.

        Called once per step, with the number of scheduled tokens by request id and their `total`. A step that
        only decodes makes no Python call per request. Instead, a clock advances by the largest number of
        tokens that a decoding request gets, and each request has a time on this clock when it may complete a
        page. The request is then gathered with other requests, so that their pages are reserved together a
        few steps later. Requests that get more tokens than a decoding request, and requests from
        `schedule_check`, are returned immediately, together with all gathered requests.
        """
        now = self._advance_clock(scheduled_tokens, total)
        if self._check_next:
            now += [name for name in self._check_next if name in scheduled_tokens]
        if self._gathered and self._gather_steps < _GATHER_STEPS and len(self._gathered) < _GATHER_REQUESTS:
            self._gather_steps += 1
            if scheduled_tokens and not now:
                return []
        elif not (self._gathered or now):
            return []
        names = self._gathered.union(now)
        self._gathered, self._gather_steps = set(), 0
        self._check_next -= names
        found = []
        for name in sorted(names):
            tracked = self._tracked.get(name)
            if tracked is not None:
                end = self._check_request(tracked, scheduled_tokens.get(name, 0))
                if end:
                    found.append((tracked, end))
        return found

    def _advance_clock(self, scheduled_tokens: Mapping[str, int], total: int) -> list[str]:
        """Advance the logical clock by one step. Returns the ids of requests that get more tokens than a
        decoding request."""
        most, many = 1, []
        if total != len(scheduled_tokens):
            tokens = scheduled_tokens.values()
            most = max(tokens)
            if most > _DECODED_TOKENS:
                many = [name for name, count in scheduled_tokens.items() if count > _DECODED_TOKENS]
                most = max([count for count in tokens if count <= _DECODED_TOKENS], default=1)
        # The clock advances in every step, so that every request becomes due.
        for now in range(self._clock + 1, self._clock + most + 1):
            if now in self._due:
                self._gathered |= self._tracked.keys() & self._due.pop(now)
        self._clock += most
        return many

    def _check_request(self, tracked: TrackedRequest, scheduled: int) -> int:
        """Return the number of a request's computed tokens after this step, or 0 if the request has no page
        keys or its pages are still being loaded. Also schedules the request's next check."""
        name = tracked.request.request_id
        if tracked.is_identifying:
            self._create_keys(tracked)
            self._check_next.add(name)
        if tracked.keys is None:
            return 0
        if tracked.loading is not None:
            # The request's blocks do not contain KV yet.
            self._check_next.add(name)
            return 0
        end = tracked.computed_after(scheduled)
        wait = tracked.tokens_to_page(end, scheduled, self._page.page_tokens)
        if wait:
            self._due.setdefault(self._clock + wait, []).append(name)
        else:
            self._check_next.add(name)
        return end

    def final_computed_tokens(self, tracked: TrackedRequest) -> int:
        """Return the number of computed tokens of a finished request if it may have completed a page since
        the last check, else 0."""
        name = tracked.request.request_id
        return tracked.computed_after(0) if name in self._gathered or name in self._check_next else 0

    def forget(self, tracked: TrackedRequest) -> None:
        """Stop tracking a request. A later request may have the same id."""
        if self._is_tracked(tracked):
            del self._tracked[tracked.request.request_id]
            self._check_next.discard(tracked.request.request_id)
            self._gathered.discard(tracked.request.request_id)

    def _is_tracked(self, tracked: TrackedRequest) -> bool:
        """Return whether this particular request is tracked, and not a different request with the same id."""
        held = self._tracked.get(tracked.request.request_id)
        return held is not None and held.request is tracked.request

    def _create_keys(self, tracked: TrackedRequest) -> str:
        """Compute a request's page keys. Returns the reason if its KV is not shared, else ""."""
        request, reason = tracked.request, self._miss_reason(tracked.request)
        if not reason:
            try:
                ahead = page_keys.early_keys(request)
                current = ahead is not None and ahead.epoch == self._current[0]
                tracked.keys = ahead if current else self._compute_keys(request)
            except CornplugError as e:
                reason = e.reason
        if request.lora_request is not None and was_rewritten(request.lora_request.lora_path):
            tracked.own_tokens = tracked.own_tokens or OwnTokens()
        # If the checkpoint is still being read, it may be identified by the time of the first save.
        tracked.is_identifying = reason == "identifying"
        return reason

    def keys_of(self, request: Request) -> PageKeys | None:
        """Compute page keys for a request that has just arrived. Returns None if the request is not shared or
        needs checks on the engine's thread first."""
        # Digests of adapters may be read only on the engine's thread.
        if request.lora_request is not None or self._miss_reason(request):
            return None
        return self._compute_keys(request)

    def _compute_keys(self, request: Request) -> PageKeys:
        epoch, root = self._epoch_and_root(request, self._page)
        return PageKeys(self._runtime.secret, root, self._page.page_tokens, request.mm_features, epoch)

    def _miss_reason(self, request: Request) -> str:
        """Return the reason why this request's KV is not shared, or "" if it is shared."""
        if self.disabled_reason:
            return self.disabled_reason
        if weights_guard.has_replaced_weights():
            return "weights_updated"
        if self._current[1].value is None:
            return "identifying"
        if request.prompt_embeds is not None:
            return "prompt_embeds"
        if request.resumable:
            # The prompt will grow, and keys computed now would not include its later media.
            return "streaming"
        if _is_reread(request):
            return "lora_reread"
        if self._may_apply_foreign_adapter and request.lora_request is None:
            return "lora_neighbour"
        return ""

    def root_of(self, request: Request, page: PageGeometry) -> bytes:
        """Return the root from which the keys of a request's pages with this geometry are derived. Raises
        CornplugError if the model or the adapter cannot be identified."""
        return self._epoch_and_root(request, page)[1]

    def _epoch_and_root(self, request: Request, page: PageGeometry) -> tuple[int, bytes]:
        """Return (epoch of the weights, root of the request's page keys)."""
        epoch, identified = self._current
        lora = request.lora_request
        adapter = self._adapters.digest(lora.lora_path, lora.lora_int_id) if lora is not None else None
        salt = request.cache_salt
        return epoch, page_root(self._runtime.secret, identified.get(), page, adapter=adapter, salt=salt)


def _is_reread(request: Request) -> bool:
    """Return whether vLLM may read the files of the request's LoRA adapter again while the request runs."""
    lora = request.lora_request
    return lora is not None and lora_digests.is_reread(lora.lora_int_id)
