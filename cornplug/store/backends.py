"""The place where a process chooses its store: the host's own, or one that an installed package brings.

The setting `store.backend` is NAME or NAME:ADDRESS. `pool` is the host's own store. A package offers another
one by an entry point of the group `cornplug.stores`: a callable with the arguments and the result of
`open_store`, which reads its address in `config.backend`.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError
from cornplug.store.base import Store
from cornplug.store.client import PoolStore

GROUP: Final = "cornplug.stores"
_POOL: Final = "pool"


def is_host_store(config: StoreConfig) -> bool:
    """Whether the settings name the host's own store, which has a socket, a daemon and a secret."""
    return config.backend == _POOL


def open_store(
    config: StoreConfig, *, autostart: bool | None = None, connect_timeout_s: float | None = None
) -> Store:
    """A connection to the store that `store.backend` names.

    Args:
        autostart: Whether to start a store where none answers; None: as the settings say.
        connect_timeout_s: Longest wait of this call for a first answer; None: the store's own default.

    Raises ConfigError for a name that no installed package brings, and the backend's own errors for settings
    that it refuses.
    """
    if is_host_store(config):
        return PoolStore(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    name = config.backend.partition(":")[0]
    offered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in offered:
        raise ConfigError(
            "store.backend",
            f"no installed package brings a store {name!r}",
            f"Known here: {', '.join(sorted({_POOL, *offered}))}.",
        )
    store: Store = offered[name].load()(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    return store
