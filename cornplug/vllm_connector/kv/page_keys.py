"""Page keys of requests. They are computed as a request's tokens become known. This module also tracks which
KV may be saved under these keys.

Keys of long prompts are computed when the request arrives. Like vLLM's block hashes, they are computed on the
thread that receives requests, in parallel with steps of other requests.

KV that another connector loaded (NIXL, LMCache or an offloading connector, with vLLM's MultiConnector) has no
page keys, because its weights and tokens are unknown. Later KV of the same request depends on this KV and has
no page keys either. A page is saved only if this engine computed every token up to the page's end, or loaded
the tokens through cornplug. On a prefill server, connectors do not load KV. Until another connector loads for
the first time, the engine's own prefix cache contains only this engine's KV.

The engine's own prefix cache identifies blocks by hashes. If hashes may collide (`--prefix-caching-hash-algo
xxhash`), a request may get another prompt's blocks. In that case, pages that a request got from the prefix
cache are not saved either.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

from cornplug.identity import LINK_TOKENS, hash_chain, media_item_lineage, page_keys, placeholder_tokens
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.compat import KV_CONNECTOR
from cornplug.vllm_connector.media.mm_identifiers import key_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request


_ATTRIBUTE: Final = "cornplug_page_keys"
_MIN_EARLY_TOKENS: Final = 4096
"""Minimum number of tokens of a prompt for its keys to be computed on arrival. Keys of a shorter prompt are
computed when they are needed, which takes less than a tenth of a step."""

_COLLISION_RESISTANT: Final = frozenset({"sha256", "sha256_cbor"})
"""Values of --prefix-caching-hash-algo whose hashes do not collide in practice."""

_OBSERVABLE_CONNECTORS: Final = frozenset({"LMCacheMPConnector", "NixlConnector", "OffloadingConnector"})
"""Names of connectors that load KV only for requests that `MultiConnector.update_state_after_alloc` assigns
to the connector."""

_connecting: Final = threading.local()

_MULTI: Final = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


@dataclass(frozen=True, slots=True)
class _Placeholder:
    offset: int
    length: int
    embeds_before: list[int] | None
    """Number of embeddings up to and including each position of the placeholder, or None if every position is
    an embedding."""
    token_values: tuple[int, int, int, int]

    def replace_tokens(self, tokens: list[int], first: int) -> None:
        """Replace the placeholder tokens of this media item in `tokens` with values derived from the item's
        key. `tokens` are the request's tokens from index `first` on."""
        start = max(self.offset, first)
        end = min(self.offset + self.length, first + len(tokens))
        for position in range(start, end):
            j = position - self.offset
            if self.embeds_before is None:
                tokens[position - first] = self.token_values[j % 4]
            elif self.embeds_before[j] > (self.embeds_before[j - 1] if j else 0):
                tokens[position - first] = self.token_values[(self.embeds_before[j] - 1) % 4]


class PageKeys:
    """Page keys of one request. Keys are added as the request grows, and are never recomputed.

    Tokens are hashed in a chain up to the last requested page. Only the keys of requested pages are computed.
    Therefore a lookup that misses in the first pages is cheap, even for a long prompt.
    """

    def __init__(
        self, secret: bytes, root: bytes, page_tokens: int, features: Sequence[Any], epoch: int = 0
    ) -> None:
        """Prepare the keys of a request. `features` are the request's vLLM MultiModalFeatureSpecs, in any
        order. `epoch` is the epoch (update counter) of the weights that `root` identifies."""
        self.epoch = epoch
        self._secret, self._root = secret, root
        self._page_tokens = page_tokens
        self._placeholders: list[_Placeholder] = []
        self.limit: int | None = None
        """Index of the first token of the first media item without an embedding key, or None if all items
        have keys. Pages that contain this token or later tokens have no key."""
        for feature in features:
            position = feature.mm_position
            key = key_of(feature.identifier, epoch)
            if key is None:
                self.limit = min(position.offset, self.limit if self.limit is not None else position.offset)
            else:
                # The known tokens may end inside the media item, so count the embeddings of the complete
                # item.
                wide = placeholder_tokens(media_item_lineage(key, position.get_num_embeds()))
                self._placeholders.append(
                    _Placeholder(position.offset, position.length, position.embeds_cumsum, wide)
                )
        self._links: list[bytes] = []
        """Value of the hash chain at the end of each page."""
        self._keys: dict[int, bytes] = {}

    def with_root(self, root: bytes) -> PageKeys:
        """Return page keys of the same request, derived from another root. Both objects share the hash chain
        over the tokens."""
        other = copy.copy(self)
        other._root, other._keys = root, {}
        return other

    def count_pages(self, end: int) -> int:
        """Return the number of complete pages within the first `end` tokens that have keys."""
        return (end if self.limit is None else min(end, self.limit)) // self._page_tokens

    def keys_until(self, token_ids: Sequence[int], end: int) -> list[bytes]:
        """Return the keys of all complete pages within the first `end` tokens that have keys."""
        return self.keys_for(token_ids, range(self.count_pages(end)))

    def keys_for(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[bytes]:
        """Return the keys of the pages with these indices. `pages` is in ascending order, and each index is
        less than `count_pages(len(token_ids))`."""
        if not pages:
            return []
        self._extend_chain(token_ids, pages[-1] + 1)
        # A decoding request needs one page at a time, for which a comprehension would add a Python call.
        new, links = [], []
        for page in pages:
            if page not in self._keys:
                new.append(page)
                links.append(self._links[page])
        made = page_keys(self._secret, self._root, self._page_tokens, links) if new else []
        self._keys.update(zip(new, made, strict=True))
        return list(map(self._keys.__getitem__, pages))

    def _extend_chain(self, token_ids: Sequence[int], pages: int) -> None:
        """Extend the hash chain to the end of the first `pages` pages."""
        first = len(self._links)
        if pages <= first:
            return
        start = first * self._page_tokens
        tokens = list(token_ids[start : pages * self._page_tokens])
        for placeholder in self._placeholders:
            placeholder.replace_tokens(tokens, start)
        links = hash_chain(self._links[-1] if first else b"", tokens)
        per_page = self._page_tokens // LINK_TOKENS
        self._links += links[per_page - 1 :: per_page]


class KeyMaker(Protocol):
    """Interface of an object that computes page keys for requests: the request tracker of an engine core."""

    def keys_of(self, request: Request) -> PageKeys | None:
        """Return the page keys of a request, or None if KV of the request is not shared or needs a check
        first. Thread-safe."""


_key_maker: ref[KeyMaker] | None = None


def set_key_maker(maker: KeyMaker) -> None:
    """Use `maker` to compute the page keys of arriving requests for as long as `maker` exists."""
    global _key_maker
    _key_maker = ref(maker)


def compute_early_keys(request: Request) -> None:
    """Compute the page keys of a request that has arrived, if its prompt is long."""
    maker = _key_maker() if _key_maker is not None else None
    if maker is None or request.num_tokens < _MIN_EARLY_TOKENS:
        return
    try:
        keys = maker.keys_of(request)
        if keys is not None:
            keys.keys_until(request.all_token_ids, request.num_tokens)
            setattr(request, _ATTRIBUTE, keys)
    except Exception as e:  # noqa: BLE001 - any error
        # An exception would end this thread and the engine. The later lookup raises the same error and counts
        # a miss.
        compat.logger.debug("cornplug: cannot compute keys in advance: %r", e)


def early_keys(request: Request) -> PageKeys | None:
    """Return the page keys that were computed when the request arrived, or None if none were computed
    then."""
    return getattr(request, _ATTRIBUTE, None)


def _from_engine_core_request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    request = original(*args, **kwargs)
    compute_early_keys(request)
    return request


class OtherLoads:
    """Records whether the engine's own prefix cache may contain KV that another connector loaded."""

    def __init__(self) -> None:
        self.are_possible = not getattr(_connecting, "loads_are_seen", False)

    def record_load(self) -> None:
        """Record that another connector will load KV."""
        self.are_possible = True


@dataclass(slots=True)
class OwnTokens:
    """Counts the leading tokens of a request whose KV this engine computed or loaded through cornplug."""

    end: int = 0

    def record_admission(self, known_tokens: int) -> None:
        """Record that vLLM has assigned new blocks to the request. The KV of the first `known_tokens` tokens
        comes from this engine or cornplug."""
        self.end = known_tokens

    def extend(self, start: int, end: int) -> int:
        """Record that this engine computed tokens `start` to `end`, or loaded them through cornplug. Return
        the number of leading tokens that count, at most `end`. New tokens count only if all tokens before
        `start` count.

        Tokens from the engine's own prefix cache do not count once that cache contains KV from other
        connectors.
        """
        if start <= self.end:
            self.end = max(self.end, end)
        return min(self.end, end)


def is_own_cache_exact(config: VllmConfig) -> bool:
    """Return whether the engine's own prefix cache returns only blocks of a request's own tokens, because its
    hashes do not collide."""
    return config.cache_config.prefix_caching_hash_algo in _COLLISION_RESISTANT


def has_other_connectors() -> bool:
    """Return whether vLLM is currently creating cornplug's connector together with other connectors."""
    return getattr(_connecting, "beside", False)


def _init_multi_connector(
    original: Callable[..., Any], multi: Any, config: Any, *args: Any, **kwargs: Any
) -> Any:
    names = [
        child.get("kv_connector")
        for child in config.kv_transfer_config.kv_connector_extra_config.get("connectors") or ()
    ]
    _connecting.beside = len(names) > 1
    _connecting.loads_are_seen = _OBSERVABLE_CONNECTORS.issuperset(set(names) - {KV_CONNECTOR})
    try:
        return original(multi, config, *args, **kwargs)
    finally:
        _connecting.beside = _connecting.loads_are_seen = False


def _update_state_after_alloc(
    original: Callable[..., Any], multi: Any, request: Any, blocks: Any, num_external_tokens: int
) -> Any:
    if num_external_tokens:
        chosen = multi._requests_to_connector.get(request.request_id)
        for i, connector in enumerate(multi.sub_connectors):
            if i != chosen and hasattr(connector, "_on_other_connector_load"):
                connector._on_other_connector_load()
    return original(multi, request, blocks, num_external_tokens)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.request", "Request.from_engine_core_request", _from_engine_core_request),
    (_MULTI, "MultiConnector.__init__", _init_multi_connector),
    (_MULTI, "MultiConnector.update_state_after_alloc", _update_state_after_alloc),
)
