"""cornplug: shares embeddings and KV pages between engines, with keys that depend on weights and content.

Clients are imported on first use, because engines import this package in each of their processes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cornplug.encoder_service.client.sync_client import AsyncEncoderClient, EncoderClient

__version__ = "0.2.0"

__all__ = ["AsyncEncoderClient", "EncoderClient", "__version__"]


def __getattr__(name: str) -> object:
    if name in ("AsyncEncoderClient", "EncoderClient"):
        return getattr(import_module("cornplug.encoder_service.client.sync_client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
