"""Objects that the host pools of one rank use: the pools of the model, of windows, and of a draft model."""

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
    """Measures the engine's steps, from which the time to compute a page is estimated."""
    stopping: Callable[[], bool]
    """Returns whether SGLang waits for its storage threads to end. SGLang exits after 10 s."""
    only_seen: bool = False
    """Whether to save only pages that an earlier request used (`PagePublisher`)."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """A host pool of one rank, and the part of the store's pages that this rank holds."""

    mine: RankPages
    host: HostPages
    threads: int = 1
    """Number of threads that copy pages in parallel (`PageCopies`)."""
