"""Settings that several processes share: the host's store (`[store]`) and classes of service (`[qos]`)."""

from __future__ import annotations

import argparse
import hashlib
import re
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from cornplug.private_paths import cache_dir, runtime_dir

GIB: Final = 1 << 30
_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": GIB, "TIB": 1 << 40,
}  # fmt: skip
STORE_PROTOCOL: Final = 6
"""Version of the protocol between clients and the store.

The default name of the socket contains it, so that each release uses its own store during a rolling upgrade.
"""
MAX_DEADLINE_S: Final = 120.0
"""Maximum deadline in seconds of a request to the encoder service. A longer one is shortened."""
BACKGROUND_TIMEOUT_S: Final = 1.0
"""Minimum time in seconds that a background thread waits for one reply of the store."""
DEFAULT_NAMESPACE: Final = "default"
"""Namespace of every app that is not listed in another namespace."""


def parse_byte_size(text: str) -> int:
    """Parse "4GiB", "512 MiB", "1.5GB" or "1048576" into bytes. Raises ValueError for any other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B|)\s*", text.upper())
    size_bytes = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if size_bytes < 1:
        raise ValueError(f"{text!r} is not a size: write 64GiB, 512MiB or a number of bytes")
    return size_bytes


def parse_size_argument(text: str) -> int:
    """Parse a size for argparse, which adds the name of the flag to the error."""
    try:
        return parse_byte_size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _parse_if_text(value: object) -> object:
    return parse_byte_size(value) if isinstance(value, str) else value


ByteSize = Annotated[int, BeforeValidator(_parse_if_text)]
"""Type of settings that are a number of bytes, or text with a unit, such as "64GiB"."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def split_commas(value: object) -> object:
    """Split a string at commas. Any other value is returned unchanged."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


class NamespaceConfig(Section):
    """One namespace of the store. Apps without a namespace share the namespace "default"."""

    apps: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Apps (`engine.app`) in this namespace. Empty: the app that has the same name as the namespace."""
    share: float = Field(default=0.0, ge=0, le=1)
    """Guaranteed fraction of the store. Other namespaces can use the unused part."""
    ceiling: float = Field(default=1.0, gt=0, le=1)
    """Maximum fraction of the store. At its ceiling, the namespace evicts its own entries."""
    priority: int = 0
    """Namespaces that use more than their share lose entries in order of priority, the lowest first."""
    ttl_s: float | None = Field(default=None, gt=0)
    """Time from writing until an entry expires. None: never."""
    pinned: bool = False
    """Keep entries until they are deleted or expire. Requires a `ceiling` below 1. New entries above the
    ceiling are rejected."""


def parse_metrics_address(text: str) -> tuple[str, int]:
    """Parse "HOST:PORT", "[IPV6]:PORT" or "PORT" (this host only) into host and port. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'{text!r} is not an address: write "127.0.0.1:9464", "[::1]:9464" or "9464"')
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


class StoreConfig(Section):
    """The host's store."""

    backend: str = "pool"
    """Store to use: "pool", or NAME or NAME:ADDRESS of a store from another package (entry point
    `cornplug.stores`)."""
    socket: Path = Field(default_factory=lambda: runtime_dir() / f"store-{STORE_PROTOCOL}.sock")
    """Unix socket of the store."""
    size_bytes: ByteSize | None = Field(default=None, gt=0)
    """Maximum payload in shared memory. None: a quarter of the memory that is available when the store
    starts."""
    disk_path: Path | None = None
    """Folder on a local disk for encrypted entries that survive restarts and eviction. It must belong to this
    user. Requires `cornplug[disk]`."""
    disk_size_bytes: ByteSize | None = Field(default=None, ge=1 << 20)
    """Maximum size of the files in `disk_path`. None: half of the free space when the store starts."""
    disk_write_bytes_s: ByteSize | None = Field(default=None, gt=0)
    """Maximum write rate of the disk. None: no limit."""
    far: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """URLs of [far stores](deploy-many-hosts.md#share-kv-between-hosts), through which hosts share
    entries."""
    far_secret_files: tuple[Path, ...] = ()
    """Absolute paths of files with secrets for far stores. The first secret encrypts new records, and all
    secrets decrypt ([how to replace a secret](deploy-many-hosts.md#replace-the-secret-of-a-far-store)).
    Empty: `secret_file`."""
    autostart: bool = True
    """Let an engine start a store if none is running."""
    deadline_s: float = Field(default=0.1, gt=0)
    """Maximum time that an engine's scheduler waits for a reply. After a missed deadline, lookups are misses
    until the store responds. Background threads wait for at least 1 s."""
    load_when: Literal["pays", "always"] = "pays"
    """When to load an entry. "pays": only if loading is faster than computing, as measured by the engine.
    "always": always, and wait for the encoder service up to `encoder.deadline_s`."""
    quarantine_s: float = Field(default=5.0, ge=0)
    """Time after which memory that a dead writer had reserved is reused."""
    secret_file: Path = Field(default_factory=lambda: cache_dir() / "secret")
    """32-byte file that keys every digest, created on first use. Hosts that share need the same file."""
    access_log: Path | None = None
    """File to which the store appends its reads and writes, up to 1 GiB, for `cornplug replay`: sizes, times
    and 8 bytes of each key."""
    metrics: str = ""
    """Address for Prometheus metrics, for example "0.0.0.0:9464", or "9464" for this host only. Empty: no
    metrics. If the port is in use, the store runs without metrics."""
    namespaces: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], NamespaceConfig] = Field(
        default_factory=dict
    )
    """Namespaces, by name. Apps that are not listed share the namespace "default"."""

    @property
    def background_timeout_s(self) -> float:
        """Maximum time in seconds that a background thread waits for one reply of the store. The wait delays
        one request, but not the engine."""
        return max(BACKGROUND_TIMEOUT_S, self.deadline_s)

    @field_validator("far", "far_secret_files", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_commas(value)

    @field_validator("far_secret_files")
    @classmethod
    def _check_absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        if relative := next((path for path in value if not path.is_absolute()), None):
            raise ValueError(f"{relative} is a relative path: write an absolute path")
        return value

    @field_validator("metrics")
    @classmethod
    def _check_metrics_address(cls, value: str) -> str:
        if value:
            parse_metrics_address(value)
        return value

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        for name, rules in self.namespaces.items():
            at = f"namespaces.{name}"
            if rules.share > rules.ceiling:
                raise ValueError(f"{at}: share {rules.share:g} exceeds ceiling {rules.ceiling:g}: lower it")
            if rules.pinned and rules.ceiling == 1:
                raise ValueError(f"{at}: pinned entries could fill the store: set ceiling below 1")
        # Pinned entries are never evicted, so their memory up to the ceiling counts as guaranteed.
        held = [(rules.ceiling if rules.pinned else rules.share) for rules in self.namespaces.values()]
        if sum(held) > 1 + 1e-9:
            raise ValueError(
                f"namespaces: shares and pinned ceilings add up to {sum(held):g}: the maximum is 1"
            )
        apps = [app for name, rules in self.namespaces.items() for app in set(rules.apps or (name,))]
        twice = sorted({app for app in apps if apps.count(app) > 1})
        if twice:
            raise ValueError(f"namespaces: app {twice[0]!r} is in two namespaces: list it in one")
        return self


class ClassConfig(Section):
    """One class of service."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Guaranteed fraction of the tower's time."""
    priority: int = 0
    """The waiting class with the highest priority gets the time beyond the shares, and unused shares."""
    deadline_s: float | None = Field(default=None, gt=0, le=MAX_DEADLINE_S)
    """Deadline of requests that do not set a deadline, at most 120. None: `encoder.deadline_s`."""
    api_keys: tuple[str, ...] = ()
    """API keys of this class, in plain text or as "sha256:" and 64 hex digits."""
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,48}$")], tuple[str, ...]] = Field(
        default_factory=dict
    )
    """API keys of each tenant, written like `api_keys`. Entries are shared only within the tenant."""
    apps: tuple[str, ...] = ()
    """Apps whose requests belong to this class if they have no key."""

    @field_validator("api_keys")
    @classmethod
    def _digest_api_keys(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_digest_of_key(key) for key in keys)

    @field_validator("tenants")
    @classmethod
    def _digest_tenant_keys(cls, tenants: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {tenant: tuple(_digest_of_key(key) for key in keys) for tenant, keys in tenants.items()}

    def keys_with_tenants(self) -> tuple[tuple[str, str | None], ...]:
        """Return (digest, tenant) for every key of this class."""
        bound = ((key, tenant) for tenant, keys in self.tenants.items() for key in keys)
        return (*((key, None) for key in self.api_keys), *bound)


class QosConfig(Section):
    """Classes of service of the encoder service."""

    default: str = "default"
    """Class of requests that match no other class."""
    classes: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ClassConfig] = Field(
        default_factory=dict
    )
    """Classes of service, by name."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        total = sum(one.share for one in self.classes.values())
        if total > 1 + 1e-9:
            raise ValueError(f"the shares of all classes add up to {total:g}: reduce them to at most 1")
        if self.default != "default" and self.default not in self.classes:
            raise ValueError(
                f"default: class {self.default!r} does not exist: add [qos.classes.{self.default}]"
            )
        if self.default in self.classes and self.classes[self.default].keys_with_tenants():
            raise ValueError("api_keys: the default class is for requests without a key: remove its keys")
        apps = [app for c in self.classes.values() for app in set(c.apps)]
        keys = [key for c in self.classes.values() for key in {*c.api_keys}]
        keys += [key for c in self.classes.values() for each in c.tenants.values() for key in set(each)]
        for what, named in (("apps", apps), ("api_keys", keys)):
            if len(named) != len(set(named)):
                raise ValueError(f"{what}: a value is listed twice: list it once")
        return self


def _digest_of_key(key: str) -> str:
    if key.startswith("sha256:"):
        if re.fullmatch(r"sha256:[0-9a-f]{64}", key) is None:
            raise ValueError('"sha256:" must be followed by 64 lower-case hex digits, as from sha256sum')
        return key
    if not key:
        raise ValueError("an empty key would admit every client")
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()
