"""vLLM's own names of the tokens that pages hold: what its KV events say of blocks.

A router knows blocks by their tokens and by vLLM's hashes, in which cornplug's secret has no part. Pages may be
longer or shorter than blocks, so an event speaks of a span: the fewest whole pages that are whole blocks.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request

_NO_KEYS: Final = None
"""Of a block whose hash is of tokens alone."""


class NamedSpan(msgspec.Struct, frozen=True):
    """What an event says of one span."""

    hashes: tuple[Any, ...]
    parent: Any
    """Hash of the block before; None for the first one."""
    tokens: array[int]
    extra_keys: tuple[Any, ...]
    """Of each block: the adapter's name, media and salt that are in its hash."""
    lora_id: int | None
    lora_name: str | None
    lookahead: tuple[Sequence[int], ...] | None
    """Of each block: tokens behind it that are in its hash (from vLLM 0.33 on)."""


@dataclass(frozen=True, slots=True)
class BlockSpans:
    """Spans of one cache group of an engine."""

    pool: BlockPool
    spec: KVCacheSpec
    group: int
    page_tokens: int

    @property
    def tokens(self) -> int:
        """Of a span."""
        return math.lcm(self.page_tokens, self.spec.block_size)

    @property
    def pages(self) -> int:
        """Of a span."""
        return self.tokens // self.page_tokens

    def named(self, request: Request, span: int) -> NamedSpan | None:
        """What events say of a request's span; None before vLLM has hashed all its blocks."""
        size, end = self.spec.block_size, (span + 1) * self.tokens
        hashes = resolve_block_hashes(request.block_hashes, self.pool.hash_block_size, size)
        blocks = range(span * self.tokens // size, end // size)
        if len(hashes) < blocks.stop:
            return None
        lora, ahead = request.lora_request, getattr(self.pool, "num_hash_lookahead_tokens", 0)
        ends = [(block + 1) * size for block in blocks]
        tokens = request.all_token_ids
        return NamedSpan(
            tuple(maybe_convert_block_hash(hashes[block]) for block in blocks),
            maybe_convert_block_hash(hashes[blocks.start - 1]) if blocks.start else None,
            array("q", tokens[end - self.tokens : end]),
            self._extra_keys(request, ends, ahead),
            lora.adapter_id if lora is not None else None,
            lora.name if lora is not None else None,
            tuple(tokens[one : one + ahead] for one in ends) if ahead else None,
        )

    def _extra_keys(self, request: Request, ends: Sequence[int], ahead: int) -> tuple[Any, ...]:
        """Of each block that ends there. With `ahead` a hash is of so many tokens more, and of their media."""
        if not (request.mm_features or request.lora_request or request.cache_salt):
            return (_NO_KEYS,) * len(ends)
        size = self.spec.block_size
        keys = [generate_block_hash_extra_keys(request, end - size, end + ahead, 0)[0] for end in ends]
        return tuple(to_event_extra_keys(keys) or ())

    def stored(self, span: NamedSpan, medium: str) -> BlockStored:
        """The event of a span that is on this medium now."""
        event = BlockStored(
            block_hashes=list(span.hashes),
            parent_block_hash=span.parent,
            token_ids=list(span.tokens),
            block_size=self.spec.block_size,
            lora_id=span.lora_id,
            medium=medium,
            lora_name=span.lora_name,
            extra_keys=list(span.extra_keys),
            group_idx=self.group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(self.spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(self.spec),
        )
        if span.lookahead is not None:
            event.lookahead_token_ids = list(map(list, span.lookahead))
        return event


def joined(tail: BlockStored, event: BlockStored) -> bool:
    """Whether `event` went on where `tail` ends, and is part of it now."""
    goes_on = event.parent_block_hash == tail.block_hashes[-1]
    if not goes_on or (event.medium, event.lora_name) != (tail.medium, tail.lora_name):
        return False
    tail.block_hashes += event.block_hashes
    tail.token_ids += event.token_ids
    tail.extra_keys += event.extra_keys
    if getattr(event, "lookahead_token_ids", None):
        tail.lookahead_token_ids += event.lookahead_token_ids
    return True


def without_media(request: Request) -> Request:
    """The request as events need it once it is over: it keeps the bytes of no medium."""
    kept = copy.copy(request)
    kept.mm_features = [replace(feature, data=None) for feature in request.mm_features or ()]
    return kept
