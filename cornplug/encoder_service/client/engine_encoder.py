"""Client that engines use for the encoder service on this host, or for services on other hosts."""

from __future__ import annotations

import importlib.util
from concurrent.futures import Future
from typing import Protocol

from cornplug.config import Config
from cornplug.encoder_service.client.unix_client import SocketEncoder
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest, ServedModel
from cornplug.errors import ConfigError, EncoderError
from cornplug.private_paths import is_default_secret


class EngineEncoder(Protocol):
    """Common interface of `SocketEncoder` and `RemoteEncoder`. Their docstrings are the contract."""

    def submit(self, request: EncodeRequest) -> Future[EncodeReply]: ...

    def describe(self, deadline_s: float) -> tuple[ServedModel, ...]: ...

    @property
    def connected(self) -> bool: ...

    @property
    def refusal(self) -> EncoderError | None: ...

    def close(self) -> None: ...


def check_remote(config: Config) -> None:
    """Check that engines can use `encoder.engine_urls`, if that is set.

    Raises ConfigError if the package that seals requests is missing, or if the secret exists only on this
    host.
    """
    if not config.encoder.engine_urls:
        return
    if is_default_secret(config.store.secret_file):
        raise ConfigError(
            "store.secret_file",
            "this host has its own secret, but this engine and an encoder service on another host must have "
            "the same secret",
            "Copy one file of 32 bytes to both hosts, and set CORNPLUG_STORE_SECRET_FILE to its path.",
        )
    if importlib.util.find_spec("cryptography") is None:
        raise ConfigError(
            "encoder.engine_urls",
            "requests to other hosts are sealed, but the package cryptography is missing",
            "Run: pip install 'cornplug[remote]'",
        )


def engine_encoder(config: Config, secret: bytes) -> EngineEncoder:
    """Return a client for the services at `encoder.engine_urls`, or else for the service at `encoder.socket`.

    Raises the same errors as `check_remote`.
    """
    if not config.encoder.engine_urls:
        return SocketEncoder(config.encoder.socket, secret)
    check_remote(config)
    # Import httpx only if it is used.
    from cornplug.encoder_service.client.remote_client import RemoteEncoder

    return RemoteEncoder(config.encoder.engine_weights(), secret)
