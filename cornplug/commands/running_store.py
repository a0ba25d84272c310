"""Connections of commands to the running store. They do not start a store or create a secret."""

from __future__ import annotations

from typing import Final

from cornplug import config
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store.backends import is_host_store, open_store
from cornplug.store.base import Store

ANSWER_S: Final = 2.0


def running_store(settings: config.StoreConfig) -> Store:
    """Connect to the running store.

    Raises StoreUnavailable if no store has ever run, and ConfigError if the store rejects the settings.
    """
    if is_host_store(settings) and not settings.secret_file.exists():
        why = f"no store has run here, because there is no secret yet ({settings.secret_file})"
        raise StoreUnavailable(why, reason="store_down")
    return open_store(settings, autostart=False, connect_timeout_s=ANSWER_S)


def other_backend(settings: config.StoreConfig, command: str) -> ConfigError:
    """Return the error for a command that this store does not support."""
    return ConfigError(
        "store.backend", f"{settings.backend} does not support {command}", "Use the tools of that store."
    )
