"""Which store a process talks to: the host's own, or one that another package brings.

A package offers a store by an entry point of the group `cornplug.stores`, whose object is called as
`open_store` here is and returns a `Store`; the setting `store.backend` names it.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError
from cornplug.store.base import Store
from cornplug.store.client import PoolStore

GROUP: Final = "cornplug.stores"
POOL: Final = "pool"


def open_store(
    config: StoreConfig, *, autostart: bool | None = None, connect_timeout_s: float | None = None
) -> Store:
    """A connection to the store that `store.backend` names.

    Args:
        autostart: Whether to start a store where none answers; None: as the settings say.
        connect_timeout_s: Longest that this call waits for a first answer; None: the store's own default.

    Raises ConfigError for a backend that no installed package brings, and what the backend raises for wrong
    settings.
    """
    if config.backend == POOL:
        return PoolStore(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    found = [point for point in entry_points(group=GROUP) if point.name == config.backend]
    if not found:
        known = sorted({POOL, *(point.name for point in entry_points(group=GROUP))})
        raise ConfigError(
            "store.backend",
            f"no installed package brings a store {config.backend!r}",
            f"Known here: {', '.join(known)}.",
        )
    store: Store = found[0].load()(config, autostart=autostart, connect_timeout_s=connect_timeout_s)
    return store
