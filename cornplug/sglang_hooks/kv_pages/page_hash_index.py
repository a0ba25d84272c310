"""Index from SGLang's page hashes to the store's pages, and the hooks that fill the index with the tokens of
SGLang's lookups and backups.

SGLang passes only its own hash of each page to a storage backend. For each page of recent prompts, this index
contains the page's end position in its sequence, and the value of cornplug's key chain (a chained hash of the
tokens) at this position. With these values, cornplug finds the store pages inside an SGLang page, or the
store page that contains it.

SGLang's tree core computes page hashes itself (in Rust), so the hooks only record hashes. A lookup calls
`get_storage_hash_str` with its tokens. A backup calls `write_storage` with its node's tokens. Because
`hicache_storage_pass_prefix_keys` is set, it also passes the hashes of the preceding pages.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from cornplug.identity import LINK_TOKENS, hash_chain
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, bind_arguments, logger
from cornplug.sglang_hooks.media import placeholder_tokens
from cornplug.sglang_hooks.media.placeholder_tokens import FIRST_PLACEHOLDER

_MAX_BYTES: Final = 64 << 20
"""Maximum memory of the index. A page that the index has dropped is not shared until its prompt is sent
again."""
_PAGE_BYTES: Final = 280
_END_BYTES: Final = 144
"""Measured bytes per page entry (`_PAGE_BYTES`) and per chain value in an entry (`_END_BYTES`)."""
_MAX_CONTINUATIONS: Final = 4

_CONTROLLER: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"


class CacheNamespace(NamedTuple):
    """SGLang's namespace of a sequence. `extra_key` ends with the LoRA id."""

    extra_key: str | None
    cache_salt: str | None


@dataclass(frozen=True, slots=True)
class HashedPage:
    """SGLang page with its position in its sequence and in cornplug's key chain."""

    space: CacheNamespace
    prior_hash: str | None
    """SGLang's hash of the previous page, or None at the start of a sequence."""
    end: int
    """Number of tokens from the start of the sequence to the end of this page."""
    link: bytes
    """Chain value at the end of this page."""
    store_links: tuple[bytes, ...]
    """Chain values at the ends of store pages. If SGLang's pages are at least as large as store pages, these
    are the store pages inside this page, in order. If SGLang's pages are smaller, these are the store pages
    that contain this page, one for each recorded continuation of the sequence (the newest last). The list is
    empty until a continuation fills a store page."""


class PageOverlap(NamedTuple):
    """Tokens that an SGLang page and a store page have in common."""

    links: tuple[bytes, ...]
    """Chain value at the end of the store page. Has several values if the sequence has several
    continuations."""
    store_slice: slice
    """Range of tokens in the store page."""
    sglang_slice: slice
    """Range of tokens in SGLang's page."""


class PageHashIndex:
    """Index of bounded size from SGLang's page hashes to pages. Thread-safe.

    Args:
        page_size, page_tokens: number of tokens in an SGLang page and in a store page. Raises ValueError
            unless both are multiples of 16 and one is a multiple of the other.
        is_unkeyed: returns whether a placeholder value belongs to a media item without an embedding key. The
            page with such a value and all later pages are not recorded.
        compute_chain: `identity.hash_chain`, or a faster function with the same results.
        max_bytes: approximate maximum memory of all entries.
    """

    def __init__(
        self,
        page_size: int,
        page_tokens: int,
        *,
        is_unkeyed: Callable[[int], bool] = lambda token: False,
        compute_chain: Callable[[bytes, Sequence[int]], list[bytes]] = hash_chain,
        max_bytes: int = _MAX_BYTES,
    ) -> None:
        if page_size % LINK_TOKENS or page_tokens % LINK_TOKENS:
            raise ValueError(f"page sizes {page_size} and {page_tokens} are not multiples of 16")
        if page_size % page_tokens and page_tokens % page_size:
            raise ValueError(f"page sizes {page_size} and {page_tokens}: neither is a multiple of the other")
        self.page_size, self.page_tokens = page_size, page_tokens
        self._is_unkeyed = is_unkeyed
        self._compute_chain = compute_chain
        # Memory of a page's hash, its entry, and its chain values.
        self._max_pages = max(1, max_bytes // (_PAGE_BYTES + _END_BYTES * max(1, page_size // page_tokens)))
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, HashedPage] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def clear(self) -> None:
        """Remove all pages."""
        with self._lock:
            self._pages.clear()

    def find(self, hashes: Sequence[str]) -> list[HashedPage | None]:
        """Return the page for each of these hashes, or None if the index does not have the hash."""
        with self._lock:
            return [self._pages.get(name) for name in hashes]

    def record(
        self, prior: str | None, hashes: Sequence[str], tokens: Sequence[int], space: CacheNamespace
    ) -> None:
        """Record the pages of `tokens`, which follow the page `prior`, under their SGLang `hashes`.

        If `prior` is None, the pages begin a sequence. If the index does not have `prior`, or if `prior`
        belongs to another namespace, nothing is recorded.
        """
        size = self.page_size
        with self._lock:
            known = 0
            while known < len(hashes) and hashes[known] in self._pages:
                self._pages.move_to_end(hashes[known])
                known += 1
            if known:
                prior = hashes[known - 1]
            end, link = 0, b""
            if prior is not None:
                before = self._pages.get(prior)
                if before is None or before.space != space:
                    return
                end, link = before.end, before.link
        # Compute the chain without the lock. This takes milliseconds for a long prompt, and the scheduler's
        # thread uses the index too.
        new = self._keyed_tokens(tokens[known * size : len(hashes) * size])
        if not new:
            return
        links = self._compute_chain(link, new)
        with self._lock:
            for i in range(len(new) // size):
                end += size
                inside = links[i * size // LINK_TOKENS : (i + 1) * size // LINK_TOKENS]
                prior = self._insert(hashes[known + i], HashedPage(space, prior, end, inside[-1], ()), inside)
            while len(self._pages) > self._max_pages:
                self._pages.popitem(last=False)

    def overlaps(self, page: HashedPage) -> list[PageOverlap]:
        """Return the overlaps of a page with store pages, or [] if no overlapping store page is complete
        yet."""
        size, stored = self.page_size, self.page_tokens
        if size >= stored:
            return [
                PageOverlap((link,), slice(0, stored), slice(i * stored, (i + 1) * stored))
                for i, link in enumerate(page.store_links)
            ]
        first = (page.end - size) % stored
        return (
            [PageOverlap(page.store_links, slice(first, first + size), slice(0, size))]
            if page.store_links
            else []
        )

    def ends_store_page(self, page: HashedPage) -> bool:
        """Return whether a store page ends at the end of this page."""
        return page.end % self.page_tokens == 0

    def siblings(self, name: str) -> list[tuple[str, HashedPage]]:
        """Return the SGLang pages in the store page whose last SGLang page is `name`, as (hash, page) in
        order.

        Pages that the index has dropped are left out.
        """
        with self._lock:
            return self._siblings(name)

    def _siblings(self, name: str) -> list[tuple[str, HashedPage]]:
        found: list[tuple[str, HashedPage]] = []
        at: str | None = name
        while at is not None and len(found) < self.page_tokens // self.page_size:
            page = self._pages.get(at)
            if page is None:
                break
            found.append((at, page))
            at = page.prior_hash
        return found[::-1]

    def _keyed_tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return the tokens of all complete pages before the first media item without a key."""
        # Check only placeholder values, because a prompt may have a hundred thousand tokens.
        wide = np.flatnonzero(np.array(tokens, np.int64) >= FIRST_PLACEHOLDER).tolist()
        whole = next((i for i in wide if self._is_unkeyed(tokens[i])), len(tokens))
        return tokens[: whole // self.page_size * self.page_size]

    def _insert(self, name: str, page: HashedPage, links: list[bytes]) -> str:
        if self.page_size >= self.page_tokens:
            step = self.page_tokens // LINK_TOKENS
            self._pages[name] = HashedPage(
                page.space, page.prior_hash, page.end, page.link, tuple(links[step - 1 :: step])
            )
            return name
        self._pages[name] = page
        if self.ends_store_page(page):
            for sibling, part in self._siblings(name):
                ends = (*(end for end in part.store_links if end != page.link), page.link)[
                    -_MAX_CONTINUATIONS:
                ]
                self._pages[sibling] = HashedPage(part.space, part.prior_hash, part.end, part.link, ends)
        return name


_index: PageHashIndex | None = None
_backup_state: Final = threading.local()
_controller_var: Final[ContextVar[Any]] = ContextVar("cornplug_hicache_controller", default=None)


def attaching_controller() -> Any:
    """Return SGLang's cache controller while it creates its storage backend, otherwise None."""
    return _controller_var.get()


def open_index(page_size: int, page_tokens: int) -> PageHashIndex:
    """Create an index. From now on, this process's hooks fill the index.

    Raises ValueError in the same cases as `PageHashIndex`.
    """
    global _index
    _index = PageHashIndex(
        page_size, page_tokens, is_unkeyed=placeholder_tokens.is_unkeyed, compute_chain=_choose_chain()
    )
    return _index


def _native_chain(prior: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Compute `identity.hash_chain` with SGLang's page hash.

    SGLang's hash gives the same result, but is compiled and releases the GIL.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    if len(tokens) % LINK_TOKENS:
        raise ValueError(f"{len(tokens)} tokens is not a multiple of {LINK_TOKENS}")
    return [bytes.fromhex(link) for link in get_hash_str(tokens, prior.hex() or None, page_size=LINK_TOKENS)]


def _choose_chain() -> Callable[[bytes, Sequence[int]], list[bytes]]:
    """Return `_native_chain` if SGLang's hash equals `identity.hash_chain` on a sample, else
    `identity.hash_chain`."""
    tokens = array("q", (*range(2 * LINK_TOKENS), *(1 << 40 for _ in range(LINK_TOKENS))))
    for prior in (b"", bytes(range(32))):
        if _native_chain(prior, tokens) != hash_chain(prior, tokens):
            logger.warning("cornplug: SGLang's page hash has changed, so cornplug uses its own slower hash")
            return hash_chain
    return _native_chain


def close_index() -> None:
    """Drop the index. From now on, the hooks record nothing."""
    global _index
    _index = None


def forget_pages() -> None:
    """Empty the index. The hooks fill it again."""
    if _index is not None:
        _index.clear()


def _record_lookup_hashes(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the function that hashes the tokens of a storage lookup, to record the hashes."""
    result = original(*args, **kwargs)
    index = _index
    if index is None or not activation.is_on() or not isinstance(result, list):
        return result
    call = bind_arguments(original, args, kwargs)
    key = call["key"]
    # With an EAGLE draft model, SGLang hashes pairs of adjacent tokens, so a page's hash also depends on the
    # token after the page. The model's KV does not depend on that token, so the index leaves it out.
    if call["page_size"] == index.page_size:
        index.record(
            call["prior_hash"], result, key.raw_token_ids(), CacheNamespace(key.extra_key, key.cache_salt)
        )
    return result


def _wrap_backup(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a node's backup, to pass the node's namespace to `_wrap_write_storage`."""
    call = bind_arguments(original, args, kwargs)
    cache = call["self"]
    if _index is None or not activation.is_on():
        return original(*args, **kwargs)
    space = CacheNamespace(*cache.tree_core.prefetch_anchor_info(call["node_id"]))
    _record_prefix(_index, cache, call["node_id"], space)
    _backup_state.space = space
    try:
        return original(*args, **kwargs)
    finally:
        _backup_state.space = None


def _record_prefix(index: PageHashIndex, cache: Any, node_id: Any, space: CacheNamespace) -> None:
    """Record the pages before a node if the index does not have them.

    They were backed up before this storage was attached, or the index has dropped them.
    """
    before = cache.tree_core.get_prefix_hash_values(node_id)
    if not before or index.find(before[-1:])[0] is not None:
        return
    (path,) = cache.tree_core.collect_path_info([node_id])
    for node in path[:-1]:
        # None for a node without a copy on the host. If a node is backed up, all its ancestors have copies.
        spec = cache.tree_core.build_storage_backup_spec(node.node_id, True)
        if spec is None:
            return
        _record_pages(index, spec.hash_value, spec.token_ids, spec.prefix_keys, space)


def _record_pages(
    index: PageHashIndex,
    hashes: Sequence[str] | None,
    tokens: Sequence[int],
    prefix: Sequence[str] | None,
    space: CacheNamespace,
) -> None:
    # If SGLang hashes pairs of tokens, there is one more token.
    if hashes and prefix is not None and len(tokens) - len(hashes) * index.page_size in (0, 1):
        index.record(prefix[-1] if prefix else None, hashes, tokens, space)


def _wrap_write_storage(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the function that queues a backup, to record the backup's pages first."""
    index, space = _index, getattr(_backup_state, "space", None)
    if index is not None and space is not None:
        call = bind_arguments(original, args, kwargs)
        _record_pages(index, call["hash_value"], call["token_ids"], call["prefix_keys"], space)
    return original(*args, **kwargs)


def _wrap_attach(original: Any, controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the creation of a storage backend, to pass the controller to cornplug's storage.

    The storage needs the controller to verify the host pool's layout.
    """
    token = _controller_var.set(controller)
    try:
        return original(controller, *args, **kwargs)
    finally:
        _controller_var.reset(token)


HOOKS: tuple[Hook, ...] = (
    # Hook the name in the controller module, because a hook on the function in mem_cache.utils would not
    # affect that name.
    Hook(
        f"{_CONTROLLER}.get_storage_hash_str",
        "around",
        _record_lookup_hashes,
        ("key", "prior_hash", "page_size"),
    ),
    Hook(f"{_CACHE}.write_backup_storage", "around", _wrap_backup, ("self", "node_id")),
    Hook(
        f"{_CONTROLLER}.HybridCacheController.write_storage",
        "around",
        _wrap_write_storage,
        ("token_ids", "hash_value", "prefix_keys"),
    ),
    Hook(f"{_CONTROLLER}.HybridCacheController.attach_storage_backend", "around", _wrap_attach),
)
