"""Settings and store connection of one process of an engine, or a store without entries if it cannot
share.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

from cornplug.config import Config
from cornplug.errors import ConfigError, CornplugError, StoreUnavailable
from cornplug.kv_page import PageSize
from cornplug.metrics import Tally
from cornplug.private_paths import read_secret
from cornplug.store.backends import open_store
from cornplug.store.base import Leases, PayloadLocation, Reservation, ReserveRefusal, Store, WriterPart
from cornplug.store.store_stats import StoreStat

KV_PAGE: Final = "kv_page"
EMBEDDING: Final = "embedding"
"""Labels of the kinds of entries in metrics (`kind`)."""
_log = logging.getLogger("cornplug")


class OffStore:
    """A `Store` that is always unavailable. `why` is the text of every error."""

    def __init__(self, why: str) -> None:
        self._why = why

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        self._raise()

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        self._raise()

    def reserve(
        self,
        entries: Sequence[tuple[bytes, int]],
        *,
        app: str,
        deadline_s: float,
        part: WriterPart | None = None,
        only_seen: bool = False,
        cost_s: float = 0.0,
    ) -> list[Reservation | ReserveRefusal]:
        self._raise()

    def commit(self, written: Sequence[tuple[Reservation, bytes]], *, deadline_s: float) -> list[bool]:
        self._raise()

    def release(self, tokens: Sequence[int], *, deadline_s: float) -> None:
        self._raise()

    def delete(self, keys: Sequence[bytes], *, deadline_s: float) -> int:
        self._raise()

    def stat(self, *, deadline_s: float) -> StoreStat:
        self._raise()

    def view(self, location: PayloadLocation, *, writable: bool = False) -> memoryview:
        self._raise()

    def close(self) -> None:
        """Do nothing."""

    def _raise(self) -> NoReturn:
        raise StoreUnavailable(self._why, reason="store_off")


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
def miss(tally: Tally, app: str, kind: str) -> Iterator[None]:
    """Count a failure inside the block as a miss instead of raising it into the engine."""
    try:
        yield
    except CornplugError as e:
        tally.count("cornplug_misses_total", app, kind, e.reason)


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
