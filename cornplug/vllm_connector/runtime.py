"""What one process of the engine holds once: settings, the store's connection, the tally.

KV and EC halves of one process share it, so an engine core keeps one connection to the store.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from cornplug.config import Config, read_secret
from cornplug.errors import ConfigError, CornplugError
from cornplug.metrics import Tally
from cornplug.store.base import Store
from cornplug.store.pool import PoolStore
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.flags import settings
from cornplug.vllm_connector.plugin import registered, why_not


class Runtime:
    """Settings and connections of one process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.app = config.engine.app
        self.secret = read_secret(config.store.secret_file)
        self.store: Store = PoolStore(config.store)
        """The scheduler's connection: pages, asked from the engine's own loop."""
        self.bulk: Store = PoolStore(config.store)
        """Embeddings, from background threads: a slow answer here must not hold up the other."""
        self.background = ThreadPoolExecutor(1, thread_name_prefix="cornplug-store")

    def later(self, work: Callable[[], object]) -> None:
        """Run a store call that nobody waits for; its failure is the store's loss, not ours."""

        def run() -> None:
            try:
                work()
            except CornplugError as e:
                compat.logger.debug("cornplug: deferred store call failed: %s", e)

        try:
            self.background.submit(run)
        except RuntimeError:
            # The interpreter is going down, and leases end with our connection anyway.
            compat.logger.debug("cornplug: deferred store call dropped at shutdown")

    @property
    def deadline_s(self) -> float:
        """For calls on `store`."""
        return self.config.store.deadline_s

    @property
    def patience_s(self) -> float:
        """For calls on `bulk`."""
        return self.config.store.patience_s


_lock = threading.Lock()
_runtimes: dict[str, Runtime] = {}


def runtime(extra: Mapping[str, Any]) -> Runtime:
    """The process's runtime for these settings, made on first use.

    Raises ConfigError where cornplug cannot run: it was asked for, so silence would be a lie.
    """
    if not registered():
        from cornplug.vllm_connector.plugin import register

        register()
        if not registered():
            raise ConfigError("--kv-connector", why_not(), "Or start the engine without cornplug.")
    name = json.dumps(dict(extra), sort_keys=True, default=str)
    with _lock:
        if name not in _runtimes:
            _runtimes[name] = Runtime(settings(extra))
        return _runtimes[name]


@contextmanager
def miss(tally: Tally, app: str, what: str) -> Iterator[None]:
    """The one place where a failure of ours becomes a counted miss instead of an exception."""
    try:
        yield
    except CornplugError as e:
        tally.count("cornplug_misses_total", app, what, e.reason)
