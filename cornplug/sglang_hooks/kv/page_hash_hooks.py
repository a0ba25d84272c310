"""Hooks that fill the page hash index with the tokens of SGLang's lookups and backups.

SGLang's tree core computes page hashes itself (in Rust), so these hooks record hashes and do not replace
them. A lookup calls `get_storage_hash_str` with its tokens. A backup calls `write_storage` with its node's
tokens and, because `hicache_storage_pass_prefix_keys` is set, with the hashes of the pages before them.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from cornplug.identity import LINK_TOKENS, chain
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, arguments, logger
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace, PageHashIndex
from cornplug.sglang_hooks.media import placeholder_tokens

_index: PageHashIndex | None = None
_writing: Final = threading.local()
_attaching: Final[ContextVar[Any]] = ContextVar("cornplug_hicache_controller", default=None)


def attaching() -> Any:
    """Return SGLang's cache controller while it creates its storage backend, otherwise None."""
    return _attaching.get()


def open_index(page_size: int, page_tokens: int) -> PageHashIndex:
    """Create an index that this process's hooks fill from now on.

    Raises ValueError in the same cases as `PageHashIndex`.
    """
    global _index
    _index = PageHashIndex(
        page_size, page_tokens, is_unkeyed=placeholder_tokens.is_unkeyed, advance=_fastest_chain()
    )
    return _index


def _native_chain(prior: bytes, tokens: Sequence[int]) -> list[bytes]:
    """Compute `identity.chain` with SGLang's page hash.

    SGLang's hash has the same result, but is compiled and releases the GIL.
    """
    from sglang.srt.mem_cache.utils import get_hash_str

    if len(tokens) % LINK_TOKENS:
        raise ValueError(f"{len(tokens)} tokens is not a multiple of {LINK_TOKENS}")
    return [bytes.fromhex(link) for link in get_hash_str(tokens, prior.hex() or None, page_size=LINK_TOKENS)]


def _fastest_chain() -> Callable[[bytes, Sequence[int]], list[bytes]]:
    """Return `_native_chain` if SGLang's hash equals `identity.chain` on a sample, else `identity.chain`."""
    tokens = array("q", (*range(2 * LINK_TOKENS), *(1 << 40 for _ in range(LINK_TOKENS))))
    for prior in (b"", bytes(range(32))):
        if _native_chain(prior, tokens) != chain(prior, tokens):
            logger.warning("cornplug: SGLang's page hash changed, so cornplug uses its own, which is slower")
            return chain
    return _native_chain


def close_index() -> None:
    """Drop the index. The hooks record nothing from now on."""
    global _index
    _index = None


def forget_pages() -> None:
    """Empty the index. The hooks fill it again."""
    if _index is not None:
        _index.clear()


def _hashed(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the function that hashes the tokens of a storage lookup, to record the hashes."""
    result = original(*args, **kwargs)
    index = _index
    if index is None or not activation.is_on() or not isinstance(result, list):
        return result
    call = arguments(original, args, kwargs)
    key = call["key"]
    # With an EAGLE draft, SGLang hashes pairs of adjacent tokens, so a page's hash also depends on the token
    # after the page. The model's KV does not depend on that token, so the index omits it.
    if call["page_size"] == index.page_size:
        index.record(
            call["prior_hash"], result, key.raw_token_ids(), CacheNamespace(key.extra_key, key.cache_salt)
        )
    return result


def _backing_up(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a node's backup, to pass the node's namespace to `_writing_storage`."""
    call = arguments(original, args, kwargs)
    cache = call["self"]
    if _index is None or not activation.is_on():
        return original(*args, **kwargs)
    space = CacheNamespace(*cache.tree_core.prefetch_anchor_info(call["node_id"]))
    _know_prefix(_index, cache, call["node_id"], space)
    _writing.space = space
    try:
        return original(*args, **kwargs)
    finally:
        _writing.space = None


def _know_prefix(index: PageHashIndex, cache: Any, node_id: Any, space: CacheNamespace) -> None:
    """Record the pages before a node if the index lacks them.

    They were backed up before this storage was attached, or were evicted from the index.
    """
    before = cache.tree_core.get_prefix_hash_values(node_id)
    if not before or index.find(before[-1:])[0] is not None:
        return
    (path,) = cache.tree_core.collect_path_info([node_id])
    for node in path[:-1]:
        # None for a node without a copy on the host. If a node is backed up, all nodes before it have copies.
        spec = cache.tree_core.build_storage_backup_spec(node.node_id, True)
        if spec is None:
            return
        _record(index, spec.hash_value, spec.token_ids, spec.prefix_keys, space)


def _record(
    index: PageHashIndex,
    hashes: Sequence[str] | None,
    tokens: Sequence[int],
    prefix: Sequence[str] | None,
    space: CacheNamespace,
) -> None:
    # If SGLang hashes pairs of tokens, there is one token more.
    if hashes and prefix is not None and len(tokens) - len(hashes) * index.page_size in (0, 1):
        index.record(prefix[-1] if prefix else None, hashes, tokens, space)


def _writing_storage(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the function that queues a backup, to record the backup's pages first."""
    index, space = _index, getattr(_writing, "space", None)
    if index is not None and space is not None:
        call = arguments(original, args, kwargs)
        _record(index, call["hash_value"], call["token_ids"], call["prefix_keys"], space)
    return original(*args, **kwargs)


def _attach(original: Any, controller: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the creation of a storage backend, to pass the controller to cornplug's storage.

    The storage needs the controller to verify the layout.
    """
    token = _attaching.set(controller)
    try:
        return original(controller, *args, **kwargs)
    finally:
        _attaching.reset(token)


_CONTROLLER: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller"
_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"

HOOKS: tuple[Hook, ...] = (
    # Hook the controller module's binding of the function, because a hook on the function in mem_cache.utils
    # would not affect this binding.
    Hook(f"{_CONTROLLER}.get_storage_hash_str", "around", _hashed, ("key", "prior_hash", "page_size")),
    Hook(f"{_CACHE}.write_backup_storage", "around", _backing_up, ("self", "node_id")),
    Hook(
        f"{_CONTROLLER}.HybridCacheController.write_storage",
        "around",
        _writing_storage,
        ("token_ids", "hash_value", "prefix_keys"),
    ),
    Hook(f"{_CONTROLLER}.HybridCacheController.attach_storage_backend", "around", _attach),
)
