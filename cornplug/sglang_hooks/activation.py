"""Whether this server shares, with its settings, its store connection and its counts in each process.

SGLang's plugin is loaded in every process of every server, asked for or not. The main process
decides (`flags.py`) and says so in the environment, which its children inherit.
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
    """Share in this process and its children, with these settings ({"section.field": value}).

    Raises ConfigError naming the setting that is unknown or wrong.
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
    """The server that this process starts next does not share."""
    os.environ.pop(_VARIABLE, None)
    os.environ.pop(_PARTS, None)
    tokenizer_workers.unhook()


def need(parts: Iterable[str]) -> None:
    """Tell this process's children which parts of this room their server needs (`hook_selection.py`)."""
    os.environ[_PARTS] = ",".join(sorted(parts))
    os.environ[_GROUP] = secrets.token_hex(16)


def needed() -> frozenset[str] | None:
    """The parts that the main process has selected; None before it has."""
    said = os.environ.get(_PARTS)
    return None if said is None else frozenset(part for part in said.split(",") if part)


def group() -> bytes:
    """The id of this replica's tensor-parallel ranks in the store (32 bytes).

    It is b"" in a process that no main process of a sharing server has started. Only in SGLang's
    scheduler processes. Each replica of a server has another id.
    """
    from sglang.srt.runtime_context import get_parallel

    said = os.environ.get(_GROUP, "")
    return (
        digest("cornplug-sglang-ranks-v1", said.encode(), str(get_parallel().dp_rank).encode())
        if said
        else b""
    )


def is_on() -> bool:
    """Whether this server was started with cornplug."""
    return _VARIABLE in os.environ


def config() -> Config:
    """The server's settings, as they were when this process first asked. Only where `is_on`."""
    return _settled(os.environ[_VARIABLE])


@lru_cache(maxsize=1)
def _settled(extra: str) -> Config:
    # Read on the scheduler's thread: a settings file that is edited later must not raise there.
    return settings(json.loads(extra))


@cache
def _runtime(pid: int) -> EngineRuntime:
    return EngineRuntime(config())


def runtime() -> EngineRuntime:
    """Settings and the store's connection of this process, made on first use. Only where `is_on`.

    Raises ConfigError where the settings are wrong.
    """
    with _lock:
        return _runtime(os.getpid())


def tally() -> Tally:
    """This process's counts, shown at the server's `/metrics`."""
    return _tally
