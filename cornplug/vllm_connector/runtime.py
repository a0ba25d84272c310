"""Code that the KV and encoder-cache connectors share: the process's `EngineRuntime`, and error handling for
connector hooks.

vLLM does not catch exceptions from connector hooks. An exception in an engine core or a worker would end the
engine. Expected errors are counted as misses where they occur. `stop_sharing_on_error` handles all other
errors: sharing stops, and the engine continues without sharing.
"""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, cast

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.shared_flags import load_settings
from cornplug.errors import ConfigError
from cornplug.vllm_connector.plugin import disabled_reason, is_registered, register

_lock = threading.Lock()
_runtimes: dict[str, EngineRuntime] = {}


def get_runtime(extra: Mapping[str, Any]) -> EngineRuntime:
    """Return this process's runtime for these connector settings. The first call creates the runtime.

    Raises ConfigError if cornplug is configured but cannot run with this vLLM, or if a setting is unknown or
    invalid.
    """
    if not is_registered():
        register()
        if not is_registered():
            raise ConfigError("--kv-connector", disabled_reason(), "Or start the engine without cornplug.")
    name = json.dumps(dict(extra), sort_keys=True, default=str)
    with _lock:
        if name not in _runtimes:
            _runtimes[name] = EngineRuntime(load_settings(extra))
        return _runtimes[name]


class SharingConnector(Protocol):
    """Connector whose hooks `stop_sharing_on_error` can guard, because it can stop sharing after an error."""

    def _stop_sharing(self, hook: str, error: Exception) -> None: ...


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def stop_sharing_on_error(fallback: Callable[..., Any]) -> Callable[[_Hook], _Hook]:
    """Return a decorator for connector hooks. If a decorated hook raises an exception, sharing stops and the
    hook returns `fallback(self, ...)` instead."""

    def decorate(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def guarded(self: SharingConnector, *args: Any, **kwargs: Any) -> Any:
            try:
                return hook(self, *args, **kwargs)
            except Exception as e:  # noqa: BLE001 - any error
                self._stop_sharing(hook.__name__, e)
                return fallback(self, *args, **kwargs)

        return cast(_Hook, guarded)

    return decorate


def retry_without_sharing(hook: _Hook) -> _Hook:
    """Decorate a connector hook. If the hook raises an exception, sharing stops, and the hook is called again
    without sharing."""
    return stop_sharing_on_error(hook)(hook)
