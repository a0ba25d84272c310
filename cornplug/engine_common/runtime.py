"""Settings and store connection for one process of an engine. If a process cannot share, its store is
always unavailable."""

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
from cornplug.store.base import Leases, PayloadLocation, Reservation, ReserveRefusal, ReserveTerms, Store
from cornplug.store.client import open_store
from cornplug.store.store_stats import StoreStat

KV_PAGE: Final = "kv_page"
EMBEDDING: Final = "embedding"
"""`KV_PAGE` and `EMBEDDING` are the values of the metrics label `kind`, for the two kinds of store
entries."""
_log = logging.getLogger("cornplug")


class NullStore(Store):
    """Store that is always unavailable. The required methods raise StoreUnavailable with the text `why`.
    `close` does nothing, and the store has no optional capabilities."""

    def __init__(self, why: str) -> None:
        self._why = why

    def contains(self, keys: Sequence[bytes], *, deadline_s: float) -> bytes:
        self._raise()

    def lease(self, keys: Sequence[bytes], *, ttl_s: float, deadline_s: float) -> Leases:
        self._raise()

    def reserve(
        self, entries: Sequence[tuple[bytes, int]], terms: ReserveTerms, *, deadline_s: float
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
        """Do nothing, because there is no connection."""

    def _raise(self) -> NoReturn:
        raise StoreUnavailable(self._why, reason="store_off")


class EngineRuntime:
    """Settings and store connection of one engine process, shared by its KV and embedding connectors.

    If the secret cannot be read, the store is always unavailable, so every lookup is a miss.
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
            self.store = NullStore(str(e))

    def open_connection(self) -> Store:
        """Open another connection to the store, for a thread that must not wait for other threads'
        requests."""
        off = isinstance(self.store, NullStore)
        return self.store if off else open_store(self.config.store, connect_timeout_s=0)

    @property
    def deadline_s(self) -> float:
        """Deadline in seconds for calls to the store from the engine's own loop."""
        return self.config.store.deadline_s

    @property
    def background_timeout_s(self) -> float:
        """Timeout in seconds for calls to the store from background threads."""
        return self.config.store.background_timeout_s


@contextmanager
def count_as_miss(tally: Tally, app: str, kind: str) -> Iterator[None]:
    """Return a context manager that counts a CornplugError raised inside its block as a miss and suppresses
    it."""
    try:
        yield
    except CornplugError as e:
        tally.count("cornplug_misses_total", app, kind, e.reason)


def log_store_size(
    runtime: EngineRuntime, page: PageSize, engine_tokens: int, logger: logging.Logger
) -> None:
    """Log how many tokens of the engine's model fit into the store. Call this when the engine starts.

    Logs a warning if fewer than `engine_tokens` tokens fit, the capacity of the engine's own KV cache. The
    store then evicts pages earlier than the engine does. Waits at most `background_timeout_s` for the store.
    """
    try:
        stat = runtime.store.stat(deadline_s=runtime.background_timeout_s)
    except StoreUnavailable as e:
        logger.info("cornplug: cannot compute the store's size in tokens of this model: %s", e)
        return
    tokens = stat.capacity_bytes // page.page_bytes * page.page_tokens
    size = f"{stat.capacity_bytes / (1 << 30):.1f} GiB = {tokens:,} tokens of this model"
    if tokens >= engine_tokens:
        logger.info("cornplug: the store's size is %s", size)
        return
    logger.warning(
        "cornplug: the store's size is %s, which is less than the %s tokens of this engine's own KV cache. "
        "To share more than the most recent prompts, increase store.size_bytes "
        "(`cornplug serve-store --size`).",
        size,
        f"{engine_tokens:,}",
    )
