"""Looks up a request's pages on SGLang's scheduler thread, before a prefetch is queued.

If a prompt is not stored, looking up its first page is sufficient and takes 0.1 ms. If a far store (remote
storage) may have that page, a prefetch is queued, and SGLang's prefetch thread waits for the far store. If
the host's store has the page, the stored pages after it are counted. Then the time to fetch these pages is
compared with the time to compute them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

from cornplug.engine_common.runtime import KV_PAGE
from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv.window_pool import WindowPool
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.sglang_hooks.kv_pages.page_hash_index import CacheNamespace, PageHashIndex
from cornplug.sglang_hooks.kv_pages.reader import PageReader

_MAX_LOOKUP_TOKENS: Final = 4096
"""Maximum number of prompt tokens that one lookup covers. A lookup takes about a millisecond."""


class EarlyLookup:
    """Looks up requests' pages for one rank."""

    def __init__(
        self,
        index: PageHashIndex,
        reader: PageReader,
        pace: LoadPace,
        tally: Tally,
        app: str,
        windows: WindowPool | None = None,
    ) -> None:
        self._index, self._reader, self._pace, self._tally, self._app = index, reader, pace, tally, app
        self._windows = windows

    def count_worth_fetching(
        self,
        tokens: Sequence[int],
        prefix: Sequence[int],
        last_hash: str | None,
        space: CacheNamespace,
        *,
        in_pairs: bool = False,
    ) -> int:
        """Return how many of `tokens` are stored and faster to fetch than to compute. `tokens` follow
        `prefix` in a request.

        Pages that will not be fetched are counted as misses. Raises CornplugError if the lookup fails.
        """
        first = hash_first_page(self._index, tokens, prefix, last_hash, space, in_pairs=in_pairs)
        begins = self._reader.has_first_page(first, len(tokens))
        if begins is None:
            # Other hosts may have pages. Assume one page, because the prefetch itself determines the number.
            return self._index.page_size
        if not begins:
            return 0
        near = tokens[: _MAX_LOOKUP_TOKENS + in_pairs]
        names = hash_pages(self._index, near, prefix, last_hash, space, in_pairs=in_pairs)
        count, on_disk = self._reader.count_leading(names)
        # This does not check a window that ends after the looked-up pages. The storage's thread looks it up
        # together with all of its pages.
        if self._windows is not None and (count < len(names) or len(tokens) <= _MAX_LOOKUP_TOKENS):
            count = self._windows.longest_stored(names[:count], at_start=not prefix)
            if not count:
                self._reader.count_absent(len(names))
                return 0
        # If the store has every page of the lookup, it likely has the following pages too.
        ahead = len(tokens) if count == len(names) else count * self._index.page_size
        disk_s = self._reader.disk_s(on_disk * ahead // (count * self._index.page_size)) if count else 0.0
        if self._pace.pays(ahead, first_s=disk_s):
            return ahead
        missed = max(1, ahead // self._index.page_tokens)
        self._tally.count("cornplug_misses_total", self._app, KV_PAGE, "cheaper", amount=missed)
        return 0


def hash_pages(
    index: PageHashIndex,
    tokens: Sequence[int],
    prefix: Sequence[int],
    last_hash: str | None,
    space: CacheNamespace,
    *,
    in_pairs: bool = False,
) -> list[str]:
    """Return SGLang's hashes of the pages of `tokens`, which follow `prefix`. Record the pages in the index.

    With `in_pairs`, hashes cover pairs of adjacent tokens. The last token then does not begin a pair.
    """
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    def hashed(run: Sequence[int], prior: str | None) -> list[str]:
        key = RadixKey(
            array("q", run), extra_key=space.extra_key, cache_salt=space.cache_salt, is_bigram=in_pairs
        )
        aligned = key.page_aligned(index.page_size)
        found: list[str] = get_storage_hash_str(aligned, prior, page_size=index.page_size)
        index.record(prior, found, run, space)
        return found

    if last_hash is not None and prefix and index.find([last_hash])[0] is None:
        # Record the prefix from its first token. `last_hash` may be the hash of other tokens, and then the
        # pages of `tokens` are not recorded.
        hashed([*prefix, *tokens[:in_pairs]], None)
    return hashed(tokens, last_hash)


def hash_first_page(
    index: PageHashIndex,
    tokens: Sequence[int],
    prefix: Sequence[int],
    last_hash: str | None,
    space: CacheNamespace,
    *,
    in_pairs: bool = False,
) -> str | None:
    """Return SGLang's hash of the first page of `tokens`, or None if they do not fill a page.

    Records all SGLang pages in the store page in which the first page begins.
    """
    whole = max(index.page_size, index.page_tokens - len(prefix) % index.page_tokens)
    names = hash_pages(index, tokens[: whole + in_pairs], prefix, last_hash, space, in_pairs=in_pairs)
    return names[0] if names else None
