"""What one process of the engine holds once: settings, the store's connection, the tally.

KV and EC halves of one process share it, so an engine core keeps one connection to the store.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cornplug.config import Config, read_secret
from cornplug.errors import ConfigError, CornplugError
from cornplug.metrics import Tally
from cornplug.store.base import Store
from cornplug.store.pool import PoolStore
from cornplug.vllm_connector.flags import settings
from cornplug.vllm_connector.plugin import registered, why_not


class Runtime:
    """Settings and connections of one process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.app = config.engine.app
        self.secret = read_secret(config.store.secret_file)
        self.store: Store = PoolStore(config.store)

    @property
    def deadline_s(self) -> float:
        """For calls from the engine's own loop."""
        return self.config.store.deadline_s

    @property
    def patience_s(self) -> float:
        """For calls from threads that hold up nobody."""
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
