"""All settings: one TOML file, `CORNPLUG_<SECTION>_<FIELD>` in the environment over it.

Every setting is read here. Two other modules read a CORNPLUG_* variable that is no setting: what SGLang's
processes hand to their children (`sglang_hooks/active.py`), and where another environment's programs are
(`planner/launching/processes.py`). Precedence: explicit arguments (engine flags), environment, the file
named by `CORNPLUG_CONFIG`, the defaults below.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import tomllib
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)

from cornplug.errors import ConfigError
from cornplug.private_paths import secret_problem

STORE_PROTOCOL: Final = 3
"""What clients and store speak. It is in the socket's default name: during a rolling upgrade each
release has a store of its own, and shares."""


def runtime_dir() -> Path:
    """Where sockets live: `$XDG_RUNTIME_DIR/cornplug`, else a 0700 folder of this user in /tmp."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "cornplug" if base else Path(f"/tmp/cornplug-{os.getuid()}")


def cache_dir() -> Path:
    """Where fingerprints and the secret are kept: `$XDG_CACHE_HOME/cornplug` or `~/.cache/cornplug`."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "cornplug"
    try:
        return Path.home() / ".cache" / "cornplug"
    except RuntimeError:  # a container's user that has no name and no HOME
        return runtime_dir()


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class StoreConfig(_Section):
    """The host's store."""

    backend: str = "pool"
    """Which store: "pool" is the host's own; others come with packages (entry points `cornplug.stores`)."""
    socket: Path = Field(default_factory=lambda: runtime_dir() / f"store-{STORE_PROTOCOL}.sock")
    size_bytes: int | None = Field(default=None, gt=0)
    """Upper bound of payload bytes in shared memory; by default a quarter of the memory that the host
    and the container have left when the store starts."""
    autostart: bool = True
    """Start a store when none answers at `socket`."""
    deadline_s: float = Field(default=0.1, gt=0)
    """Longest that an engine's scheduler waits for one answer of the store (typically 0.1 ms)
    before it counts as a miss and the store as down."""
    patience_s: float = Field(default=1.0, gt=0)
    """The same for background threads, which hold up one request and not the engine."""
    load_when: Literal["pays", "always"] = "pays"
    """"pays": what this engine would compute as quickly, by its own measurements, it computes;
    "always": whatever is there is loaded."""
    lease_s: float = Field(default=30.0, gt=0)
    """How long an engine may take to copy what it leased."""
    quarantine_s: float = Field(default=5.0, ge=0)
    """How long the room of a reservation whose owner died is kept from other writers."""
    secret_file: Path = Field(default_factory=lambda: cache_dir() / "secret")
    """32 bytes that key every digest; made on first use. Same file on all hosts that share."""


_PICTURE_FORMATS = (
    "AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""As `encoder_service.media.FORMATS`, which may not be imported here; a test compares them."""


class EncoderConfig(_Section):
    """The shared encoder service."""

    socket: Path = Field(default_factory=lambda: runtime_dir() / "encoder.sock")
    host: str = "127.0.0.1"
    port: int = Field(default=8750, ge=0, le=65535)
    urls: tuple[str, ...] = ()
    """Services that `EncoderClient` asks, e.g. "http://a:8750, http://b:8750"; none: `host` and `port`."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Longest wait for an embedding before the engine encodes by itself. Once an engine has measured
    its own tower it waits for three times that, and no longer than this."""
    deadline_floor_s: float = Field(default=0.5, gt=0)
    """What an engine waits at least, however quick its own tower is."""
    patience_s: float = Field(default=60.0, gt=0)
    """The same where the engine has no tower of its own: then its request fails."""
    max_batch_items: int = Field(default=16, gt=0)
    prepare_threads: int = Field(
        default_factory=lambda: max(2, min(16, len(os.sched_getaffinity(0)))), gt=0, le=256
    )
    """Media that are decoded and preprocessed at a time, by a process and a thread each; by default the
    cores, 2 to 16."""
    decode_deadline_s: float = Field(default=30.0, gt=0)
    """Longest that one medium may take to decode: then its process is killed, and it is refused."""
    max_prepared_bytes: int | None = Field(default=None, gt=0)
    """Of decoded and preprocessed media that are held at a time; None: a quarter of the memory that the host
    has, or the control group allows."""
    drain_s: float = Field(default=25.0, gt=0)
    """Longest that a service which was told to stop works on what it has admitted: it ends within the 30 s
    that are usual between SIGTERM and SIGKILL."""
    max_deadline_s: float = Field(default=120.0, gt=0)
    """Longest deadline that a client gets, whatever it asks for; a class may have its own."""
    max_pixels: int = Field(default=64_000_000, gt=0)
    """Largest picture accepted, in pixels after decoding."""
    max_audio_s: float = Field(default=600.0, gt=0)
    """Longest sound accepted, in seconds."""
    max_video_s: float = Field(default=600.0, gt=0)
    """Longest video accepted, in seconds."""
    max_frames: int = Field(default=768, gt=0)
    """Sampled frames of a video. All together may have four times `max_pixels`."""
    max_body_bytes: int = Field(default=64 << 20, gt=0)
    max_held_bytes: int = Field(default=1 << 30, gt=0)
    """Of all HTTP bodies under way together."""
    body_deadline_s: float = Field(default=30.0, gt=0)
    """Longest that a body may take to arrive."""
    admin_key: SecretStr = SecretStr("")
    """Who has it may reload weights by HTTP. Empty: who asks from this host may."""
    require_key: bool = False
    """Answer only who has a key: a class's (`qos.classes.NAME.api_keys`, `.tenants`) or `admin_key`.
    `/health` and `/ready` are for everybody."""
    allow_anonymous: bool = False
    """Listen beyond this host (`host`) though nobody needs a key."""
    trust_salts: bool = False
    """Take a `salt` from callers without a tenant's key: where only a gateway that names tenants, or one
    tenant, reaches the service. Otherwise they are refused."""
    names: str = ""
    """Names ("encoder, encoder.example.org") by which HTTP clients reach the service, beside localhost, this
    host's own name and its addresses. Who has no key and asks for another one is refused."""
    max_connections: int | None = Field(default=None, gt=0)
    """HTTP connections at a time; then the longest idle one ends for each that comes. None: what the
    process's descriptors allow, at most 4096."""
    picture_formats: str = "JPEG, PNG, WEBP, GIF, BMP"
    """Formats of still pictures that are decoded, by Pillow's names."""
    tenant_part: float = Field(default=0.5, gt=0, le=1)
    """Part of the store that one tenant's HTTP requests may fill, and all those without a tenant together."""
    max_items: int = Field(default=64, gt=0)
    """Media in one HTTP request."""
    max_waiting: int = Field(default=256, gt=0)
    """Items in the queue beyond which the service answers 503."""
    sglang: bool = False
    """Serve SGLang's `--language-only` servers on the HTTP port as well (`cornplug encoder --sglang`)."""
    receivers: str = ""
    """Networks ("10.1.0.0/16, fd00::/8") of SGLang servers that are sent embeddings though another
    host asks for them. A server's own host needs no mention."""
    allow_hosts: str = ""
    """Hosts ("images.example.org, *.cdn.example.org") whose http(s) URLs are fetched. Empty: nothing is."""
    allow_networks: str = ""
    """Networks ("10.2.0.0/16") that these hosts may be at although they are not public."""
    allow_ports: str = "80, 443"
    fetch_deadline_s: float = Field(default=5.0, gt=0)
    """Longest time for one URL, redirects included."""

    @field_validator("urls", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return (
            tuple(part.strip() for part in value.split(",") if part.strip())
            if isinstance(value, str)
            else value
        )

    @field_validator("picture_formats")
    @classmethod
    def _known(cls, value: str) -> str:
        known = {name.upper() for name in _PICTURE_FORMATS}
        wrong = [name for name in _words(value) if name.upper() not in known]
        if wrong or not _words(value):
            raise ValueError(f"{', '.join(wrong) or 'none'}: known are {', '.join(_PICTURE_FORMATS)}")
        return value

    def formats(self) -> tuple[str, ...]:
        """`picture_formats`, read."""
        return tuple(name.upper() for name in _words(self.picture_formats))

    @field_validator("receivers")
    @classmethod
    def _readable(cls, value: str) -> str:
        _networks(value)
        return value

    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """`receivers`, read."""
        return _networks(self.receivers)


def _networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(map(ip_network, _words(text)))


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class EngineConfig(_Section):
    """One engine's use of both."""

    app: str = Field(default="default", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """Who this engine works for: the label of metrics and of bytes in the store."""
    page_tokens: int = Field(default=64, ge=16, le=1024, multiple_of=16)
    share_kv: bool = True
    max_open_saves_bytes: int = Field(default=1 << 30, gt=0)
    """Pages on their way to the store, beyond which further ones are not saved: a store or a mover
    that cannot keep up must not be waited for when requests end."""
    share_embeddings: bool = True
    embeddings_by_value: bool = False
    """Take embeddings of anybody's in requests. vLLM's `--enable-mm-embeds` sets it."""


class ClassConfig(_Section):
    """One class of service; `cornplug.qos` has an example."""

    share: float = Field(default=0.0, ge=0, le=1)
    """Part of the tower's time that it can count on."""
    priority: int = 0
    """Who goes first in what nobody reserved: the highest."""
    deadline_s: float | None = Field(default=None, gt=0)
    """Of its requests that name none; None: `encoder.deadline_s`."""
    max_deadline_s: float | None = Field(default=None, gt=0)
    """Longest that they get, whatever they ask for; None: `encoder.max_deadline_s`."""
    api_keys: tuple[str, ...] = ()
    """Who has one of them is of this class. As they are, or as "sha256:" and 64 hex digits; kept as
    the latter."""
    tenants: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,48}$")], tuple[str, ...]] = Field(
        default_factory=dict
    )
    """Tenant -> keys, each as in `api_keys`. Who has one is of this class, and what is made for him has
    this salt: nobody else's requests share it."""
    apps: tuple[str, ...] = ()

    @field_validator("api_keys")
    @classmethod
    def _digested(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(_digest_of_key(key) for key in keys)

    @field_validator("tenants")
    @classmethod
    def _digested_too(cls, tenants: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {tenant: tuple(_digest_of_key(key) for key in keys) for tenant, keys in tenants.items()}

    def bound_keys(self) -> tuple[tuple[str, str | None], ...]:
        """(digest, tenant) of every key of this class."""
        bound = ((key, tenant) for tenant, keys in self.tenants.items() for key in keys)
        return (*((key, None) for key in self.api_keys), *bound)


class QosConfig(_Section):
    """Classes of service, by name, and the name of the one for everybody else."""

    default: str = "default"
    classes: dict[Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")], ClassConfig] = Field(
        default_factory=dict
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        total = sum(one.share for one in self.classes.values())
        if total > 1 + 1e-9:
            raise ValueError(f"the shares of all classes add up to {total:g}: make that 1 or less")
        if self.default != "default" and self.default not in self.classes:
            raise ValueError(f"default: no class {self.default!r}: add [qos.classes.{self.default}]")
        if self.default in self.classes and self.classes[self.default].bound_keys():
            raise ValueError("api_keys: the default class is for those who have none: take them out")
        apps = [app for c in self.classes.values() for app in set(c.apps)]
        keys = [key for c in self.classes.values() for key in {*c.api_keys}]
        keys += [key for c in self.classes.values() for each in c.tenants.values() for key in set(each)]
        for what, named in (("apps", apps), ("api_keys", keys)):
            if len(named) != len(set(named)):
                raise ValueError(f"{what}: one of them is in two places: leave it in one")
        return self


def _digest_of_key(key: str) -> str:
    if key.startswith("sha256:"):
        if re.fullmatch(r"sha256:[0-9a-f]{64}", key) is None:
            raise ValueError("after sha256: come 64 lower-case hex digits; make them with sha256sum")
        return key
    if not key:
        raise ValueError("an empty key would let everybody in")
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


class Config(_Section):
    """Everything. Frozen; make another with `load`."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    encoder: EncoderConfig = Field(default_factory=EncoderConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    qos: QosConfig = Field(default_factory=QosConfig)


def load(overrides: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] = os.environ) -> Config:
    """Merge defaults, file, environment and `overrides` ({"section.field": value}).

    Raises ConfigError that names the field, where it was set, and what it accepts.
    """
    values: dict[str, dict[str, Any]] = {"store": {}, "encoder": {}, "engine": {}, "qos": {}}
    path = environ.get("CORNPLUG_CONFIG")
    if path:
        for section, fields in _read_toml(Path(path)).items():
            if section not in values or not isinstance(fields, dict):
                raise ConfigError(
                    f"{path}: [{section}]", "unknown section", f"Sections: {', '.join(values)}."
                )
            values[section].update(fields)
    for name, text in environ.items():
        parts = name.removeprefix("CORNPLUG_").lower().split("_", 1)
        if name.startswith("CORNPLUG_") and len(parts) == 2 and parts[0] in values:
            values[parts[0]][parts[1]] = text
    for dotted, value in (overrides or {}).items():
        section, _, field = dotted.partition(".")
        if section not in values:
            raise ConfigError(dotted, "unknown section", f"Sections: {', '.join(values)}.")
        values[section][field] = value
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        field = ".".join(str(p) for p in first["loc"])
        # A key is never said back, nor what may hold one.
        said = "key" not in field and not isinstance(first.get("input"), (dict, QosConfig))
        raise ConfigError(
            field,
            f"{first['msg']} (got {first.get('input')!r})" if said else first["msg"],
            "Set it in the file named by CORNPLUG_CONFIG, as "
            f"CORNPLUG_{field.upper().replace('.', '_')}, or by the engine's --cornplug-* flag.",
        ) from None


def read_secret(path: Path) -> bytes:
    """The 32-byte secret, made on first use with mode 0600.

    Raises ConfigError when it cannot be read or made, is not exactly 32 bytes, or is not ours alone.
    """
    field = "store.secret_file"
    try:
        if not path.exists():
            _make_secret(path)
        with path.open("rb") as file:
            about, secret = os.fstat(file.fileno()), file.read()
    except OSError as e:
        remedy = "Name a file that this user can read or make: CORNPLUG_STORE_SECRET_FILE."
        raise ConfigError(field, f"{path}: {e.strerror}", remedy) from e
    if len(secret) != 32:
        problem = f"{path} has {len(secret)} bytes"
        raise ConfigError(field, problem, "Make one: head -c 32 /dev/urandom > FILE.")
    if problem := secret_problem(about):
        remedy = "Make a new one, or chmod 600 where nobody can have read it (Kubernetes: defaultMode: 0400)."
        raise ConfigError(field, f"{path} {problem}", remedy)
    return secret


def _make_secret(path: Path) -> None:
    """Written beside and linked into place: of two first users one wins, and both read the winner's."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    draft.touch(mode=0o600)
    try:
        draft.write_bytes(secrets.token_bytes(32))
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        draft.unlink()


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(
            "CORNPLUG_CONFIG", f"cannot read {path}: {e.strerror}", "Name a readable TOML file."
        ) from e
    except tomllib.TOMLDecodeError as e:
        raise ConfigError("CORNPLUG_CONFIG", f"{path} is no TOML: {e}", "Correct that line.") from e
