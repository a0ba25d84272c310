"""Sharing state of a server, and the settings, store connection and counters of each of its processes.

SGLang loads plugins in every process of every server. The main process decides whether the server shares
KV and embeddings (`flags.py`), and sets environment variables, which its child processes inherit.

Front ends (tokenizer processes) compute the keys of images. A single front end loads plugins itself, so it is
hooked like the main process. The worker processes of `--tokenizer-worker-num` are hooked through the
application that they import (`http_workers.py`). Other front ends load no plugins, so the images that they
receive have no key. Neither the embeddings of these images nor the KV after them are shared. All other KV is
shared.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from typing import Any, Final

from cornplug.config import Config
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.engine_common.shared_flags import load_settings
from cornplug.errors import ConfigError
from cornplug.identity import digest
from cornplug.metrics import Tally
from cornplug.sglang_hooks.compat import logger
from cornplug.sglang_hooks.stats import ServerTally

ENABLE: Final = "--enable-cornplug"

_VARIABLE = "CORNPLUG_SGLANG"
_PARTS = "CORNPLUG_SGLANG_PARTS"
_GROUP = "CORNPLUG_SGLANG_GROUP"

HTTP_WORKERS: Final = "cornplug.sglang_hooks.http_workers:app"
_APPLICATION_VARIABLE: Final = "SGLANG_HTTP_SERVER_APP_PATH"
_IMAGE_PART: Final = "images"
"""Name of the plugin part (`plugin.py`) that the front ends need."""
_lock = threading.Lock()
_tally = ServerTally()


def turn_on(extra: Mapping[str, str]) -> None:
    """Enable sharing in this process and its child processes, with these settings ({"section.field": value}).

    Raises ConfigError if a setting is unknown or invalid.
    """
    if load_settings(extra).engine.tower == "service":
        raise ConfigError(
            "--cornplug-tower",
            "SGLang has its own flags to run without a tower",
            "Start the server with --language-only --encoder-urls http://HOST:8750 instead.",
        )
    os.environ[_VARIABLE] = json.dumps(dict(extra), sort_keys=True)
    os.environ.pop(_PARTS, None)
    _load_config.cache_clear()


def turn_off() -> None:
    """Disable sharing for the server that this process starts next."""
    os.environ.pop(_VARIABLE, None)
    os.environ.pop(_PARTS, None)
    _unhook_front_ends()


def publish_parts(parts: Iterable[str]) -> None:
    """Publish to the server's child processes which parts of the plugin they need (`plugin.py`)."""
    os.environ[_PARTS] = ",".join(sorted(parts))
    os.environ[_GROUP] = secrets.token_hex(16)


def selected_parts() -> frozenset[str] | None:
    """Return the plugin parts that the main process has selected, or None before it has selected any."""
    said = os.environ.get(_PARTS)
    return None if said is None else frozenset(part for part in said.split(",") if part)


def rank_group_id() -> bytes:
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
    """Return the server's settings. The first call in this process reads them. Requires `is_on`."""
    return _load_config(os.environ[_VARIABLE])


@lru_cache(maxsize=1)
def _load_config(extra: str) -> Config:
    # The settings are cached, because a later change of a settings file must not raise an exception on the
    # scheduler's thread.
    return load_settings(json.loads(extra))


@cache
def _runtime(pid: int) -> EngineRuntime:
    return EngineRuntime(config())


def runtime() -> EngineRuntime:
    """Return the settings and store connection of this process. The first call creates them.

    Requires `is_on`. Raises ConfigError if the settings are invalid.
    """
    with _lock:
        return _runtime(os.getpid())


def tally() -> Tally:
    """Return the counters of this process, which SGLang reports on the server's `/metrics`."""
    return _tally


def hook_front_ends(server_args: Any, parts: Iterable[str]) -> None:
    """If the server shares images, let its tokenizer workers import cornplug's application.

    Call this in the main process before it starts other processes. If a front end does not load plugins, this
    logs a warning with the responsible flag.
    """
    _unhook_front_ends()
    if _IMAGE_PART not in parts:
        return
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.environ import envs

    settled = resolved_view(server_args)
    workers = settled.tokenizer_worker_num
    own_application = workers > 1 and _APPLICATION_VARIABLE in os.environ
    unhooked = [
        flag
        for flag, is_set in (
            (f"{_APPLICATION_VARIABLE} with --tokenizer-worker-num {workers}", own_application),
            ("--smg-grpc-mode", settled.smg_grpc_mode),
            ("--grpc-mode", settled.grpc_mode),
            ("SGLANG_RUST_SERVER", envs.SGLANG_RUST_SERVER.get()),
        )
        if is_set
    ]
    if unhooked:
        logger.warning(
            "cornplug: images are not shared: SGLang does not load plugins in the process that reads "
            "images with %s",
            ", ".join(unhooked),
        )
    elif workers > 1:
        os.environ[_APPLICATION_VARIABLE] = HTTP_WORKERS


def _unhook_front_ends() -> None:
    """Restore SGLang's application for the workers of the next server that this process starts."""
    if os.environ.get(_APPLICATION_VARIABLE) == HTTP_WORKERS:
        del os.environ[_APPLICATION_VARIABLE]
