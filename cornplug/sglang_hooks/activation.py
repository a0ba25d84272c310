"""Sharing state of a server, and the settings, store connection and counters of each of its processes.

SGLang loads plugins in every process of every server. The main process decides whether the server shares
KV and embeddings (`flags.py`), and sets environment variables, which its child processes inherit.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Final

from cornplug.config import Config
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.shared_flags import settings
from cornplug.errors import ConfigError
from cornplug.identity import digest
from cornplug.metrics import Tally
from cornplug.sglang_hooks import tokenizer_workers
from cornplug.sglang_hooks.stats import ServerTally

ENABLE: Final = "--enable-cornplug"

_VARIABLE = "CORNPLUG_SGLANG"
_PARTS = "CORNPLUG_SGLANG_PARTS"
_GROUP = "CORNPLUG_SGLANG_GROUP"
_lock = threading.Lock()
_tally = ServerTally()


def turn_on(extra: Mapping[str, str]) -> None:
    """Enable sharing in this process and its child processes, with these settings ({"section.field": value}).

    Raises ConfigError if a setting is unknown or invalid.
    """
    if settings(extra).engine.tower == "service":
        raise ConfigError(
            "--cornplug-tower",
            "SGLang has its own flags to run without a tower",
            "Start the server with --language-only --encoder-urls http://HOST:8750 instead.",
        )
    os.environ[_VARIABLE] = json.dumps(dict(extra), sort_keys=True)
    os.environ.pop(_PARTS, None)
    _settled.cache_clear()


def turn_off() -> None:
    """Disable sharing for the server that this process starts next."""
    os.environ.pop(_VARIABLE, None)
    os.environ.pop(_PARTS, None)
    tokenizer_workers.unhook()


def need(parts: Iterable[str]) -> None:
    """Publish to the server's child processes which parts of this package they need (`hook_registry.py`)."""
    os.environ[_PARTS] = ",".join(sorted(parts))
    os.environ[_GROUP] = secrets.token_hex(16)


def needed() -> frozenset[str] | None:
    """Return the parts that the main process has selected, or None if it has not selected any yet."""
    said = os.environ.get(_PARTS)
    return None if said is None else frozenset(part for part in said.split(",") if part)


def group() -> bytes:
    """Return the 32-byte id that this replica's tensor-parallel ranks use in the store.

    Each data-parallel replica of a server has a different id. The id is b"" in a process that was not started
    by the main process of a sharing server. Call this only in SGLang's scheduler processes.
    """
    from sglang.srt.runtime_context import get_parallel

    said = os.environ.get(_GROUP, "")
    return (
        digest("cornplug-sglang-ranks-v1", said.encode(), str(get_parallel().dp_rank).encode())
        if said
        else b""
    )


def is_on() -> bool:
    """Return whether this server was started with cornplug."""
    return _VARIABLE in os.environ


def config() -> Config:
    """Return the server's settings, which the first call in this process reads. Requires `is_on`."""
    return _settled(os.environ[_VARIABLE])


@lru_cache(maxsize=1)
def _settled(extra: str) -> Config:
    # Cached, because a settings file that a user edits later must not raise an exception on the scheduler's
    # thread.
    return settings(json.loads(extra))


@cache
def _runtime(pid: int) -> EngineRuntime:
    return EngineRuntime(config())


def runtime() -> EngineRuntime:
    """Return the settings and store connection of this process, which the first call creates.

    Requires `is_on`.
    Raises ConfigError if the settings are invalid.
    """
    with _lock:
        return _runtime(os.getpid())


def tally() -> Tally:
    """Return the counters of this process, which the server's `/metrics` shows."""
    return _tally
