"""Structures that the host pools of one rank share: the model's KV, windows, and a draft's KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cornplug.engine_common.rank_pages import RankPages
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.metrics import Tally
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.sglang_hooks.kv_pages.layout import HostPages
from cornplug.sglang_hooks.kv_pages.page_hash_index import PageHashIndex


@dataclass(frozen=True, slots=True)
class PoolContext:
    """Objects and settings that all pools of a rank use."""

    runtime: EngineRuntime
    index: PageHashIndex
    tally: Tally
    pace: LoadPace
    """Measures the engine's steps, which give the cost of its pages."""
    stopping: Callable[[], bool]
    """Whether SGLang waits for its storage threads to end. It exits after 10 s."""
    only_seen: bool = False
    """See `PagePublisher`."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """A host pool of one rank, and its part of the store's pages."""

    mine: RankPages
    host: HostPages
    threads: int = 1
    """See `PageCopies`."""
