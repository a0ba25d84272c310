"""All settings, read from one TOML file and from `CORNPLUG_<SECTION>_<FIELD>` environment variables.

Precedence, highest first: explicit arguments (engine flags), environment variables, the file named by
`CORNPLUG_CONFIG`, and the defaults below. A relative path in the file is relative to the file's folder. Any
other relative path is relative to the working directory.

Every setting is read here. Three other modules read CORNPLUG_* variables that are not settings:
`sglang_hooks/activation.py` (variables that SGLang's processes pass to their children),
`planner/launch/launcher.py` (paths of programs in other environments) and `private_paths.py` (folder
for sockets).

The docstring of a setting is its entry in `docs/configuration.md`, which `script/docs` writes.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Mapping
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any, Final, Literal, get_args, get_origin
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator

from cornplug.errors import ConfigError
from cornplug.private_paths import runtime_dir
from cornplug.settings import (
    MAX_DEADLINE_S,
    STORE_PROTOCOL,
    ByteSize,
    ClassConfig,
    NamespaceConfig,
    QosConfig,
    Section,
    StoreConfig,
    split_commas,
)

__all__ = [
    "STORE_PROTOCOL",
    "ClassConfig",
    "Config",
    "EncoderConfig",
    "EngineConfig",
    "NamespaceConfig",
    "QosConfig",
    "StoreConfig",
    "load",
]

IMAGES_PER_PROMPT: Final = "engine_flag.images_per_prompt"
"""Maximum number of images in a prompt of a server without a tower (`--limit-mm-per-prompt`). There is no
limit if the key is absent."""
EMBEDDINGS_BY_VALUE: Final = "engine_flag.embeddings_by_value"
"""True if requests may contain embeddings (`--enable-mm-embeds`)."""
_ENGINE_FLAGS: Final[Mapping[str, type]] = {IMAGES_PER_PROMPT: int, EMBEDDINGS_BY_VALUE: bool}
"""vLLM's own flags, which an engine's main process sends to its other processes together with the settings.
They are not settings, so they cannot be set in the file or in an environment variable."""


class EncoderConfig(Section):
    """The shared encoder service."""

    socket: Path = Field(default_factory=lambda: runtime_dir() / "encoder.sock")
    """Unix socket of the service, for engines on this host."""
    engine_urls: tuple[str, ...] = ()
    """Services on other hosts that engines use instead of `socket`, for example "http://a:8750,
    http://b:8750#3". "#3" gives a service three times the default weight. Requires one `store.secret_file` on
    all hosts and `cornplug[remote]`."""
    host: str = "127.0.0.1"
    """HTTP address to listen on."""
    port: int = Field(default=8750, ge=0, le=65535)
    """HTTP port. 0 picks a free port."""
    urls: tuple[str, ...] = ()
    """Services that `EncoderClient` uses. Empty: the service at `host` and `port`."""
    deadline_s: float = Field(default=10.0, gt=0, le=MAX_DEADLINE_S)
    """Maximum time that an engine waits for an embedding, at most 120. An engine that has measured its own
    tower waits three times the tower's duration, at least 0.5 s. After the wait, the engine runs its own
    tower."""
    language_only_timeout_s: float = Field(default=60.0, gt=0, le=MAX_DEADLINE_S)
    """Maximum time that an engine without a tower waits for an embedding, at most 120."""
    max_batch_tokens: int | None = Field(default=None, gt=0)
    """Maximum number of tokens in a batch. A larger medium has its own batch. None: 2048 on a CPU, 32,768 on
    a GPU."""
    prepare_threads: int = Field(
        default_factory=lambda: max(2, min(16, len(os.sched_getaffinity(0)))), gt=0, le=256
    )
    """Number of media that are decoded and preprocessed concurrently. Default: the number of cores, between
    2 and 16."""
    drain_s: float = Field(default=25.0, gt=0)
    """Maximum time that a stopping service waits for admitted requests to finish."""
    max_pixels: int = Field(default=64_000_000, gt=0)
    """Maximum number of pixels of an image. The frames of a video may have four times as many in total."""
    max_media_s: float = Field(default=600.0, gt=0)
    """Maximum length of audio or video, in seconds."""
    max_body_bytes: ByteSize = Field(default=64 << 20, gt=0)
    """Maximum body size of an HTTP request."""
    admin_key: SecretStr = SecretStr("")
    """Key for reloading weights over HTTP. Empty: clients on this host can reload."""
    require_key: bool = False
    """Accept only requests with an API key of a class, or with `admin_key`."""
    allow_anonymous: bool = False
    """Allow a `host` that is not loopback without `require_key`."""
    trust_salts: bool = False
    """Accept a `cache_salt` without a [tenant's key](security.md#tenants)."""
    names: str = ""
    """Comma-separated names of this service for clients without a key, besides localhost and this host's name
    and addresses."""
    sglang: bool = False
    """Also serve SGLang's `--language-only` servers on the HTTP port."""
    receivers: str = ""
    """Networks ("10.1.0.0/16, fd00::/8") of SGLang servers that receive embeddings requested by other
    hosts."""
    allow_hosts: tuple[str, ...] = ("*",)
    """Hosts ("images.example.org, *.cdn.example.org") from which URLs are [fetched](security.md#urls). "*"
    allows every host with a public address. An empty list allows no host."""
    allow_networks: str = ""
    """Private networks ("10.2.0.0/16") in which allowed hosts may have their addresses."""

    @field_validator("urls", "engine_urls", "allow_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return split_commas(value)

    @field_validator("engine_urls")
    @classmethod
    def _check_engine_urls(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or (parts.port or 1) > 65535:
                raise ValueError(f'{url!r} is not an http URL: write "http://host:8750"')
        if len(_parse_url_weights(value)) < len(value):
            raise ValueError("a service is listed twice: list each service once")
        return value

    def engine_weights(self) -> dict[str, float]:
        """Return the weight of each URL in `engine_urls`."""
        return _parse_url_weights(self.engine_urls)

    @field_validator("receivers")
    @classmethod
    def _check_receivers(cls, value: str) -> str:
        _parse_networks(value)
        return value

    def receiver_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Return the networks in `receivers`."""
        return _parse_networks(self.receivers)


def _parse_url_weights(urls: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for url in urls:
        address, hash_sign, said = url.partition("#")
        try:
            weight = float(said) if hash_sign else 1.0
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ValueError(f'{url!r} needs a weight above 0 after "#": write "http://host:8750#2"')
        found[address.rstrip("/")] = weight
    return found


def _parse_networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(map(ip_network, _split_list(text)))


def _split_list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class EngineConfig(Section):
    """How an engine uses the store and the encoder service."""

    app: str = Field(default="default", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """Name of the app that this engine serves, for metrics and namespaces."""
    page_tokens: int = Field(default=64, ge=16, le=1024, multiple_of=16)
    """Tokens per KV page. Engines that share need the same value. Models with recurrent states use vLLM's
    block size instead."""
    share_kv: bool = True
    """Load and save KV pages."""
    save: Literal["always", "second", "never"] = "second"
    """KV pages to save. "always": every computed page. "second": pages that a second request uses, on this
    engine or (vLLM only) another engine with the same store. While the engine is idle, it also saves other
    pages into free memory. "never": no pages."""
    share_embeddings: bool = True
    """Load and save embeddings, and use the encoder service."""
    sglang_preprocessing: Literal["auto", "cpu", "device"] = "auto"
    """Where an SGLang server with a GPU preprocesses images. "cpu": on the CPU, as vLLM and the encoder
    service do, so that embeddings can be shared with them. "device": on the GPU, SGLang's default. "auto":
    "cpu" if an encoder service responds when the server starts, otherwise "device"."""
    trust_weight_version: bool = False
    """Continue to share after a trainer replaces this engine's weights. The trainer must follow [two
    rules](operate.md#weights-from-a-trainer)."""
    tower: Literal["engine", "service"] = "engine"
    """Where the vision tower of a vLLM server runs. "engine": in the server. "service": in the services at
    `encoder.engine_urls`. Requests with images then get status 503 if no service responds
    within `encoder.language_only_timeout_s`."""


class Config(Section):
    """All settings. Instances are frozen; `load` creates them."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    encoder: EncoderConfig = Field(default_factory=EncoderConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    qos: QosConfig = Field(default_factory=QosConfig)


_SECTIONS: Final[Mapping[str, type[Section]]] = {
    "store": StoreConfig, "encoder": EncoderConfig, "engine": EngineConfig, "qos": QosConfig,
}  # fmt: skip
_PATH_SETTINGS: Final[Mapping[str, frozenset[str]]] = {
    section: frozenset(
        name
        for name, field in kind.model_fields.items()
        if Path in (field.annotation, *get_args(field.annotation))
        and get_origin(field.annotation) is not tuple
    )
    for section, kind in _SECTIONS.items()
}
"""Names of the settings in each section whose value is a single path."""


def load(overrides: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] = os.environ) -> Config:
    """Merge defaults, file, environment and `overrides` ({"section.field": value}).

    Raises ConfigError, which names the field and the accepted values.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    path = environ.get("CORNPLUG_CONFIG")
    if path:
        for section, fields in _read_toml(Path(path)).items():
            if section not in values or not isinstance(fields, dict):
                raise ConfigError(
                    f"{path}: [{section}]", "unknown section", f"Sections: {', '.join(values)}."
                )
            values[section].update(_resolve_paths(section, fields, Path(path).parent))
    for name, text in environ.items():
        section, field = _parse_variable_name(name)
        if section in values:
            values[section].update(_resolve_paths(section, {field: text}))
    for dotted, value in (overrides or {}).items():
        section, _, field = dotted.partition(".")
        if section not in values:
            raise ConfigError(dotted, "unknown section", f"Sections: {', '.join(values)}.")
        values[section].update(_resolve_paths(section, {field: value}))
    try:
        return Config.model_validate(values)
    except ValidationError as e:
        first = e.errors()[0]
        problem = first["msg"].removeprefix("Value error, ")
        field = ".".join(str(p) for p in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(
                field,
                "unknown setting",
                "Remove it from the file named by CORNPLUG_CONFIG, the environment variable "
                f"CORNPLUG_{field.upper().replace('.', '_')}, or the flags. docs/configuration.md lists the "
                "settings.",
            ) from None
        # Error messages must not contain a key, nor a value that may contain one.
        said = "key" not in field and not isinstance(first.get("input"), (dict, QosConfig))
        raise ConfigError(
            field,
            f"{problem} (got {first.get('input')!r})" if said else problem,
            "Set it in the file named by CORNPLUG_CONFIG, in the environment variable "
            f"CORNPLUG_{field.upper().replace('.', '_')}, or with the engine's --cornplug-* flag.",
        ) from None


def dump_portable(config: Config) -> dict[str, Any]:
    """Return the settings as {"section.field": value} in plain JSON.

    `load_portable` restores equal settings from the result, even in a process with another environment or
    working directory. [qos] and the encoder service's key are left out, because processes started by an
    engine do not read them.
    """
    sections = config.model_dump(mode="json", exclude={"qos": True, "encoder": {"admin_key"}})
    return {
        f"{section}.{field}": str(value) if isinstance(value, Path) else value
        for section, fields in sections.items()
        for field, value in _resolve_paths(section, fields).items()
    }


def load_portable(values: Mapping[str, Any]) -> Config:
    """Restore settings from the result of `dump_portable`. Any other mapping is passed to `load`.

    Engine flags in `values` are checked, and are not part of the result. Raises the same errors as `load`.
    """
    for name in values.keys() & _ENGINE_FLAGS.keys():
        kind = _ENGINE_FLAGS[name]
        if type(values[name]) is not kind:
            raise ConfigError(name, f"{values[name]!r} is not a value of type {kind.__name__}", "Remove it.")
    values = {name: value for name, value in values.items() if name not in _ENGINE_FLAGS}
    complete = {f"{s}.{name}" for s, kind in _SECTIONS.items() if s != "qos" for name in kind.model_fields}
    # Complete settings ignore this process's file and environment, which may belong to another engine.
    is_complete = values.keys() >= complete - {"encoder.admin_key"}
    return load(values, environ={}) if is_complete else load(values)


def _parse_variable_name(variable: str) -> tuple[str, str]:
    """Return the section and field of an environment variable, or two empty strings if it is not a
    setting."""
    section, _, field = variable.removeprefix("CORNPLUG_").lower().partition("_")
    return (section, field) if variable.startswith("CORNPLUG_") and field else ("", "")


def _resolve_paths(section: str, fields: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """Return the fields of a section, with relative paths resolved against `folder`."""
    paths = _PATH_SETTINGS[section]
    return {
        name: (folder / value).absolute() if name in paths and isinstance(value, (str, Path)) else value
        for name, value in fields.items()
    }


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as e:
        raise ConfigError(
            "CORNPLUG_CONFIG", f"cannot read {path}: {e.strerror}", "Name a readable TOML file."
        ) from e
    except tomllib.TOMLDecodeError as e:
        raise ConfigError("CORNPLUG_CONFIG", f"{path} is not valid TOML: {e}", "Correct that line.") from e
