"""Computation of the page keys of a request, as the request's tokens become known.

Keys of long prompts are computed when the request arrives. Like vLLM's hashes of a request's blocks, these
keys are computed in the thread that receives requests, in parallel with steps of other requests.
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
"""Minimum number of tokens of a prompt for its keys to be computed on arrival. Computing the keys of a
shorter prompt takes less than a tenth of a step, and is done when the keys are needed."""


@dataclass(frozen=True, slots=True)
class _Placeholder:
    offset: int
    length: int
    embeds_before: list[int] | None
    """Number of embeddings up to and including each position of the placeholder, or None if every position is
    an embedding."""
    wide: tuple[int, int, int, int]

    def replace(self, tokens: list[int], first: int) -> None:
        """Replace the medium's placeholder tokens in `tokens` with values derived from the medium's key.
        `tokens` are the request's tokens from index `first` on."""
        start = max(self.offset, first)
        end = min(self.offset + self.length, first + len(tokens))
        for position in range(start, end):
            j = position - self.offset
            if self.embeds_before is None:
                tokens[position - first] = self.wide[j % 4]
            elif self.embeds_before[j] > (self.embeds_before[j - 1] if j else 0):
                tokens[position - first] = self.wide[(self.embeds_before[j] - 1) % 4]


class PageKeys:
    """Page keys of one request. Keys are added as the request grows, and are never recomputed.

    Tokens are hashed in a chain up to the last requested page, and only the keys of requested pages are
    computed. Therefore a lookup whose first pages are absent is cheap, even for a long prompt.
    """

    def __init__(
        self, secret: bytes, root: bytes, page_tokens: int, features: Sequence[Any], epoch: int = 0
    ) -> None:
        """Prepare the keys of a request. `features` are the request's vLLM MultiModalFeatureSpecs, in any
        order. `epoch` is the epoch of the weights that `root` identifies."""
        self.epoch = epoch
        self._secret, self._root = secret, root
        self._page_tokens = page_tokens
        self._placeholders: list[_Placeholder] = []
        self.limit: int | None = None
        """Index of the first token of the first medium without an embedding key, or None if there is none.
        Pages that contain this token or later tokens have no key."""
        for feature in features:
            position = feature.mm_position
            key = key_of(feature.identifier, epoch)
            if key is None:
                self.limit = min(position.offset, self.limit if self.limit is not None else position.offset)
            else:
                # The request's known tokens may end inside the medium, so count the embeddings of the
                # complete medium.
                wide = placeholder_tokens(medium_lineage(key, position.get_num_embeds()))
                self._placeholders.append(
                    _Placeholder(position.offset, position.length, position.embeds_cumsum, wide)
                )
        self._links: list[bytes] = []
        """Value of the hash chain at the end of each page."""
        self._keys: dict[int, bytes] = {}

    def under(self, root: bytes) -> PageKeys:
        """Return page keys of the same request that are derived from another root. Both objects share the
        hash chain over the tokens."""
        other = copy.copy(self)
        other._root, other._keys = root, {}
        return other

    def pages(self, end: int) -> int:
        """Return the number of complete pages within the first `end` tokens that have keys."""
        return (end if self.limit is None else min(end, self.limit)) // self._page_tokens

    def upto(self, token_ids: Sequence[int], end: int) -> list[bytes]:
        """Return the keys of all complete pages within the first `end` tokens, except pages after `limit`."""
        return self.of(token_ids, range(self.pages(end)))

    def of(self, token_ids: Sequence[int], pages: Sequence[int]) -> list[bytes]:
        """Return the keys of the pages with these indices. `pages` is in ascending order, and its values are
        less than `pages(len(token_ids))`."""
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
        """Extend the hash chain to the end of the first `pages` pages."""
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
    """Interface of an object that computes page keys for requests: the request tracker of an engine core."""

    def keys_of(self, request: Request) -> PageKeys | None:
        """Return the page keys of a request, or None if the request is not shared or needs a check first.
        Thread-safe."""


_maker: ref[KeyMaker] | None = None


def make_by(maker: KeyMaker) -> None:
    """Use this tracker to compute the page keys of arriving requests, as long as the tracker exists."""
    global _maker
    _maker = ref(maker)


def received(request: Request) -> None:
    """Compute the page keys of a request that has arrived, if its prompt is long."""
    maker = _maker() if _maker is not None else None
    if maker is None or request.num_tokens < _LONG_TOKENS:
        return
    try:
        keys = maker.keys_of(request)
        if keys is not None:
            keys.upto(request.all_token_ids, request.num_tokens)
            setattr(request, _ATTRIBUTE, keys)
    except Exception as e:  # noqa: BLE001 - any error
        # An exception would end this thread and the engine. The later lookup fails with the same error and
        # counts it as a miss.
        compat.logger.debug("cornplug: cannot compute keys in advance: %r", e)


def made_for(request: Request) -> PageKeys | None:
    """Return the page keys that were computed when the request arrived, or None if no keys were computed
    then."""
    return getattr(request, _ATTRIBUTE, None)


def _from_engine_core_request(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    request = original(*args, **kwargs)
    received(request)
    return request


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.request", "Request.from_engine_core_request", _from_engine_core_request),
)
