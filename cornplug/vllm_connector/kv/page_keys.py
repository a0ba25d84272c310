"""Page keys of one request, computed as its tokens become known.

Keys of long prompts are computed when their requests arrive. vLLM hashes a request's blocks at the same
place: in the thread that receives requests, in parallel to steps of other requests.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import ref

from cornplug.identity import LINK_TOKENS, chain, medium_lineage, page_keys, placeholder_tokens
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.media.mm_identifiers import key_of

if TYPE_CHECKING:
    from vllm.v1.request import Request


_ATTRIBUTE: Final = "cornplug_page_keys"
_LONG_TOKENS: Final = 4096
"""Minimum length. Keys of shorter prompts take less than a tenth of a step, and are computed when they are
needed."""


@dataclass(frozen=True, slots=True)
class _Placeholder:
    offset: int
    length: int
    embeds_before: list[int] | None
    """Number of embeddings up to and including each position, or None if every position is an embedding."""
    wide: tuple[int, int, int, int]

    def replace(self, tokens: list[int], first: int) -> None:
        """Replace the placeholder tokens in `tokens`, which begin at `first`, by wide values."""
        start = max(self.offset, first)
        end = min(self.offset + self.length, first + len(tokens))
        for position in range(start, end):
            j = position - self.offset
            if self.embeds_before is None:
                tokens[position - first] = self.wide[j % 4]
            elif self.embeds_before[j] > (self.embeds_before[j - 1] if j else 0):
                tokens[position - first] = self.wide[(self.embeds_before[j] - 1) % 4]


class PageKeys:
    """Keys of a request's whole pages, which are extended and never recomputed.

    Tokens are chained up to the last requested page, and only the keys of requested pages are computed. A
    lookup whose first pages are absent is therefore cheap, even for a long prompt.
    """

    def __init__(
        self, secret: bytes, root: bytes, page_tokens: int, features: Sequence[Any], epoch: int = 0
    ) -> None:
        """Create the keys of a request. `features` are the request's vLLM MultiModalFeatureSpecs, in any
        order. `epoch` is the epoch of the weights of `root`.
        """
        self.epoch = epoch
        self._secret, self._root = secret, root
        self._page_tokens = page_tokens
        self._placeholders: list[_Placeholder] = []
        self.limit: int | None = None
        """First token of a medium without an embedding key. Pages with this token or later tokens have no
        key."""
        for feature in features:
            position = feature.mm_position
            key = key_of(feature.identifier, epoch)
            if key is None:
                self.limit = min(position.offset, self.limit if self.limit is not None else position.offset)
            else:
                # Some embeddings may be beyond the known tokens, so use the number of the whole medium.
                wide = placeholder_tokens(medium_lineage(key, position.get_num_embeds()))
                self._placeholders.append(
                    _Placeholder(position.offset, position.length, position.embeds_cumsum, wide)
                )
        self._links: list[bytes] = []
        """Value of the chain at the end of each page."""
        self._keys: dict[int, bytes] = {}

    def under(self, root: bytes) -> PageKeys:
        """Return keys of the same request under another root. Both share the chained tokens."""
        other = copy.copy(self)
        other._root, other._keys = root, {}
        return other

    def pages(self, end: int) -> int:
        """Return the number of whole pages with keys within the first `end` tokens."""
        return (end if self.limit is None else min(end, self.limit)) // self._page_tokens

    def upto(self, token_ids: Sequence[int], end: int) -> list[bytes]:
        """Return the keys of the whole pages within the first `end` tokens, or fewer because of `limit`."""
        return self.of(token_ids, range(self.pages(end)))

    def of(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[bytes]:
        """Return the keys of these pages, in ascending order, all below `pages(len(token_ids))`."""
        if not pages:
            return []
        self._advance(token_ids, pages[-1] + 1)
        # A decoding request needs one page at a time. A comprehension would add a Python call.
        new, links = [], []
        for page in pages:
            if page not in self._keys:
                new.append(page)
                links.append(self._links[page])
        made = page_keys(self._secret, self._root, self._page_tokens, links) if new else []
        self._keys.update(zip(new, made, strict=True))
        return list(map(self._keys.__getitem__, pages))

    def _advance(self, token_ids: Sequence[int], pages: int) -> None:
        """Chain the tokens of the leading `pages`."""
        first = len(self._links)
        if pages <= first:
            return
        start = first * self._page_tokens
        tokens = list(token_ids[start : pages * self._page_tokens])
        for placeholder in self._placeholders:
            placeholder.replace(tokens, start)
        links = chain(self._links[-1] if first else b"", tokens)
        per_page = self._page_tokens // LINK_TOKENS
        self._links += links[per_page - 1 :: per_page]


class KeyMaker(Protocol):
    """Source of keys of requests: the tracker of an engine core."""

    def keys_of(self, request: Request) -> PageKeys | None:
        """Return the request's keys, unless something excludes it. Thread-safe."""


_maker: ref[KeyMaker] | None = None


def make_by(maker: KeyMaker) -> None:
    """Compute the keys of arriving requests with this tracker, while it exists."""
    global _maker
    _maker = ref(maker)


def received(request: Request) -> None:
    """Compute the keys of a request that has arrived."""
    maker = _maker() if _maker is not None else None
    if maker is None or request.num_tokens < _LONG_TOKENS:
        return
    try:
        keys = maker.keys_of(request)
        if keys is not None:
            keys.upto(request.all_token_ids, request.num_tokens)
            setattr(request, _ATTRIBUTE, keys)
    except Exception as e:  # noqa: BLE001 - any error
        # An error here would end the thread and the engine. The lookup sees the same error later, and counts
        # it.
        compat.logger.debug("cornplug: cannot compute keys in advance: %r", e)


def made_for(request: Request) -> PageKeys | None:
    """Return the keys that were computed when the request arrived, or None."""
    return getattr(request, _ATTRIBUTE, None)


def _from_engine_core_request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    request = original(*args, **kwargs)
    received(request)
    return request


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.request", "Request.from_engine_core_request", _from_engine_core_request),
)
