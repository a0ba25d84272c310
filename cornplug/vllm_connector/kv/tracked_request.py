"""A request that the KV scheduler follows: its page keys, and how far it is loaded and saved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cornplug.store.leases import NO_LEASES, Leases
from cornplug.vllm_connector.kv.page_keys import PageKeys
from cornplug.vllm_connector.kv.page_recalls import FarQuestion, PageRecall
from cornplug.vllm_connector.kv.provenance import OwnTokens

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass(slots=True)
class LeasedPages:
    """Leased pages for one request, good until `expires`."""

    computed: int
    """Tokens that the engine's own cache holds: the pages follow them."""
    expires: float
    """On the monotonic clock, in seconds."""
    first_page: int = 0
    pages: Leases = NO_LEASES
    """Whole pages, from `first_page` on."""
    groups: list[tuple[int, Leases]] = field(default_factory=list)
    """(first page, pages) of each cache group, where a model has several; `pages` are one group's then."""
    tokens: list[int] = field(default_factory=list)
    """Of the leases, and of those of pages that are not whole."""
    end: int = 0
    """Once it is loading: the token before which it ends."""


class AskedPage(msgspec.Struct, eq=False):
    """A page for which room is asked."""

    tracked: TrackedRequest
    index: int
    key: bytes
    given_up: bool = False
    """Its request was preempted."""


@dataclass(slots=True)
class TrackedRequest:
    """A request of the engine, from its first lookup until it is over and no save of it is open."""

    request: Request
    keys: PageKeys | None = None
    """None: nothing of this request is shared."""
    identifying: bool = False
    """Its keys cannot be made yet: the checkpoint or the adapter is still being read."""
    done_pages: int = 0
    """Leading pages that need no save: offered to the store, known to be there, or not worth it."""
    refused: set[int] = field(default_factory=set)
    """Pages below `done_pages` that a growing store refused: they are offered again at the next step."""
    unseen: set[int] = field(default_factory=set)
    """Pages that no other request had when this one offered them: it offers them once."""
    unsaved: dict[int, bytes] = field(default_factory=dict)
    """Page -> key, of pages in its blocks that got no room: an idle engine may save them once it is over."""
    offer: LeasedPages | None = None
    loading: LeasedPages | None = None
    recall: PageRecall | None = None
    """Of its pages on disk, once it was begun."""
    far: FarQuestion | None = None
    """About its absent pages, once it was asked."""
    load_failed: bool = False
    """A load of it failed once: all further tokens are computed."""
    asked: list[AskedPage] = field(default_factory=list)
    """Pages for which room is asked, or will be in the next step, and not given or refused yet."""
    open_saves: set[int] = field(default_factory=set)
    """Tokens of its reservations that the worker halves are filling."""
    own: OwnTokens | None = None
    """The tokens whose pages may be saved, beside connectors that load KV too; else None."""

    def saved_until(self, pages: int) -> None:
        """So many leading pages need no save."""
        self.done_pages = max(self.done_pages, pages)

    def save_again_from(self, page: int) -> None:
        """This page and those behind it are computed again, and offered again."""
        self.done_pages = min(self.done_pages, page)

    def computed_after(self, scheduled: int) -> int:
        """The request's known tokens whose KV is there once so many more are computed."""
        request = self.request
        computed = request.num_computed_tokens
        # Draft tokens and async placeholders lie beyond the tokens that are known: not saved.
        end = min(computed + scheduled, request.num_tokens)
        return end if self.own is None else self.own.extend(computed, end)

    def tokens_to_page(self, end: int, scheduled: int, page_tokens: int) -> int:
        """It completes no page before so many of its tokens are scheduled, after a step that leaves it with
        `end` computed ones; 0 if it is to be looked at in its next step in any case."""
        if self.own is not None or self.refused:
            return 0
        left = (end // page_tokens + 1) * page_tokens - (self.request.num_computed_tokens + scheduled)
        return max(1, left)

    def pages_to_save(self, end: int, page_tokens: int) -> list[tuple[int, bytes]]:
        """(index, key) of pages within the first `end` tokens that are to be offered now."""
        if self.keys is None or (end // page_tokens <= self.done_pages and not self.refused):
            return []
        there = self.keys.pages(end)
        wanted: Sequence[int] = range(self.done_pages, there)
        if self.refused:
            wanted = sorted({i for i in self.refused if i < there}.union(wanted))
            # After a preemption a refused page may lie beyond the computed tokens: it is offered then.
            self.refused = {i for i in self.refused if i >= there}
        self.saved_until(there)
        return list(zip(wanted, self.keys.of(self.request.all_token_ids, wanted), strict=True))
