"""Saves of recurrent states at the ends of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cornplug.vllm_connector.kv.tracked_requests import TrackedRequest
from cornplug.vllm_connector.kv_groups.window_saves import WindowSaves

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class StateSaves(WindowSaves):
    """Saves of one cache group of states.

    A request's block may hold the state of any token. Only blocks that vLLM's own prefix cache identifies by
    the hash of all tokens up to their end are saved. vLLM assigns this hash when it schedules the step that
    computes the state, and no step writes the block again. Most blocks have none, because a prefill keeps
    only the state of its step's last token.
    """

    def blocks_of(
        self, tracked: TrackedRequest, index: int, table: Sequence[KVCacheBlock]
    ) -> Sequence[KVCacheBlock] | None:
        """Block with the state at the end of a page, or None if vLLM has none."""
        block = self._cached(tracked, index)
        return None if block is None else [block]
