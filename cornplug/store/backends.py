"""Selection of the store by the setting `store.backend`: the host's store, or a store from a package.

The setting is NAME or NAME:ADDRESS. `pool` is the host's store. A package provides another store with an
entry point in the group `cornplug.stores`. The entry point is a callable with the arguments and result of
`open_store`. It reads the address from `config.backend`.
"""

from __future__ import annotations

import inspect
from importlib.metadata import entry_points
from typing import Final

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError
from cornplug.store.base import Store
from cornplug.store.client import PoolStore

ENTRY_POINT_GROUP: Final = "cornplug.stores"
_HOST_STORE: Final = "pool"
_UPDATE_REMEDY: Final = "Update the package that provides it."


def is_host_store(config: StoreConfig) -> bool:
    """Return whether the settings select the host's store, which has a socket, a daemon and a secret."""
    return config.backend == _HOST_STORE


def open_store(
    config: StoreConfig, *, autostart: bool | None = None, connect_timeout_s: float | None = None
) -> Store:
    """Connect to the store selected by `store.backend`.

    Args:
        autostart: Whether to start a store if no store is running. None: use the setting.
        connect_timeout_s: Maximum seconds that this call waits for a connection. None: the store's default.

    Raises ConfigError for an unknown name or an object that is not a `Store`, and the backend's own errors
    for settings that it rejects.
    """
    if is_host_store(config):
        return PoolStore(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    name = config.backend.partition(":")[0]
    offered = {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
    if name not in offered:
        raise ConfigError(
            "store.backend",
            f"no installed package provides a store {name!r}",
            f"Available stores: {', '.join(sorted({_HOST_STORE, *offered}))}.",
        )
    create = offered[name].load()
    if inspect.isabstract(create):
        lacks = ", ".join(sorted(create.__abstractmethods__))
        raise ConfigError("store.backend", f"store {name!r} lacks the methods {lacks}", _UPDATE_REMEDY)
    store = create(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    if not isinstance(store, Store):
        raise ConfigError(
            "store.backend", f"store {name!r} does not inherit from cornplug.store.base.Store", _UPDATE_REMEDY
        )
    return store
