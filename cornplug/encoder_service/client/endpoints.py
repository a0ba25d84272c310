"""Services and this host's store, from the configuration."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import PurePath
from urllib.parse import urlsplit

from cornplug.config import Config
from cornplug.host import reachable
from cornplug.store.backends import is_host_store, open_store
from cornplug.store.base import Store


def configured(config: Config) -> Sequence[str]:
    """Return the URLs of the configured services."""
    host = reachable(config.encoder.host)
    return config.encoder.urls or [f"http://{f'[{host}]' if ':' in host else host}:{config.encoder.port}"]


def is_here(url: str) -> bool:
    """Return whether a service is on this host, and so saves to this host's store."""
    return is_loopback(urlsplit(url).hostname or "")


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach `host`: a loopback address, or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_name(name: str) -> str:
    """Return a model's name in URLs: a hub id unchanged, a folder by its last component."""
    path = PurePath(name)
    return path.name if path.is_absolute() or name.startswith(".") else name


def local_store(config: Config) -> Store | None:
    """Return the configured store, or None if it is the host's and not started yet."""
    if is_host_store(config.store) and not config.store.socket.exists():
        return None
    return open_store(config.store, autostart=False)
