"""Settings and store connection of one process of an engine."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cornplug.config import Config
from cornplug.errors import ConfigError, CornplugError, StoreUnavailable
from cornplug.kv_page import PageSize
from cornplug.metrics import Tally
from cornplug.private_paths import read_secret
from cornplug.store.backends import open_store
from cornplug.store.base import Store
from cornplug.store.disabled import OffStore

KV_PAGE: Final = "kv_page"
EMBEDDING: Final = "embedding"
"""Labels of the kinds of entries in metrics (`what`)."""

_log = logging.getLogger("cornplug")


class EngineRuntime:
    """Settings and connections of one process, shared by its KV and embedding connectors.

    Without a secret, it uses a store in which every lookup is a miss.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.app = config.engine.app
        self.store: Store
        try:
            self.secret = read_secret(config.store.secret_file)
            self.store = open_store(config.store)
        except ConfigError as e:
            # A bad secret file must not stop the engine from starting.
            _log.error("cornplug: this engine shares nothing: %s", e)
            self.secret = secrets.token_bytes(32)
            self.store = OffStore(str(e))

    def another_connection(self) -> Store:
        """Open a connection for a thread that must not wait for other threads' requests."""
        off = isinstance(self.store, OffStore)
        return self.store if off else open_store(self.config.store, connect_timeout_s=0)

    @property
    def deadline_s(self) -> float:
        """Deadline of calls from the engine's own loop."""
        return self.config.store.deadline_s

    @property
    def background_timeout_s(self) -> float:
        """Timeout of calls from background threads."""
        return self.config.store.background_timeout_s


@contextmanager
def miss(tally: Tally, app: str, what: str) -> Iterator[None]:
    """Count a failure inside the block as a miss instead of raising it into the engine."""
    try:
        yield
    except CornplugError as e:
        tally.count("cornplug_misses_total", app, what, e.reason)


def log_store_size(runtime: EngineRuntime, page: PageSize, own_tokens: int, logger: logging.Logger) -> None:
    """Log at an engine's start how many tokens of its model fit into the store.

    Logs a warning if this is less than `own_tokens`, the capacity of the engine's own KV cache: pages that
    leave this cache have then already left the store. Waits for the store for up to `background_timeout_s`.
    """
    try:
        stat = runtime.store.stat(deadline_s=runtime.background_timeout_s)
    except StoreUnavailable as e:
        logger.info("cornplug: store: cannot compute its size in tokens of this model: %s", e)
        return
    tokens = stat.capacity_bytes // page.page_bytes * page.page_tokens
    size = f"{stat.capacity_bytes / (1 << 30):.1f} GiB = {tokens:,} tokens of this model"
    if tokens >= own_tokens:
        logger.info("cornplug: store: %s", size)
        return
    logger.warning(
        "cornplug: store: %s, less than the %s tokens of this engine's own KV cache. To share more than "
        "the most recent prompts, increase store.size_bytes (cornplug serve-store --size).",
        size,
        f"{own_tokens:,}",
    )
