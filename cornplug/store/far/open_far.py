"""Interface of far stores, and `open_far`, which opens the far stores in the settings.

The package for a far store is imported only if a URL needs the package.

Far stores map names to records. Records are sealed (`record_format.py`), because far stores are not trusted.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ValidationError

from cornplug.errors import ConfigError
from cornplug.private_paths import is_default_secret, read_secret

Fields = TypeVar("Fields", bound=BaseModel)
_SETTING: Final = "store.far"
_SEALING_SETTING: Final = "store.far_secret_files"
_VALKEY: Final = ("valkey_store", "open_valkey_url", "far-valkey")
_BACKENDS: Final[Mapping[str, tuple[str, str, str]]] = {
    "file": ("object_store", "open_folder_url", "far-object"),
    "s3": ("object_store", "open_s3_url", "far-object"),
    "mooncake": ("mooncake_client", "open_mooncake_url", "far-mooncake"),
    "nixl": ("nixl_store", "open_nixl_url", "far-nixl"),
    "valkey": _VALKEY, "valkeys": _VALKEY, "redis": _VALKEY, "rediss": _VALKEY,
}  # fmt: skip
"""Module, function that opens the URL, and extra of cornplug that installs the package, by URL scheme."""
_SCHEMES_WITH_SECRET: Final = frozenset({"nixl"})
"""Schemes whose hosts prove to each other that they have the domain's secret, so the secret is passed to the
function that opens the URL."""
LOOKUP_TIMEOUT_S: Final = 0.25
"""Deadline of a lookup in seconds."""
TRANSFER_TIMEOUT_S: Final = 2.0
"""Deadline of one record's transfer, in either direction, in seconds."""


def parse_query(url: str, model: type[Fields]) -> Fields:
    """Return the query fields of a URL. Raises ValueError, which names the first invalid field."""
    query = urlsplit(url).query
    given = dict(parse_qsl(query, strict_parsing=bool(query)))
    try:
        return model.model_validate(given)
    except ValidationError as e:
        first = e.errors()[0]
        raise ValueError(f"{first['loc'][0]!r}: {first['msg']}") from e


@dataclass(frozen=True, slots=True)
class OpenedFar:
    """Opened far stores, and the secrets of the sharing domain."""

    stores: Sequence[tuple[str, FarStore]]
    """(label, far store) in the order of the settings."""
    secret: bytes
    sealing_secrets: Sequence[bytes] = ()
    """Sealing secrets, as described in `FarSealer`."""


def open_far(
    urls: Sequence[str], secret: bytes, *, secret_file: Path, sealing_files: Sequence[Path] = ()
) -> OpenedFar:
    """Open the far stores at these URLs, without waiting for connections.

    Raises ConfigError for an invalid URL, a missing package, and a sealing secret that cannot be read. Also
    raises ConfigError if `secret_file` is the default file, which is random on each host and therefore does
    not identify a sharing domain.
    """
    if is_default_secret(secret_file):
        raise ConfigError(
            "store.secret_file",
            "hosts that share a far store need the same secret, but this host uses its own random secret",
            "Copy a 32-byte file to all hosts, and set store.secret_file to it.",
        )
    labels = [label_of(url) for url in urls]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise ConfigError(_SETTING, f"{twice!r} is listed twice", "List each far store once.")
    sealing = [read_secret(path, setting=_SEALING_SETTING, create=False) for path in sealing_files]
    opened: list[tuple[str, FarStore]] = []
    try:
        for label, url in zip(labels, urls, strict=True):
            opened.append((label, _open_url(url, label, secret)))
    except ConfigError:
        for _, store in opened:
            store.close()
        raise
    return OpenedFar(opened, secret, sealing)


def _open_url(url: str, label: str, secret: bytes) -> FarStore:
    scheme = urlsplit(url).scheme
    if scheme not in _BACKENDS:
        known = ", ".join(f"{one}://" for one in sorted(_BACKENDS))
        raise ConfigError(_SETTING, f"{label!r} is not a far store", f"Supported: {known}.")
    module, function, extra = _BACKENDS[scheme]
    try:
        importlib.import_module("cryptography")
        backend = importlib.import_module(f"cornplug.store.far.{module}")
        store: FarStore = getattr(backend, function)(
            url, *([secret] if scheme in _SCHEMES_WITH_SECRET else [])
        )
    except ImportError as e:
        raise ConfigError(
            _SETTING,
            f"{label!r} requires a package that is not installed: {e}",
            f"Run: pip install 'cornplug[{extra}]'",
        ) from e
    return store


class FarFailure(OSError):
    """Raised if a far store does not reply in time, or replies with an error."""


class FarStore(Protocol):
    """One far store. Its methods are called on worker threads and may block. They raise FarFailure."""

    @property
    def max_bytes(self) -> int:
        """Maximum size in bytes of a record that can be written or read."""

    @property
    def max_names(self) -> int:
        """Maximum number of names in one lookup."""

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return whether each of these records exists."""

    def get(self, name: str) -> bytes | None:
        """Return the record of this name, or None if it does not exist."""

    def put(self, name: str, record: bytes) -> None:
        """Store a record under this name, and replace an older record of the same name."""

    def delete(self, names: Sequence[str]) -> None:
        """Delete the records of these names. Names without a record are ignored."""

    def close(self) -> None:
        """Close the connections."""


def label_of(url: str) -> str:
    """Return the URL without user, password and query, for logs and metrics."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
