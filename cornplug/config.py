"""All settings: one TOML file, `CORNPLUG_<SECTION>_<FIELD>` in the environment over it.

Every setting is read here. Three other modules read a CORNPLUG_* variable that is no setting: SGLang's
processes hand one to their children (`sglang_hooks/activation.py`), one names the programs of another
environment (`planner/launch/command_process.py`), and one the folder of sockets (`private_paths.py`).
Precedence: explicit arguments (engine flags), environment, the file named by `CORNPLUG_CONFIG`, the defaults
below. A relative path in the file starts at the file's folder, any other one at the process's. The docstring
of a setting is its entry in `docs/configuration.md`, which `script/docs` writes.
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
from cornplug.settings.byte_size import ByteSize
from cornplug.settings.qos_settings import ClassConfig, QosConfig
from cornplug.settings.settings_section import Section, comma_separated
from cornplug.settings.store_settings import STORE_PROTOCOL, NamespaceConfig, StoreConfig

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

_IMAGE_FORMATS: Final = (
    "AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""As `encoder_service.media.FORMATS`, which may not be imported here; a test compares them."""


class EncoderConfig(Section):
    """The shared encoder service."""

    socket: Path = Field(default_factory=lambda: runtime_dir() / "encoder.sock")
    """The unix socket at which the service listens for engines of this host."""
    engine_urls: tuple[str, ...] = ()
    """Services on other hosts that engines ask in place of the one at `socket`, e.g. "http://a:8750,
    http://b:8750": each medium has its own order of them. "http://a:8750#3" is the first for three times as
    many as one without a weight. Needs a `store.secret_file` that these hosts have in common, and the extra
    `cornplug[remote]`. Empty: engines ask the service at `socket`."""
    host: str = "127.0.0.1"
    """The address at which the service listens for HTTP."""
    port: int = Field(default=8750, ge=0, le=65535)
    """The HTTP port; 0 picks a free one."""
    urls: tuple[str, ...] = ()
    """Services that `EncoderClient` asks, e.g. "http://a:8750, http://b:8750". Empty: the one at `host`
    and `port`."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Longest wait of an engine for an embedding; then it encodes by itself. An engine that has measured its
    own tower waits three times that, at most this long."""
    deadline_floor_s: float = Field(default=0.5, gt=0)
    """Shortest wait of an engine for an embedding, however quick its own tower is."""
    language_only_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait for an embedding of an engine that has no tower; then its request fails."""
    max_batch_items: int = Field(default=16, gt=0)
    """Largest number of media in one batch of a tower."""
    max_batch_tokens: int | None = Field(default=None, gt=0)
    """Largest number of tokens in one batch of a tower, besides its first medium's: bounds the tower's
    memory. None: 2048 on a CPU, 32,768 on a GPU."""
    prepare_threads: int = Field(
        default_factory=lambda: max(2, min(16, len(os.sched_getaffinity(0)))), gt=0, le=256
    )
    """Number of media that are decoded and preprocessed at a time, by one process and one thread each.
    Default: the number of cores, between 2 and 16."""
    decode_deadline_s: float = Field(default=30.0, gt=0)
    """Longest decoding of one medium; then its process is killed and the medium refused (`too_slow`)."""
    max_prepared_bytes: ByteSize | None = Field(default=None, gt=0)
    """Bytes of decoded and preprocessed media held at a time. None: a quarter of the memory that the host
    has or the control group allows."""
    drain_s: float = Field(default=25.0, gt=0)
    """Longest time for which a stopping service works on admitted requests. The default ends within the 30 s
    that are usual between SIGTERM and SIGKILL."""
    max_deadline_s: float = Field(default=120.0, gt=0)
    """Longest deadline that a client gets, even if it asks for more; a class may have its own."""
    max_pixels: int = Field(default=64_000_000, gt=0)
    """Largest image accepted, in pixels after decoding."""
    max_audio_s: float = Field(default=600.0, gt=0)
    """Longest audio accepted."""
    max_video_s: float = Field(default=600.0, gt=0)
    """Longest video accepted."""
    max_frames: int = Field(default=768, gt=0)
    """Largest number of frames sampled from a video. All frames together may have four times `max_pixels`."""
    max_body_bytes: ByteSize = Field(default=64 << 20, gt=0)
    """Largest body of one HTTP request."""
    max_held_bytes: ByteSize = Field(default=1 << 30, gt=0)
    """Bytes of all HTTP bodies under way together, at least four times `max_body_bytes`: half of them by the
    shares of the classes, a quarter for engines."""
    body_deadline_s: float = Field(default=30.0, gt=0)
    """Longest time in which the body of an HTTP request must arrive."""
    admin_key: SecretStr = SecretStr("")
    """The key that allows reloading weights by HTTP. Empty: callers on this host may reload."""
    require_key: bool = False
    """The service answers only callers with a key: one of a class (`qos.classes.NAME.api_keys`, `.tenants`)
    or `admin_key`. `/health` and `/ready` stay open."""
    allow_anonymous: bool = False
    """The service listens beyond this host (`host`) although callers need no key."""
    trust_salts: bool = False
    """The service takes a `cache_salt` from callers without a tenant's key. Safe only where a gateway that
    names tenants, or a single tenant, reaches the service; otherwise such requests are refused."""
    names: str = ""
    """Names ("encoder, encoder.example.org") by which HTTP clients reach the service, beside localhost, this
    host's own name and its addresses. A request without a key for another name is refused."""
    max_connections: int | None = Field(default=None, gt=0)
    """Number of HTTP connections at a time; each further one ends the longest idle one. None: the limit of
    the process's descriptors, at most 4096."""
    image_formats: str = "JPEG, PNG, WEBP, GIF, BMP"
    """Image formats that are decoded, by Pillow's names."""
    tenant_part: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the store that one tenant's HTTP requests may fill, and all requests without a tenant
    together."""
    max_items: int = Field(default=64, gt=0)
    """Largest number of media in one HTTP request."""
    remembered_files: int = Field(default=32_768, ge=0)
    """Number of decoded files whose content is known again by their bytes, so that a repeated file with a
    cached embedding is not decoded; each takes about 400 bytes. 0: every file is decoded."""
    max_waiting: int = Field(default=256, gt=0)
    """Number of items in the queue beyond which the service answers 503."""
    sglang: bool = False
    """The HTTP port also serves SGLang's `--language-only` servers."""
    receivers: str = ""
    """Networks ("10.1.0.0/16, fd00::/8") of SGLang servers that receive embeddings which another host asked
    for. A server that asks for itself needs no entry."""
    allow_hosts: tuple[str, ...] = ("*",)
    """Hosts ("images.example.org, *.cdn.example.org") whose http(s) URLs are fetched; "*": every host. Empty:
    no URL is fetched. An address that is private, loopback, link-local or a cloud's own is fetched from only
    if `allow_networks` has it, whatever name leads there."""
    allow_networks: str = ""
    """Networks ("10.2.0.0/16") that are not public and from which those hosts' URLs are fetched."""
    allow_ports: str = "80, 443"
    """Ports from which URLs are fetched."""
    fetch_deadline_s: float = Field(default=5.0, gt=0)
    """Longest time for one URL, redirects included, from the moment at which its fetch begins."""
    max_fetches: int = Field(default=64, gt=0)
    """Number of URLs that are fetched at a time; each class of service has its share of them. Further fetches
    wait, at most `max_waiting`; then the service answers 503."""

    @field_validator("urls", "engine_urls", "allow_hosts", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return comma_separated(value)

    @field_validator("engine_urls")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for url in value:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname or (parts.port or 1) > 65535:
                raise ValueError(f'{url!r} is no http URL: write "http://host:8750"')
        if len(_weighted(value)) < len(value):
            raise ValueError("a service is named twice: name each once")
        return value

    def engine_weights(self) -> dict[str, float]:
        """`engine_urls`, read: URL -> weight."""
        return _weighted(self.engine_urls)

    @field_validator("image_formats")
    @classmethod
    def _known(cls, value: str) -> str:
        known = {name.upper() for name in _IMAGE_FORMATS}
        wrong = [name for name in _words(value) if name.upper() not in known]
        if wrong or not _words(value):
            raise ValueError(f"{', '.join(wrong) or 'none'}: known are {', '.join(_IMAGE_FORMATS)}")
        return value

    def formats(self) -> tuple[str, ...]:
        """`image_formats`, read."""
        return tuple(name.upper() for name in _words(self.image_formats))

    @field_validator("receivers")
    @classmethod
    def _readable(cls, value: str) -> str:
        _networks(value)
        return value

    def networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """`receivers`, read."""
        return _networks(self.receivers)


def _weighted(urls: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for url in urls:
        address, hash_sign, said = url.partition("#")
        try:
            weight = float(said) if hash_sign else 1.0
        except ValueError:
            weight = math.nan
        if not 0 < weight < math.inf:
            raise ValueError(f'{url!r} has no weight above 0 behind the "#": write "http://host:8750#2"')
        found[address.rstrip("/")] = weight
    return found


def _networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    return tuple(map(ip_network, _words(text)))


def _words(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


class EngineConfig(Section):
    """One engine's use of both."""

    app: str = Field(default="default", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")
    """The name of the app that this engine serves: a label of metrics and of bytes in the store."""
    page_tokens: int = Field(default=64, ge=16, le=1024, multiple_of=16)
    """Tokens of one KV page. Engines that share must agree. Beside recurrent states it is vLLM's block size
    instead."""
    share_kv: bool = True
    """The engine loads and saves KV pages."""
    save: Literal["always", "second", "never"] = "second"
    """KV pages that the engine copies to the store. "always": each page that it computes; "second": a page
    that a second request has, on this engine or (vLLM) on another one of the store, and while the engine is
    idle also others for which the store has free room; "never": none."""
    max_open_saves_bytes: ByteSize = Field(default=1 << 30, gt=0)
    """Bytes of pages on their way to the store. Further pages are not saved, so that the end of a request
    never waits for a slow store or mover."""
    share_embeddings: bool = True
    """The engine loads and saves embeddings, and asks the encoder service."""
    prefill_while_encoding: bool = True
    """vLLM prefills the tokens before the first medium whose embedding is on its way. Without effect beside a
    draft model, an encoder cache manager of yours (`--ec-manager-config`), states in aligned blocks, pruned
    videos, and without chunked prefill."""
    sglang_preprocessing: Literal["auto", "cpu", "device"] = "auto"
    """Place where a GPU server of SGLang decodes and resizes images. "cpu": as vLLM and the encoder service,
    which then share them. "device": SGLang's own, the GPU; its servers share among themselves only. "auto":
    "cpu" where an encoder service answers at `encoder.socket`, or `encoder.engine_urls`, when the server
    starts, else "device"."""
    trust_weight_version: bool = False
    """The trainer that replaces this engine's weights names each state of them: by a `weight_version` that no
    other state of weights of this checkpoint's tensors ever has, in this training run and in all others, and
    with an update that holds every tensor that any update before it changed. The engine then shares after
    such an update, with the engines that began with the same checkpoint and were given the same version.
    Trainers that count from 1 in each run break this rule, unless each run has a store of its own."""
    tower: Literal["engine", "service"] = "engine"
    """The place of the vision tower of a vLLM server. "service": the server loads no tower; the services at
    `encoder.engine_urls` fetch, decode and encode the images of its requests, which get a 503 while none of
    them answers (`encoder.language_only_timeout_s`)."""
    images_per_prompt: int | None = Field(default=None, ge=0)
    """Largest number of images in a prompt of a server without a tower. vLLM's `--limit-mm-per-prompt` sets
    it; None: no limit."""
    embeddings_by_value: bool = False
    """The engine takes the rows of an embedding from a request. vLLM's `--enable-mm-embeds` sets it."""


class Config(Section):
    """Everything. Frozen; make another with `load`."""

    store: StoreConfig = Field(default_factory=StoreConfig)
    encoder: EncoderConfig = Field(default_factory=EncoderConfig)
    engine: EngineConfig = Field(default_factory=EngineConfig)
    qos: QosConfig = Field(default_factory=QosConfig)


_SECTIONS: Final[Mapping[str, type[Section]]] = {
    "store": StoreConfig, "encoder": EncoderConfig, "engine": EngineConfig, "qos": QosConfig,
}  # fmt: skip
_PATHS: Final[Mapping[str, frozenset[str]]] = {
    section: frozenset(
        name
        for name, field in kind.model_fields.items()
        if Path in (field.annotation, *get_args(field.annotation))
        and get_origin(field.annotation) is not tuple
    )
    for section, kind in _SECTIONS.items()
}
"""Section -> its settings that are one path."""


def load(overrides: Mapping[str, Any] | None = None, *, environ: Mapping[str, str] = os.environ) -> Config:
    """Merge defaults, file, environment and `overrides` ({"section.field": value}).

    Raises ConfigError that names the field, its place and the accepted values.
    """
    values: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    path = environ.get("CORNPLUG_CONFIG")
    if path:
        for section, fields in _read_toml(Path(path)).items():
            if section not in values or not isinstance(fields, dict):
                raise ConfigError(
                    f"{path}: [{section}]", "unknown section", f"Sections: {', '.join(values)}."
                )
            values[section].update(_absolute(section, fields, Path(path).parent))
    for name, text in environ.items():
        section, field = _setting_of(name)
        if section in values:
            values[section].update(_absolute(section, {field: text}))
    for dotted, value in (overrides or {}).items():
        section, _, field = dotted.partition(".")
        if section not in values:
            raise ConfigError(dotted, "unknown section", f"Sections: {', '.join(values)}.")
        values[section].update(_absolute(section, {field: value}))
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


def portable(config: Config) -> dict[str, Any]:
    """Settings as {"section.field": value} of plain JSON, for a process with another environment or folder.

    `load_portable` makes equal settings of them there. [qos] and the encoder service's key are left out: no
    process reads them that an engine starts.
    """
    sections = config.model_dump(mode="json", exclude={"qos": True, "encoder": {"admin_key"}})
    return {
        f"{section}.{field}": str(value) if isinstance(value, Path) else value
        for section, fields in sections.items()
        for field, value in _absolute(section, fields).items()
    }


def load_portable(values: Mapping[str, Any]) -> Config:
    """The settings that `portable` was given; of other values, those of `load`.

    Raises ConfigError as `load`.
    """
    complete = {f"{s}.{name}" for s, kind in _SECTIONS.items() if s != "qos" for name in kind.model_fields}
    # Complete settings owe nothing to this process's file and environment, which may be another engine's.
    is_complete = values.keys() >= complete - {"encoder.admin_key"}
    return load(values, environ={}) if is_complete else load(values)


def _setting_of(variable: str) -> tuple[str, str]:
    """Section and field that an environment variable names; two empty strings where it is no setting's."""
    section, _, field = variable.removeprefix("CORNPLUG_").lower().partition("_")
    return (section, field) if variable.startswith("CORNPLUG_") and field else ("", "")


def _absolute(section: str, fields: Mapping[str, Any], folder: Path = Path()) -> dict[str, Any]:
    """The fields of a section, with relative paths made absolute from `folder`."""
    paths = _PATHS[section]
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
        raise ConfigError("CORNPLUG_CONFIG", f"{path} is no TOML: {e}", "Correct that line.") from e
