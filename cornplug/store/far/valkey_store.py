"""`valkey://` and `redis://`: far stores that keep records as strings in a Valkey or Redis server, with the
package valkey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from valkey import Valkey
from valkey.backoff import NoBackoff
from valkey.exceptions import ValkeyError
from valkey.retry import Retry

from cornplug.errors import ConfigError
from cornplug.store.far.open_far import LOOKUP_TIMEOUT_S, TRANSFER_TIMEOUT_S, FarFailure, label_of

_SETTING: Final = "store.far"
_MAX_RECORD_BYTES: Final = 4 << 20
"""Maximum size of a record in bytes. Larger values would block the server's only thread for too long."""
_MAX_NAMES: Final = 1024
_SCHEMES: Final = {"redis": "valkey", "rediss": "valkeys"}


class ValkeyFarStore:
    """Far store in one database of a server."""

    max_bytes = _MAX_RECORD_BYTES
    max_names = _MAX_NAMES

    def __init__(self, lookup_client: Valkey, transfer_client: Valkey) -> None:
        self._lookup_client, self._transfer_client = lookup_client, transfer_client

    def exists(self, names: Sequence[str]) -> list[bool]:
        try:
            with self._lookup_client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.exists(name)
                return [found == 1 for found in pipe.execute()]  # type: ignore[no-untyped-call]
        except (ValkeyError, OSError) as e:
            raise _to_failure(e) from None

    def get(self, name: str) -> bytes | None:
        # GETRANGE returns at most one byte more than the maximum size. A longer value is truncated, so it
        # cannot be opened.
        try:
            found: Any = self._transfer_client.getrange(name, 0, _MAX_RECORD_BYTES)
        except (ValkeyError, OSError) as e:
            raise _to_failure(e) from None
        return found or None

    def put(self, name: str, record: bytes) -> None:
        try:
            self._transfer_client.set(name, record)
        except (ValkeyError, OSError) as e:
            raise _to_failure(e) from None

    def delete(self, names: Sequence[str]) -> None:
        try:
            self._transfer_client.unlink(*names)
        except (ValkeyError, OSError) as e:
            raise _to_failure(e) from None

    def close(self) -> None:
        for client in (self._lookup_client, self._transfer_client):
            client.close()  # type: ignore[no-untyped-call]


def open_valkey_url(url: str) -> ValkeyFarStore:
    """Open valkey://[USER:PASSWORD@]HOST[:PORT][/DATABASE], or valkeys:// with TLS. The connection is made at
    the first call. Raises ConfigError if the URL is invalid."""
    parts = urlsplit(url)
    address = urlunsplit(parts._replace(scheme=_SCHEMES.get(parts.scheme, parts.scheme)))
    try:
        if not parts.hostname:
            raise ValueError("it contains no host")
        clients = [
            Valkey.from_url(
                address, socket_timeout=deadline_s, socket_connect_timeout=LOOKUP_TIMEOUT_S,
                retry=Retry(NoBackoff(), 0), retry_on_timeout=False,
            )
            for deadline_s in (LOOKUP_TIMEOUT_S, TRANSFER_TIMEOUT_S)
        ]  # fmt: skip
    except (ValkeyError, ValueError) as e:
        raise ConfigError(
            _SETTING, f"{label_of(url)!r}: {e}", "Use a URL like valkey://host:6379/0, or valkeys:// for TLS."
        ) from e
    return ValkeyFarStore(*clients)


def _to_failure(problem: Exception) -> FarFailure:
    return FarFailure(f"{type(problem).__name__}: {problem}"[:300])
