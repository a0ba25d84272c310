"""Settings of the host's store: `[store]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from cornplug.private_paths import cache_dir, runtime_dir
from cornplug.settings.byte_size import ByteSize
from cornplug.settings.settings_section import Section, comma_separated

STORE_PROTOCOL: Final = 6
"""The version of the protocol between clients and store. It is in the socket's default name: during a rolling
upgrade each release has its store, and shares."""


DEFAULT_NAMESPACE: Final = "default"
"""The namespace of every app that no other one names."""


class NamespaceConfig(Section):
    """One namespace of the store: the entries that some apps write. Example:

    ```toml
    [store.namespaces.chat]
    apps = ["chat", "agents"]   # without this line: the app "chat"
    share = 0.5
    priority = 1
    ```
    """

    apps: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = ()
    """Apps (`engine.app`, a client's `app`) whose entries are in this namespace. Empty: the app of the same
    name."""
    share: float = Field(default=0.0, ge=0, le=1)
    """Fraction of the store that is guaranteed. Other namespaces borrow what is idle of it, and give it back
    when this one needs it."""
    ceiling: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the store that is never exceeded: beyond it the namespace evicts its own entries."""
    priority: int = 0
    """Order in which namespaces keep room that no share guarantees: the lowest loses its entries first."""
    ttl_s: float | None = Field(default=None, gt=0)
    """Time from an entry's writing to its end, however often it is read. None: it has no end."""
    pinned: bool = False
    """Entries stay until they are deleted or `ttl_s` ends them: for a document set or the system prompts
    that an engine of their own writes. Needs a `ceiling` below 1; beyond it new entries are refused."""


def metrics_address(text: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT", "[IPV6]:PORT" or "PORT" (on this host only). Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f'{text!r} is no address: write "127.0.0.1:9464", "[::1]:9464" or "9464"')
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


class StoreConfig(Section):
    """The host's store."""

    backend: str = "pool"
    """The store to use: "pool" is the host's own. A package can bring another one (entry point
    `cornplug.stores`), selected by its NAME, or NAME:ADDRESS where it takes an address."""
    socket: Path = Field(default_factory=lambda: runtime_dir() / f"store-{STORE_PROTOCOL}.sock")
    """The unix socket at which the store listens and clients connect."""
    size_bytes: ByteSize | None = Field(default=None, gt=0)
    """Upper bound of payload bytes in shared memory. None: a quarter of the memory that the host and the
    container have left when the store starts."""
    disk_path: Path | None = None
    """A folder of this user on a local disk, in which the store keeps a sealed copy of its entries: they are
    there after a restart of the host, and after they left memory. Needs the extra `cornplug[disk]`. None:
    nothing of the store is on disk."""
    disk_size_bytes: ByteSize | None = Field(default=None, ge=1 << 20)
    """Upper bound of the files in `disk_path`. None: half of the free space of its file system when the store
    starts, these files included."""
    disk_write_bytes_s: ByteSize | None = Field(default=None, gt=0)
    """Bytes that the store writes to the disk in a second at most, so that it lives longer. None: as many as
    it takes."""
    far: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """URLs of far stores, by which hosts share entries: `file:///FOLDER` (a mounted share), `s3://BUCKET/PREFIX`,
    `valkey://HOST:6379/0` (`redis://` too), `mooncake://MASTER:50051`, `nixl://HOST:8760+HOST:8760`
    (memory of the named hosts). Records there are sealed. Needs a `secret_file` that all hosts have, and the
    extra `cornplug[far-object]`, `cornplug[far-valkey]`, `cornplug[far-mooncake]` or `cornplug[far-nixl]`.
    Empty: nothing leaves this host."""
    far_secret_files: tuple[Path, ...] = ()
    """Files of 32 bytes, by absolute paths, that seal the records of far stores: the first one seals new
    records, and those of any are read, so that a secret can be replaced while hosts run. Empty:
    `secret_file`, which names records in either case."""
    autostart: bool = True
    """An engine starts a store when none answers at `socket`."""
    deadline_s: float = Field(default=0.1, gt=0)
    """Longest wait of an engine's scheduler for one answer of the store (typically 0.1 ms). A later answer
    counts as a miss, and the store as down."""
    background_timeout_s: float = Field(default=1.0, gt=0)
    """Longest wait of a background thread for one answer of the store; it delays one request, not the
    engine."""
    load_when: Literal["pays", "always"] = "pays"
    """ "pays": an engine loads an entry only if its own measurements say that loading is quicker than
    computing; "always": it loads every entry that is there."""
    lease_s: float = Field(default=30.0, gt=0)
    """Time that an engine has to copy an entry that it leased; then the entry may be evicted."""
    quarantine_s: float = Field(default=5.0, ge=0)
    """Time for which the room of a reservation whose owner died is kept from other writers."""
    secret_file: Path = Field(default_factory=lambda: cache_dir() / "secret")
    """A file of 32 bytes that keys every digest, made on first use. Hosts that share need the same file."""
    access_log: Path | None = None
    """A file to which the store appends its reads and writes, up to 1 GiB, for `cornplug replay`. It has
    sizes, times and 8 bytes of each key, nothing of the content. None: no log."""
    metrics: str = ""
    """Address at which the store serves Prometheus metrics (`/metrics`), as "0.0.0.0:9464", or "9464" for
    this host only. Empty: none, as a host may run several stores. Where the port is taken the store serves
    engines all the same, and its log says so."""
    namespaces: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], NamespaceConfig] = Field(
        default_factory=dict
    )
    """Namespaces, by name. Only the file named by `CORNPLUG_CONFIG` has them, and the store reads it as it
    starts. Apps that none of them names share the namespace "default"."""

    @field_validator("far", "far_secret_files", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return comma_separated(value)

    @field_validator("far_secret_files")
    @classmethod
    def _absolute(cls, value: tuple[Path, ...]) -> tuple[Path, ...]:
        if relative := next((path for path in value if not path.is_absolute()), None):
            raise ValueError(f"{relative} is a relative path: write it from /")
        return value

    @field_validator("metrics")
    @classmethod
    def _address(cls, value: str) -> str:
        if value:
            metrics_address(value)
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for name, rules in self.namespaces.items():
            at = f"namespaces.{name}"
            if rules.share > rules.ceiling:
                raise ValueError(f"{at}: share {rules.share:g} is above ceiling {rules.ceiling:g}: lower it")
            if rules.pinned and rules.ceiling == 1:
                raise ValueError(f"{at}: pinned entries could fill the store: set ceiling below 1")
        # Nothing evicts pinned entries: up to their ceiling that room is as good as guaranteed.
        held = [(rules.ceiling if rules.pinned else rules.share) for rules in self.namespaces.values()]
        if sum(held) > 1 + 1e-9:
            raise ValueError(
                f"namespaces: shares, and ceilings of pinned ones, add up to {sum(held):g}: at most 1 can be"
            )
        apps = [app for name, rules in self.namespaces.items() for app in set(rules.apps or (name,))]
        twice = sorted({app for app in apps if apps.count(app) > 1})
        if twice:
            raise ValueError(f"namespaces: app {twice[0]!r} is in two of them: leave it in one")
        return self
