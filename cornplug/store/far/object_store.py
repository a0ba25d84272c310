"""`file://` and `s3://`: far stores that keep records as files or objects, with the package obstore."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore, ObjectStore, S3Store

from cornplug.errors import ConfigError
from cornplug.store.far.open_far import TRANSFER_TIMEOUT_S, FarFailure

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig

_SETTING: Final = "store.far"
_PROXIES: Final = ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_ENDPOINTS: Final = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_MAX_RECORD_BYTES: Final = 64 << 20
_MAX_NAMES: Final = 64
"""Number of requests that one lookup makes in parallel."""


class ObjectFarStore:
    """Far store in a folder or a bucket."""

    max_bytes = _MAX_RECORD_BYTES
    max_names = _MAX_NAMES

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def exists(self, names: Sequence[str]) -> list[bool]:
        # Lookups in a folder take less time than starting an event loop.
        local = isinstance(self._store, LocalStore)
        heads = [self._head(name) for name in names] if local else asyncio.run(self._heads(names))
        return [_exists(head) for head in heads]

    def _head(self, name: str) -> ObjectMeta | BaseException:
        try:
            return obstore.head(self._store, name)
        except (BaseError, OSError) as e:
            return e

    async def _heads(self, names: Sequence[str]) -> list[ObjectMeta | BaseException]:
        heads = [obstore.head_async(self._store, name) for name in names]
        return await asyncio.gather(*heads, return_exceptions=True)

    def get(self, name: str) -> bytes | None:
        try:
            found = obstore.get(self._store, name)
            if found.meta["size"] > _MAX_RECORD_BYTES:
                return None
            return bytes(found.bytes())
        except FileNotFoundError:
            return None
        except (BaseError, OSError) as e:
            raise _to_failure(e) from None

    def put(self, name: str, record: bytes) -> None:
        # Without multipart, an interrupted write leaves the former record, or no record.
        try:
            obstore.put(self._store, name, record, use_multipart=False)
        except (BaseError, OSError) as e:
            raise _to_failure(e) from None

    def delete(self, names: Sequence[str]) -> None:
        # A bucket deletes all names in one request. A folder would stop at the first missing name.
        batches = [[name] for name in names] if isinstance(self._store, LocalStore) else [list(names)]
        for batch in batches:
            try:
                obstore.delete(self._store, batch)
            except FileNotFoundError:
                continue
            except (BaseError, OSError) as e:
                raise _to_failure(e) from None

    def close(self) -> None:
        """Do nothing."""


def open_folder_url(url: str) -> ObjectFarStore:
    """Open file:///FOLDER. Raises ConfigError if the folder does not exist or the URL is invalid."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or not path.is_absolute():
        raise ConfigError(
            _SETTING, f"{url!r} needs an absolute path", "Write it as file:///mnt/share/cornplug."
        )
    # Do not create the folder. If the share is not mounted, a local folder would be created instead.
    if not path.is_dir():
        raise ConfigError(_SETTING, f"{path} is not a folder", "Mount the share and create the folder.")
    return ObjectFarStore(LocalStore(str(path)))


def open_s3_url(url: str) -> ObjectFarStore:
    """Open s3://BUCKET/PREFIX. The access keys, region and endpoint are read from the environment's AWS_*
    variables. Raises ConfigError if the URL or the variables are invalid."""
    parts = urlsplit(url)
    if not parts.netloc:
        raise ConfigError(_SETTING, f"{url!r} contains no bucket", "Write it as s3://bucket/prefix.")
    second = datetime.timedelta(seconds=TRANSFER_TIMEOUT_S)
    try:
        store = S3Store(
            parts.netloc, prefix=unquote(parts.path).strip("/") or None,
            client_options={
                "timeout": second, "connect_timeout": second, "allow_http": True, **_proxy_options()
            },
            retry_config={"max_retries": 1, "retry_timeout": second},
        )  # fmt: skip
    except (BaseError, ValueError) as e:
        raise ConfigError(
            _SETTING, f"{url}: {_first_line(e)}", "Set AWS_REGION, AWS_ENDPOINT_URL and keys."
        ) from e
    return ObjectFarStore(store)


def _proxy_options() -> ClientConfig:
    """Return options that exclude an endpoint in a private network from the environment's proxy.

    A public endpoint is accessed through the proxy, because it may be unreachable otherwise.
    """
    proxy = next((os.environ[name] for name in _PROXIES if os.environ.get(name)), "")
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
    host = urlsplit(endpoint).hostname or ""
    if not (proxy and host and _is_private(host)):
        return {}
    # A proxy in the options replaces the environment's proxy.
    return {"proxy_url": proxy, "proxy_excludes": host}


def _is_private(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        return not any(ipaddress.ip_address(str(address[0])).is_global for *_, address in found)
    except (OSError, ValueError):
        return False


def _exists(head: ObjectMeta | BaseException) -> bool:
    if isinstance(head, FileNotFoundError):
        return False
    if isinstance(head, (BaseError, OSError)):
        raise _to_failure(head) from None
    if isinstance(head, BaseException):
        raise head
    return head["size"] <= _MAX_RECORD_BYTES


def _to_failure(problem: Exception) -> FarFailure:
    return FarFailure(_first_line(problem))


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0][:300]
