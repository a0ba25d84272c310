"""vLLM's names for the tokens of pages, as in its own KV events.

A router identifies blocks by their tokens and by vLLM's hashes, which do not depend on cornplug's secret. A
page may be longer or shorter than a block, so an event describes a span: the smallest number of whole pages
that are whole blocks.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

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


class NamedSpan(msgspec.Struct, frozen=True):
    """Content of one span's events."""

    hashes: Sequence[Any]
    parent: Any
    """Hash of the previous block, or None for the first block."""
    tokens: array[int]
    extra_keys: Sequence[Any]
    """For each block: the adapter's name, media and salt that are part of its hash."""
    lora_id: int | None
    lora_name: str | None
    lookahead: Sequence[list[int]] | None
    """For each block: later tokens that are part of its hash (since vLLM 0.33)."""


class BlockSpans:
    """Spans of one cache group of an engine, each of `pages` pages."""

    def __init__(self, pool: BlockPool, spec: KVCacheSpec, group: int, page_tokens: int) -> None:
        self.group = group
        self._pool, self._size = pool, spec.block_size
        self._tokens = math.lcm(page_tokens, spec.block_size)
        self.pages = self._tokens // page_tokens
        self._blocks = self._tokens // spec.block_size
        self._kind = get_kv_cache_spec_kind(spec).value
        self._window = get_kv_cache_spec_sliding_window(spec)

    def named(self, request: Request, first: int, count: int) -> list[NamedSpan]:
        """Return the content of events for a request's spans from `first` on, as far as vLLM has hashed their
        blocks."""
        size, many, ahead = self._size, self._blocks, getattr(self._pool, "num_hash_lookahead_tokens", 0)
        hashes = resolve_block_hashes(request.block_hashes, self._pool.hash_block_size, size)
        begin = first * many
        count = min(count, len(hashes) // many - first)
        if count <= 0:
            return []
        # A prompt has thousands of blocks, so they are read from vLLM's lists together.
        names = [maybe_convert_block_hash(one) for one in hashes[max(0, begin - 1) : begin + count * many]]
        if not begin:
            names.insert(0, None)
        start = first * self._tokens
        tokens = array("q", request.all_token_ids[start : start + count * self._tokens])
        lora = request.lora_request
        lora_id, lora_name = (lora.adapter_id, lora.name) if lora is not None else (None, None)
        plain = not (request.mm_features or lora or request.cache_salt)
        found = []
        for at in range(0, count * many, many):
            ends = range(start + (at + 1) * size, start + (at + many) * size + 1, size)
            found.append(
                NamedSpan(
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
        """Extra keys of each block that ends at one of `ends`. With `ahead`, its hash covers that many more
        tokens."""
        size = self._size
        keys = [generate_block_hash_extra_keys(request, end - size, end + ahead, 0)[0] for end in ends]
        return to_event_extra_keys(keys) or ()

    def stored(self, span: NamedSpan, medium: str) -> BlockStored:
        """Return the event for a span that is now on this medium."""
        event = BlockStored(
            block_hashes=list(span.hashes),
            parent_block_hash=span.parent,
            token_ids=list(span.tokens),
            block_size=self._size,
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


def joined(tail: BlockStored, event: BlockStored) -> bool:
    """Append `event` to `tail` if it continues where `tail` ends, and return whether it did."""
    goes_on = event.parent_block_hash == tail.block_hashes[-1]
    if not goes_on or (event.medium, event.lora_name) != (tail.medium, tail.lora_name):
        return False
    tail.block_hashes += event.block_hashes
    tail.token_ids += event.token_ids
    tail.extra_keys += event.extra_keys
    if getattr(event, "lookahead_token_ids", None):
        tail.lookahead_token_ids += event.lookahead_token_ids
    return True
