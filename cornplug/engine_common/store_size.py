"""The size of the host's store in tokens of an engine's model: bytes say little to an operator."""

from __future__ import annotations

import logging

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import StoreUnavailable
from cornplug.kv_page import PageGeometry

_GIB = 1 << 30


def log_store_size(
    runtime: EngineRuntime, page: PageGeometry, own_tokens: int, logger: logging.Logger
) -> None:
    """Log at an engine's start how many tokens of its model the store holds.

    A warning where those are fewer than `own_tokens`, which the engine's own KV cache holds: pages that leave
    this cache have then left the store before. Waits for the store's answer for `background_timeout_s`.
    """
    try:
        stat = runtime.store.stat(deadline_s=runtime.background_timeout_s)
    except StoreUnavailable as e:
        logger.info("cornplug: store: its size in tokens of this model is unknown: %s", e)
        return
    tokens = stat.capacity_bytes // page.page_bytes * page.page_tokens
    size = f"{stat.capacity_bytes / _GIB:.1f} GiB = {tokens:,} tokens of this model"
    if tokens >= own_tokens:
        logger.info("cornplug: store: %s", size)
        return
    logger.warning(
        "cornplug: store: %s, fewer than the %s tokens of this engine's own KV cache. Raise store.size_bytes "
        "(cornplug serve-store --size) to share more than the most recent prompts.",
        size,
        f"{own_tokens:,}",
    )
