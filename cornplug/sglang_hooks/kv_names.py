"""Keeps the book of page names: reads the tokens that SGLang hands around.

The tree core computes SGLang's page hashes itself (in Rust), so nothing is replaced here. A
lookup passes `get_storage_hash_str` with its tokens; a backup passes `write_storage` with its
node's tokens and, since `hicache_storage_pass_prefix_keys` is set, the hashes before them.
"""

from __future__ import annotations

import threading
from array import array
from contextvars import ContextVar
from typing import Any, Final

from cornplug.sglang_hooks import active, kv_roots, named
from cornplug.sglang_hooks.compat import Hook
from cornplug.sglang_hooks.kv_book import Book, Space

_book: Book | None = None
_writing: Final = threading.local()
_attaching: Final[ContextVar[Any]] = ContextVar("cornplug_hicache_controller", default=None)


def attaching() -> Any:
    """SGLang's cache controller that is making its storage backend just now; None otherwise."""
    return _attaching.get()


def open_book(page_size: int, page_tokens: int) -> Book:
    """Begin a book for this process; the hooks fill it from now on. Raises ValueError as `Book`."""
    global _book
    _book = Book(page_size, page_tokens, is_foreign=named.is_foreign)
    return _book


def close_book() -> None:
    """The hooks do nothing from now on."""
    global _book
    _book = None


def _looked_up(result: Any, key: Any, prior_hash: str | None = None, page_size: int | None = None) -> None:
    """After SGLang has hashed the tokens that it will ask storage for."""
    book = _book
    if book is None or not active.is_on() or not isinstance(result, list) or page_size != book.page_size:
        return
    # A speculative draft's pages are of pairs of tokens, the last of which lies beyond the page.
    if not key.is_bigram:
        book.record(prior_hash, result, key.raw_token_ids(), Space(key.extra_key, key.cache_salt))


def _will_look_up(
    cache: Any,
    request: Any,
    last_host_node_id: Any,
    new_input_tokens: Any,
    last_hash: str | None = None,
    prefix_keys: Any = None,
    matched_prefix_tokens: Any = None,
    extra_key: str | None = None,
    cache_salt: str | None = None,
    storage_hit_end: int | None = None,
) -> None:
    """Before SGLang asks for what follows a prefix that it has: learn that prefix if forgotten."""
    book = _book
    if book is None or not active.is_on() or last_hash is None or not matched_prefix_tokens:
        return
    if cache.tree_core.is_eagle or book.find([last_hash])[0] is not None:
        return
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = array("q", matched_prefix_tokens)
    key = RadixKey(tokens, extra_key=extra_key, cache_salt=cache_salt)
    # Hashed anew and not taken on trust: `last_hash` gets a name only if it is of these tokens.
    hashes = get_storage_hash_str(key.page_aligned(book.page_size), None, page_size=book.page_size)
    book.record(None, hashes, tokens, Space(extra_key, key.cache_salt))


def _backing_up(original: Any, cache: Any, node_id: Any) -> Any:
    """Around a node's backup: `_will_write` needs its namespace."""
    if _book is None or not active.is_on() or cache.tree_core.is_eagle:
        return original(cache, node_id)
    _writing.space = Space(*cache.tree_core.prefetch_anchor_info(node_id))
    try:
        return original(cache, node_id)
    finally:
        _writing.space = None


def _will_write(
    controller: Any,
    host_indices: Any,
    token_ids: Any,
    hash_value: Any = None,
    prefix_keys: Any = None,
    extra_pools: Any = None,
) -> None:
    """Before a backup is queued."""
    book, space = _book, getattr(_writing, "space", None)
    if book is None or space is None or not hash_value or prefix_keys is None:
        return
    if len(token_ids) == len(hash_value) * book.page_size:
        book.record(prefix_keys[-1] if prefix_keys else None, hash_value, token_ids, space)


def _attach(original: Any, controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the making of a storage backend: ours verifies the layout with the controller."""
    token = _attaching.set(controller)
    try:
        return original(controller, *args, **kwargs)
    finally:
        _attaching.reset(token)


_CONTROLLER: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

HOOKS: tuple[Hook, ...] = (
    # The name that this module has bound; the one in mem_cache.utils would not be seen here.
    Hook(f"{_CONTROLLER}.get_storage_hash_str", "after", _looked_up),
    Hook(f"{_CACHE}.prefetch_from_storage", "before", _will_look_up),
    Hook(f"{_CACHE}.write_backup_storage", "around", _backing_up),
    Hook(f"{_CONTROLLER}.HybridCacheController.write_storage", "before", _will_write),
    Hook(f"{_CONTROLLER}.HybridCacheController.attach_storage_backend", "around", _attach),
    *kv_roots.HOOKS,
)
