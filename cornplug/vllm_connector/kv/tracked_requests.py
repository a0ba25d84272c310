"""Requests that the KV scheduler follows: their page keys, and their progress of loading and saving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cornplug.engine_common import lora_digests, weights_guard
from cornplug.engine_common.background_identity import CurrentIdentity
from cornplug.engine_common.kv_root import page_root
from cornplug.engine_common.lora_digests import LaterAdapters, was_rewritten
from cornplug.engine_common.runtime import KV_PAGE, EngineRuntime
from cornplug.errors import CornplugError
from cornplug.kv_page import PageGeometry
from cornplug.metrics import Tally
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv import page_keys, provenance
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.page_recalls import FarQuestion, PageRecall
from cornplug.vllm_connector.kv.provenance import OtherLoads, OwnTokens
from cornplug.vllm_connector.model.model_config import kv_identity

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from cornplug.vllm_connector.kv.load_offers import LeasedPages
    from cornplug.vllm_connector.kv.page_saves import AskedPage

_DECODED_TOKENS: Final = 16
"""Maximum tokens of a decoding request in a step, including draft tokens."""
_GATHER_STEPS: Final = 8
"""Maximum number of steps for which a page that a decoding request completed waits for others."""
_GATHER_REQUESTS: Final = 32
"""Number of requests whose pages are reserved without waiting for more. They take about 0.5 ms of one
step."""


@dataclass(slots=True)
class TrackedRequest:
    """Request of the engine, from its first lookup until it has finished and loads nothing."""

    request: Request
    keys: PageKeys | None = None
    """Page keys, or None if nothing of this request is shared."""
    identifying: bool = False
    """Whether its keys cannot be computed yet, because the checkpoint or the adapter is still being read."""
    done_pages: int = 0
    """Number of leading pages that need no save: they were offered to the store, are known to be stored, or
    are not worth saving."""
    refused: set[int] = field(default_factory=set)
    """Pages below `done_pages` that a growing store refused. They are offered again at the next step."""
    unseen: set[int] = field(default_factory=set)
    """Pages that no other request had used when this request offered them. They are offered only once."""
    unsaved: dict[int, bytes] = field(default_factory=dict)
    """Keys of pages in its blocks that were not reserved, by page. An idle engine may save them after the
    request."""
    offer: LeasedPages | None = None
    loading: LeasedPages | None = None
    recall: PageRecall | None = None
    """Recall of its pages on disk, if it has begun."""
    far: FarQuestion | None = None
    """Pending far-store lookup for this request's missing pages, if any."""
    load_failed: bool = False
    """Whether a load failed. All further tokens are then computed."""
    gives_way: bool = False
    """Whether its load has just failed. vLLM still has the request first in its queue. Unless the request is
    skipped once, a later request could hold the blocks that it needs indefinitely."""
    asked: list[AskedPage] = field(default_factory=list)
    """Pages whose reservations are pending or will be sent in the next step."""
    open_saves: set[int] = field(default_factory=set)
    """Tokens of its reservations that the worker halves are writing."""
    own: OwnTokens | None = None
    """Tokens whose pages may be saved, if the engine's own prefix cache may contain other KV, else None."""

    def saved_until(self, pages: int) -> None:
        """Record that the leading `pages` pages need no save."""
        self.done_pages = max(self.done_pages, pages)

    def save_again_from(self, page: int) -> None:
        """Record that this page and later pages are computed and offered again."""
        self.done_pages = min(self.done_pages, page)

    def computed_after(self, scheduled: int) -> int:
        """Return the number of known tokens whose KV exists after `scheduled` more tokens are computed."""
        request = self.request
        computed = request.num_computed_tokens
        # Draft tokens and async placeholders are beyond the known tokens and are not saved.
        end = min(computed + scheduled, request.num_tokens)
        return end if self.own is None else self.own.extend(computed, end)

    def tokens_to_page(self, end: int, scheduled: int, page_tokens: int) -> int:
        """Return the number of tokens that must be scheduled before the request can complete a page, after a
        step that leaves it with `end` computed tokens. 0 if it must be checked in its next step in any
        case."""
        if self.own is not None or self.refused:
            return 0
        left = (end // page_tokens + 1) * page_tokens - (self.request.num_computed_tokens + scheduled)
        return max(1, left)

    def pages_to_save(self, end: int, page_tokens: int) -> list[tuple[int, bytes]]:
        """Return (index, key) of pages within the first `end` tokens that should be offered now."""
        if self.keys is None or (end // page_tokens <= self.done_pages and not self.refused):
            return []
        there = self.keys.pages(end)
        wanted: Sequence[int] = range(self.done_pages, there)
        if self.refused:
            wanted = sorted({i for i in self.refused if i < there}.union(wanted))
            # After a preemption, a refused page may be beyond the computed tokens. It is then offered later.
            self.refused = {i for i in self.refused if i >= there}
        self.saved_until(there)
        return list(zip(wanted, self.keys.of(self.request.all_token_ids, wanted), strict=True))


class TrackedRequests:
    """All tracked requests of one engine core, and the reason if the engine shares no KV."""

    def __init__(self, config: VllmConfig, runtime: EngineRuntime, page: PageGeometry, tally: Tally) -> None:
        self._run = runtime
        self._page = page
        self._tally = tally
        self._tracked: dict[str, TrackedRequest] = {}
        self._looked_at: set[str] = set()
        """Requests that may complete a page in the next step that computes their tokens."""
        self._clock = 0
        """Maximum number of tokens that a request which decoded in every step has received."""
        self._due: dict[int, list[str]] = {}
        """Requests that may complete a page, by the time on that clock. Some of them may have finished or
        been checked before, which does no harm."""
        self._gathered: set[str] = set()
        """Requests that may have completed a page since the last check, according to that clock."""
        self._gathering = 0
        """Number of steps since the first of them."""
        exact = provenance.own_cache_is_exact(config)
        self._tracks_origin = provenance.others_load() or not exact
        self.other_loads = OtherLoads()
        if not exact:
            self.other_loads.seen()
            compat.logger.warning(
                "cornplug: KV from vLLM's own prefix cache is not saved, because the hash of "
                "--prefix-caching-hash-algo has collisions. Use sha256 or sha256_cbor to save it."
            )
        self._adapts_neighbours = compat.adapts_neighbours(config)
        self._identity = CurrentIdentity(lambda: kv_identity(config), "KV", compat.logger.warning)
        self._adapters = LaterAdapters()
        self._current = self._identity.now()
        """(epoch, identity of its weights) at the last `before_update`."""
        self.epoch = self._current[0]
        """Epoch of the engine's weights at the last `before_update`, odd during an update."""
        self.rereads = lora_digests.rereads()
        """Number of adapters that vLLM reads again while requests run, at the last `before_reread`."""
        self._current[1].first_wait()
        if runtime.config.engine.save != "never":
            # All keys of a prompt are needed in this case, whether or not the store has its pages.
            page_keys.make_by(self)
        self.unusable = ""
        """Reason why a rank cannot copy KV."""

    def __bool__(self) -> bool:
        return bool(self._tracked)

    @property
    def off(self) -> str:
        """Reason why this engine shares no KV until its weights are replaced again, or "" if it does."""
        return self.unusable or self._current[1].failure

    @property
    def sharing(self) -> bool:
        """Whether KV of this engine's weights may be shared now."""
        return not self.off and not weights_guard.replaced()

    @property
    def gathering(self) -> bool:
        """Whether a step without tokens would check a request."""
        return bool(self._gathered)

    def unfinished(self) -> bool:
        """Return whether a tracked request has not finished."""
        return not all(tracked.request.is_finished() for tracked in self._tracked.values())

    def all(self) -> list[TrackedRequest]:
        """Return all tracked requests."""
        return list(self._tracked.values())

    def before_update(self) -> list[TrackedRequest]:
        """Return the tracked requests if weights were replaced since the last call. Their keys are dropped,
        because a part of their KV may be from other weights."""
        self.epoch, self._current, found = weights_guard.epoch(), self._identity.now(), self.all()
        self._end_sharing_of(found, "weights_updated")
        return found

    def before_reread(self) -> list[TrackedRequest]:
        """Return the tracked requests whose adapters vLLM reads again while they run. Otherwise like
        `before_update`."""
        self.rereads, found = lora_digests.rereads(), [t for t in self.all() if _is_reread(t.request)]
        self._end_sharing_of(found, "lora_reread")
        return found

    def _end_sharing_of(self, found: Sequence[TrackedRequest], reason: str) -> None:
        for tracked in found:
            if tracked.keys is not None and not tracked.request.is_finished():
                self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, reason)
            tracked.keys, tracked.identifying = None, False

    def trusts_cache(self, request: Request) -> bool:
        """Return whether the engine's own prefix cache contains only KV that this request's model
        computed."""
        lora = request.lora_request
        return not self.other_loads.possible and (lora is None or not was_rewritten(lora.lora_path))

    def get(self, request_id: str) -> TrackedRequest | None:
        """Return the request with this id, or None if it is not tracked."""
        return self._tracked.get(request_id)

    def track(self, request: Request) -> TrackedRequest:
        """Start to track a request. A request that is not shared is counted once."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            if request.lora_request is not None and request.lora_request.load_inplace:
                # An in-process `LLM` loads the adapter in a step, without a call of `EngineCore.add_lora`.
                lora_digests.note_reread(request.lora_request.lora_int_id)
            own = OwnTokens() if self._tracks_origin else None
            tracked = self._tracked[request.request_id] = TrackedRequest(request, own=own)
            reason = self._make_keys(tracked)
            if reason:
                self._tally.count("cornplug_misses_total", self._run.app, KV_PAGE, reason)
        elif tracked.identifying:
            self._make_keys(tracked)
        # The request is admitted, possibly again. Its position depends on the engine's own cache and on
        # loads.
        self.look_at(tracked)
        return tracked

    def look_at(self, tracked: TrackedRequest) -> None:
        """Check the request in the next step that computes its tokens, because it may complete a page."""
        if self._follows(tracked):
            self._looked_at.add(tracked.request.request_id)

    def completing(self, scheduled_tokens: Mapping[str, int], total: int) -> list[tuple[TrackedRequest, int]]:
        """Return requests that may have completed a page by the end of a step, each with its computed tokens.

        Called once per step, with its `total` tokens. A step that only decodes makes no Python call per
        request. Instead, a clock advances by the largest number of tokens that a decoding request gets, and
        each request has a time on this clock at which it may complete a page. It is then gathered with other
        requests, so that their pages are reserved together a few steps later. Requests that get more tokens
        than a decoding request, and those of `look_at`, are returned immediately, together with all gathered
        requests.
        """
        now = self._advance(scheduled_tokens, total)
        if self._looked_at:
            now += [name for name in self._looked_at if name in scheduled_tokens]
        if self._gathered and self._gathering < _GATHER_STEPS and len(self._gathered) < _GATHER_REQUESTS:
            self._gathering += 1
            if scheduled_tokens and not now:
                return []
        elif not (self._gathered or now):
            return []
        names = self._gathered.union(now)
        self._gathered, self._gathering = set(), 0
        self._looked_at -= names
        found = []
        for name in sorted(names):
            tracked = self._tracked.get(name)
            if tracked is not None:
                end = self._look(tracked, scheduled_tokens.get(name, 0))
                if end:
                    found.append((tracked, end))
        return found

    def _advance(self, scheduled_tokens: Mapping[str, int], total: int) -> list[str]:
        """Advance the clock by a step. Returns requests that get more tokens than a decoding request."""
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

    def _look(self, tracked: TrackedRequest, scheduled: int) -> int:
        """Return a request's computed tokens after a step, or 0 if it has no keys, and schedule its next
        check."""
        name = tracked.request.request_id
        if tracked.identifying:
            self._make_keys(tracked)
            self._looked_at.add(name)
        if tracked.keys is None:
            return 0
        if tracked.loading is not None:
            # Its blocks hold nothing yet.
            self._looked_at.add(name)
            return 0
        end = tracked.computed_after(scheduled)
        wait = tracked.tokens_to_page(end, scheduled, self._page.page_tokens)
        if wait:
            self._due.setdefault(self._clock + wait, []).append(name)
        else:
            self._looked_at.add(name)
        return end

    def last_end(self, tracked: TrackedRequest) -> int:
        """Return the computed tokens of a finished request if it may have completed a page since the last
        check, else 0."""
        name = tracked.request.request_id
        return tracked.computed_after(0) if name in self._gathered or name in self._looked_at else 0

    def forget(self, tracked: TrackedRequest) -> None:
        """Stop tracking a request, because a later request may have the same id."""
        if self._follows(tracked):
            del self._tracked[tracked.request.request_id]
            self._looked_at.discard(tracked.request.request_id)
            self._gathered.discard(tracked.request.request_id)

    def _follows(self, tracked: TrackedRequest) -> bool:
        """Return whether this request is tracked, and not another request with its id."""
        held = self._tracked.get(tracked.request.request_id)
        return held is not None and held.request is tracked.request

    def _make_keys(self, tracked: TrackedRequest) -> str:
        """Compute a request's keys. Returns the reason if it has none, else ""."""
        request, reason = tracked.request, self._why_not(tracked.request)
        if not reason:
            try:
                ahead = page_keys.made_for(request)
                current = ahead is not None and ahead.epoch == self._current[0]
                tracked.keys = ahead if current else self._keys(request)
            except CornplugError as e:
                reason = e.reason
        if request.lora_request is not None and was_rewritten(request.lora_request.lora_path):
            tracked.own = tracked.own or OwnTokens()
        # A checkpoint that is still being read may be identified by the time of the first save.
        tracked.identifying = reason == "identifying"
        return reason

    def keys_of(self, request: Request) -> PageKeys | None:
        """Return keys for a request that has just arrived, or None if it needs a check first."""
        # Adapter digests belong to the engine's thread.
        if request.lora_request is not None or self._why_not(request):
            return None
        return self._keys(request)

    def _keys(self, request: Request) -> PageKeys:
        epoch, root = self._root(request, self._page)
        return PageKeys(self._run.secret, root, self._page.page_tokens, request.mm_features, epoch)

    def _why_not(self, request: Request) -> str:
        """Return the reason why this request shares no KV, or "" if it does."""
        if self.off:
            return self.off
        if weights_guard.replaced():
            return "weights_updated"
        if self._current[1].found is None:
            return "identifying"
        if request.prompt_embeds is not None:
            return "prompt_embeds"
        if request.resumable:
            # Its prompt will grow, with media that are not in page keys computed now.
            return "streaming"
        if _is_reread(request):
            return "lora_reread"
        if self._adapts_neighbours and request.lora_request is None:
            return "lora_neighbour"
        return ""

    def root_of(self, request: Request, page: PageGeometry) -> bytes:
        """Return the root of the keys of a request's pages of this geometry. Raises CornplugError."""
        return self._root(request, page)[1]

    def _root(self, request: Request, page: PageGeometry) -> tuple[int, bytes]:
        """Return (epoch of the weights, root)."""
        epoch, identified = self._current
        lora = request.lora_request
        adapter = self._adapters.digest(lora.lora_path, lora.lora_int_id) if lora is not None else None
        salt = request.cache_salt
        return epoch, page_root(self._run.secret, identified.get(), page, adapter=adapter, salt=salt)


def _is_reread(request: Request) -> bool:
    """Return whether vLLM may read the files of the request's adapter again while the request runs."""
    lora = request.lora_request
    return lora is not None and lora_digests.is_reread(lora.lora_int_id)
