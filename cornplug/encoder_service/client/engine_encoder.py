"""The engines' client of the encoder service: this host's, or those of other hosts."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future
from typing import Protocol

from cornplug.config import Config
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.encoder_service.wire.messages import EncodeReply, EncodeRequest, ServedModel
from cornplug.errors import ConfigError, EncoderError
from cornplug.private_paths import is_own_secret


class EngineEncoder(Protocol):
    """What `SocketEncoder` and `RemoteEncoder` have in common; their docstrings are the contract."""

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]: ...

    def describe(self, deadline_s: float) -> tuple[ServedModel, ...]: ...

    @property
    def connected(self) -> bool: ...

    @property
    def refusal(self) -> EncoderError | None: ...

    def close(self) -> None: ...


def check_remote(config: Config) -> None:
    """Raises ConfigError where `encoder.engine_urls` cannot work: no package to seal with, or the default
    secret, which each host makes by chance."""
    if not config.encoder.engine_urls:
        return
    if is_own_secret(config.store.secret_file):
        raise ConfigError(
            "store.secret_file",
            "an encoder service on another host and this engine share one secret, and this host has a secret "
            "of its own",
            "Give both hosts the same file of 32 bytes, and name it: CORNPLUG_STORE_SECRET_FILE.",
        )
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "encoder.engine_urls",
            "requests to other hosts are sealed, and the package cryptography is missing",
            "Run: pip install 'cornplug[remote]'",
        )


def engine_encoder(config: Config, secret: bytes) -> EngineEncoder:
    """The client that the settings name: of `encoder.engine_urls`, else of `encoder.socket`.

    Raises ConfigError as `check_remote`.
    """
    if not config.encoder.engine_urls:
        return SocketEncoder(config.encoder.socket, secret)
    check_remote(config)
    # httpx is imported only where it is used.
    from cornplug.encoder_service.client.remote_client import RemoteEncoder

    return RemoteEncoder(config.encoder.engine_weights(), secret)
