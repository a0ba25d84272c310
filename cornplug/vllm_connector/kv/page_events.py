"""KV events for the store's pages. They report to routers which prefixes of this engine's requests are stored
in memory or on disk.

Saves and hits register pages. The store's table of entries, which this process maps into memory, shows the
location of each page. Events therefore follow the store's contents, regardless of which process stored or
evicted a page. Checking the table sends no message and does not count as a use of the page. vLLM collects
events in steps, so an engine without requests reports an eviction in its next step.

A router identifies blocks by their tokens and by the hashes in vLLM's own KV events, which do not depend on
cornplug's secret. A page may be longer or shorter than a block, so an event describes a span: the shortest
run of complete pages that is also a run of complete blocks.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import StoreUnavailable
from cornplug.store.base import Store, Tier
from cornplug.vllm_connector import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

    from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest, TrackedRequests


_CHECK_INTERVAL_S: Final = 0.05
"""Seconds between checks of announced pages while no registered page waits for its announcement."""
_FAST_CHECK_INTERVAL_S: Final = 0.002
"""Seconds between checks while registered pages wait for their announcement. A registered page is stored
already (a hit), or will be stored within a few steps (a save)."""
_REGISTERED_TIMEOUT_S: Final = 1.0
"""Seconds after which a registered page that is not in the store is dropped, because its save has failed."""
_UNREACHABLE_TIMEOUT_S: Final = 5.0
"""Seconds after which all announced pages are reported as removed if the store cannot be reached."""
_SPANS_PER_CHECK: Final = 256
"""Number of announced spans to check at a time. If more than 16,384 spans are announced, a 64th of them is
checked at a time."""
_MAX_SPANS: Final = 1 << 16
"""Maximum number of announced and registered spans. Each span takes about 1 KiB of memory. Further pages are
not announced."""
_MEDIUM: Final[Mapping[int, str]] = {Tier.MEMORY: MEDIUM_CPU, Tier.DISK: MEDIUM_STORAGE}


class SpanContent(msgspec.Struct, frozen=True):
    """Content of the KV events for one span (a run of pages) of a request's tokens."""

    hashes: Sequence[Any]
    parent: Any
    """Hash of the block before the span, or None if the span begins with the request's first block."""
    tokens: array[int]
    extra_keys: Sequence[Any]
    """For each block, the adapter's name, the media and the salt that are part of the block's hash."""
    lora_id: int | None
    lora_name: str | None
    lookahead: Sequence[list[int]] | None
    """For each block, the tokens after the block that are part of the block's hash (since vLLM 0.33). None if
    hashes cover no later tokens."""


class BlockSpans:
    """Divides a request's tokens into spans of `span_pages` pages and creates the spans' KV events, for one
    cache group."""

    def __init__(self, pool: BlockPool, spec: KVCacheSpec, group: int, page_tokens: int) -> None:
        self.group = group
        self._pool, self._block_size = pool, spec.block_size
        self._span_tokens = math.lcm(page_tokens, spec.block_size)
        self.span_pages = self._span_tokens // page_tokens
        self._span_blocks = self._span_tokens // spec.block_size
        self._kind = get_kv_cache_spec_kind(spec).value
        self._window = get_kv_cache_spec_sliding_window(spec)

    def span_contents(self, request: Request, first: int, count: int) -> list[SpanContent]:
        """Return the content of KV events for `count` spans of a request, beginning with span `first`. Spans
        with blocks that vLLM has not hashed yet are left out."""
        size, many, ahead = (
            self._block_size,
            self._span_blocks,
            getattr(self._pool, "num_hash_lookahead_tokens", 0),
        )
        hashes = resolve_block_hashes(request.block_hashes, self._pool.hash_block_size, size)
        begin = first * many
        count = min(count, len(hashes) // many - first)
        if count <= 0:
            return []
        # A prompt may have thousands of blocks, so read vLLM's lists only once.
        names = [maybe_convert_block_hash(one) for one in hashes[max(0, begin - 1) : begin + count * many]]
        if not begin:
            names.insert(0, None)
        start = first * self._span_tokens
        tokens = array("q", request.all_token_ids[start : start + count * self._span_tokens])
        lora = request.lora_request
        lora_id, lora_name = (lora.adapter_id, lora.name) if lora is not None else (None, None)
        plain = not (request.mm_features or lora or request.cache_salt)
        found = []
        for at in range(0, count * many, many):
            ends = range(start + (at + 1) * size, start + (at + many) * size + 1, size)
            found.append(
                SpanContent(
                    names[at + 1 : at + 1 + many],
                    names[at],
                    tokens[at * size : (at + many) * size],
                    [None] * many if plain else self._extra_keys(request, ends, ahead),
                    lora_id,
                    lora_name,
                    [list(request.all_token_ids[one : one + ahead]) for one in ends] if ahead else None,
                )
            )
        return found

    def _extra_keys(self, request: Request, ends: Sequence[int], ahead: int) -> Sequence[Any]:
        """Return the extra keys for each block that ends at one of `ends`. A block's hash also covers the
        `ahead` tokens after the block."""
        size = self._block_size
        keys = [generate_block_hash_extra_keys(request, end - size, end + ahead, 0)[0] for end in ends]
        return to_event_extra_keys(keys) or ()

    def stored_event(self, span: SpanContent, medium: str) -> BlockStored:
        """Return the event that reports this span as stored on this medium."""
        event = BlockStored(
            block_hashes=list(span.hashes),
            parent_block_hash=span.parent,
            token_ids=list(span.tokens),
            block_size=self._block_size,
            lora_id=span.lora_id,
            medium=medium,
            lora_name=span.lora_name,
            extra_keys=list(span.extra_keys),
            group_idx=self.group,
            kv_cache_spec_kind=self._kind,
            kv_cache_spec_sliding_window=self._window,
        )
        if span.lookahead is not None:
            event.lookahead_token_ids = list(span.lookahead)
        return event


def try_join(tail: BlockStored, event: BlockStored) -> bool:
    """Append the blocks of `event` to `tail` if they directly follow the blocks of `tail` in the same
    request. Return whether they do."""
    goes_on = event.parent_block_hash == tail.block_hashes[-1]
    if not goes_on or (event.medium, event.lora_name) != (tail.medium, tail.lora_name):
        return False
    tail.block_hashes += event.block_hashes
    tail.token_ids += event.token_ids
    tail.extra_keys += event.extra_keys
    if getattr(event, "lookahead_token_ids", None):
        tail.lookahead_token_ids += event.lookahead_token_ids
    return True


@dataclass(slots=True)
class PageSpan:
    """State of a span of stored pages: the content of its KV events, and the tier that was last announced."""

    content: SpanContent
    keys: Sequence[bytes]
    """Keys of the span's pages in the store. KV events do not contain these keys."""
    registered_s: float
    tier: int = Tier.ABSENT
    """Tier of the store that the span's last event announced."""


@dataclass(slots=True)
class _Changes:
    """KV events for the changes that one check of the store's table found."""

    stored: list[KVCacheEvent] = field(default_factory=list)
    removed: dict[str, list[object]] = field(default_factory=dict)
    """Hashes of removed blocks, by medium."""

    def add(self, event: BlockStored) -> None:
        if not (self.stored and try_join(self.stored[-1], event)):
            self.stored.append(event)


class PageEvents:
    """Creates the KV events that one scheduler half publishes for the store's pages. Used by the engine's
    thread."""

    def __init__(self, store: Store, requests: TrackedRequests) -> None:
        self._store, self._requests = store, requests
        self._spans: BlockSpans | None = None
        self._registered: dict[bytes, PageSpan] = {}
        """Registered spans that are not announced yet, by the key of each span's last page. The store may not
        have them yet."""
        self._announced: dict[bytes, PageSpan] = {}
        self._unchecked: list[bytes] = []
        """Keys in `_announced` that remain to be checked in the current round of checks."""
        self._next_check_s = 0.0
        self._unreachable_since_s = 0.0
        """Time when the store became unreachable, or 0 if it can be reached."""
        self._was_reset = False
        self._cleared = False
        """Whether vLLM has sent routers an `AllBlocksCleared` event for this engine."""
        self._queue: list[KVCacheEvent] = []

    def bind(self, pool: BlockPool | None, spec: KVCacheSpec, group: int, page_tokens: int) -> None:
        """Set the engine's block pool, and the cache group whose pages are announced. Without a block pool,
        no page is announced."""
        # With context parallelism, a hash does not cover exactly the tokens in one of this rank's blocks.
        if pool is not None and spec.block_size % pool.hash_block_size == 0:
            self._spans = BlockSpans(pool, spec, group, page_tokens)
            reset = pool.reset_prefix_cache

            def reset_prefix_cache() -> bool:
                done: bool = reset()
                self._cleared = self._cleared or done
                return done

            pool.reset_prefix_cache = reset_prefix_cache

    @property
    def has_pending(self) -> bool:
        """Whether there are registered pages or events to process. If so, the engine should continue to run
        steps."""
        return bool(self._registered or self._queue or (self._cleared and self._announced))

    def register_pages(self, tracked: TrackedRequest, pages: range) -> None:
        """Register pages of a request that the store has now or will have after the next step. They will be
        announced."""
        for span in self._build_spans(tracked, pages, include_known=False):
            self._registered[span.keys[-1]] = span

    def _build_spans(self, tracked: TrackedRequest, pages: range, *, include_known: bool) -> list[PageSpan]:
        """Return the spans that contain these pages of a request. Spans that are already announced or
        registered are left out unless `include_known` is set."""
        spans, keys = self._spans, tracked.keys
        if spans is None or keys is None or not pages:
            return []
        request, many, now_s = tracked.request, spans.span_pages, time.monotonic()
        first, end = (
            pages.start // many,
            min(-(-pages.stop // many), keys.count_pages(request.num_tokens) // many),
        )
        held = keys.keys_for(request.all_token_ids, range(first * many, end * many))
        lasts = held[many - 1 :: many]
        new = [i for i, last in enumerate(lasts) if include_known or not self._is_known(last, now_s)]
        if not new or (not include_known and self._exceeds_limit(len(new))):
            return []
        named = spans.span_contents(request, first + new[0], new[-1] - new[0] + 1)
        return [
            PageSpan(named[i - new[0]], held[i * many : (i + 1) * many], now_s)
            for i in new
            if i - new[0] < len(named)
        ]

    def _is_known(self, last: bytes, now_s: float) -> bool:
        """Return whether a span is already announced or registered. `last` is the key of the span's last
        page. If the span is registered, its time is updated."""
        if last in self._registered:
            self._registered[last].registered_s = now_s
        return last in self._announced or last in self._registered

    def _exceeds_limit(self, more: int) -> bool:
        return len(self._announced) + len(self._registered) + more > _MAX_SPANS

    def register_span(self, span: PageSpan) -> None:
        """Register a span of a finished request that the store has now or will have after the next step."""
        now_s = time.monotonic()
        if not self._is_known(span.keys[-1], now_s) and not self._exceeds_limit(1):
            span.registered_s = now_s
            self._registered[span.keys[-1]] = span

    def register_stored_page(self, tracked: TrackedRequest, page: int) -> None:
        """Register a page of a request that this engine has computed and that the store already has."""
        # After a reset, this engine ignores pages that were stored earlier.
        if not self._was_reset:
            self.register_pages(tracked, range(page, page + 1))

    def spans_by_page(self, tracked: TrackedRequest, pages: Iterable[int]) -> dict[int, PageSpan]:
        """Return the spans that contain these pages of a finished request, by page index, for later calls of
        `register_span`. A span holds only its own tokens, not all tokens of the request."""
        wanted = sorted(pages)
        if self._spans is None or not wanted:
            return {}
        many = self._spans.span_pages
        found = self._build_spans(tracked, range(wanted[0], wanted[-1] + 1), include_known=True)
        first = wanted[0] // many
        return {i: found[i // many - first] for i in wanted if i // many - first < len(found)}

    def forget_stored(self) -> None:
        """Announce all pages as removed, because the engine ignores pages that were stored before this
        call."""
        self._was_reset = True
        self._remove_all()

    def on_weights_replaced(self) -> None:
        """Announce all pages as removed, because their KV was computed with the previous weights."""
        self._remove_all()

    def take_events(self) -> Sequence[KVCacheEvent]:
        """Check the store if a check is due, and return the KV events since the last call."""
        now_s = time.monotonic()
        if self._cleared:
            self._announce_again()
        if now_s >= self._next_check_s and (self._registered or self._announced):
            self._check_store(now_s)
        events, self._queue = self._queue, []
        return events

    def _announce_again(self) -> None:
        """Send the events of all stored pages again. Called after vLLM's `AllBlocksCleared` event, which
        makes subscribers forget all pages, but applies only to vLLM's own cache."""
        self._cleared, again = False, _Changes()
        for span in self._announced.values():
            assert self._spans is not None
            again.add(self._spans.stored_event(span.content, _MEDIUM[span.tier]))
        self._queue += again.stored

    def _check_store(self, now_s: float) -> None:
        if not self._requests.is_sharing:
            self._remove_all()
            return
        spans = [*self._registered.items(), *self._take_due_spans()]
        try:
            tiers = self._store.peek([key for _, span in spans for key in span.keys])
        except StoreUnavailable:
            self._unreachable_since_s = self._unreachable_since_s or now_s
            if now_s - self._unreachable_since_s >= _UNREACHABLE_TIMEOUT_S:
                self._remove_all()
            self._next_check_s = now_s + _CHECK_INTERVAL_S
            return
        self._unreachable_since_s, at, changes = 0.0, 0, _Changes()
        for key, span in spans:
            there = tiers[at : at + len(span.keys)]
            at += len(span.keys)
            self._update_tier(key, span, Tier.ABSENT if Tier.ABSENT in there else max(there), now_s, changes)
        # Send events for new locations first. Otherwise a router would consider a page lost while the page
        # moves to disk.
        self._queue += changes.stored
        self._queue_removals(changes.removed)
        self._next_check_s = now_s + (_FAST_CHECK_INTERVAL_S if self._registered else _CHECK_INTERVAL_S)

    def _take_due_spans(self) -> list[tuple[bytes, PageSpan]]:
        """Return the announced spans to check now. Every span is checked about every 3 s."""
        if not self._unchecked:
            self._unchecked = list(self._announced)
        count = max(_SPANS_PER_CHECK, len(self._announced) // 64)
        due, self._unchecked = self._unchecked[:count], self._unchecked[count:]
        return [(key, self._announced[key]) for key in due if key in self._announced]

    def _update_tier(self, key: bytes, span: PageSpan, tier: int, now_s: float, changes: _Changes) -> None:
        """Process the result of a check: the span is now on `tier`. Add events for a change to `changes`."""
        if tier == span.tier:
            if not tier and now_s - span.registered_s > _REGISTERED_TIMEOUT_S:
                del self._registered[key]
            return
        if span.tier:
            changes.removed.setdefault(_MEDIUM[span.tier], []).extend(span.content.hashes)
        span.tier = tier
        if not tier:
            del self._announced[key]
            return
        if self._registered.pop(key, None) is not None:
            self._announced[key] = span
        assert self._spans is not None
        changes.add(self._spans.stored_event(span.content, _MEDIUM[tier]))

    def _remove_all(self) -> None:
        """Drop all spans and announce their removal, because this engine no longer uses the pages that are
        now in the store."""
        removed: dict[str, list[object]] = {}
        for span in self._announced.values():
            removed.setdefault(_MEDIUM[span.tier], []).extend(span.content.hashes)
        self._queue_removals(removed)
        self._registered.clear()
        self._announced.clear()
        self._unchecked = []

    def _queue_removals(self, removed: Mapping[str, list[object]]) -> None:
        assert self._spans is not None or not removed
        for medium, hashes in removed.items():
            group = self._spans.group if self._spans is not None else None
            self._queue.append(BlockRemoved(block_hashes=hashes, medium=medium, group_idx=group))


def create_page_events(
    config: VllmConfig, runtime: EngineRuntime, requests: TrackedRequests
) -> PageEvents | None:
    """Create the source of this engine's KV events, or return None if events are disabled or not
    available."""
    settings = getattr(config, "kv_events_config", None)
    if settings is None or not settings.enable_kv_cache_events:
        return None
    if not runtime.store.can_peek:
        compat.logger.warning(
            "cornplug: KV events do not include the store's pages, because this store does not report "
            "evictions"
        )
        return None
    return PageEvents(runtime.store, requests)
