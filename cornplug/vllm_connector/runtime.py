"""Access to the vLLM process's `EngineRuntime`, which the KV and encoder-cache connectors share."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.shared_flags import settings
from cornplug.errors import ConfigError
from cornplug.vllm_connector.plugin import register, registered, why_not

_lock = threading.Lock()
_runtimes: dict[str, EngineRuntime] = {}


def runtime(extra: Mapping[str, Any]) -> EngineRuntime:
    """Return this process's runtime for these connector settings. The first call with the settings creates
    the runtime.

    Raises ConfigError if cornplug is configured but cannot run with this vLLM, or if a setting is unknown or
    invalid.
    """
    if not registered():
        register()
        if not registered():
            raise ConfigError("--kv-connector", why_not(), "Or start the engine without cornplug.")
    name = json.dumps(dict(extra), sort_keys=True, default=str)
    with _lock:
        if name not in _runtimes:
            _runtimes[name] = EngineRuntime(settings(extra))
        return _runtimes[name]
