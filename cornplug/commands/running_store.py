"""The store that runs for the settings of this shell: commands that ask it start none and make no secret."""

from __future__ import annotations

from typing import Final

from cornplug import config
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store.backends import is_host_store, open_store
from cornplug.store.base import Store

ANSWER_S: Final = 2.0


def running_store(settings: config.StoreConfig) -> Store:
    """A connection to it.

    Raises StoreUnavailable where no store has ever run, ConfigError for settings that it refuses.
    """
    if is_host_store(settings) and not settings.secret_file.exists():
        why = f"no store has run here: there is no secret yet ({settings.secret_file})"
        raise StoreUnavailable(why, reason="store_down")
    return open_store(settings, autostart=False, connect_timeout_s=ANSWER_S)


def other_backend(settings: config.StoreConfig, command: str) -> ConfigError:
    """The error of a command that this store does not offer."""
    return ConfigError(
        "store.backend", f"{settings.backend} offers no {command}", "Use the tools of that store."
    )
