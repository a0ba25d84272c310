"""`mooncake://`: a far store that keeps records as objects of a Mooncake cluster.

A process with Mooncake's client accesses the cluster:

mooncake_client.py ──> master, and hosts with segments
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

import mooncake  # noqa: F401  # its absence is known before a process starts
from pydantic import BaseModel, ByteSize

from cornplug.errors import ConfigError
from cornplug.store.far.client_process import ProcessFarStore
from cornplug.store.far.mooncake_client import MAX_RECORD_BYTES, ClientSettings
from cornplug.store.far.open_far import label_of, parse_query

_SETTING: Final = "store.far"
_PORT: Final = 50051


class _Options(BaseModel, extra="forbid"):
    """Options in the query of a URL."""

    metadata: str = "P2PHANDSHAKE"
    segment: ByteSize = ByteSize(0)
    device: str = ""
    host: str = ""


def open_mooncake_url(url: str) -> ProcessFarStore:
    """Open mooncake://MASTER[:PORT][?segment=SIZE&device=NAME&host=ADDRESS&metadata=URL]. A process is
    started and connects in the background. Raises ConfigError if the URL is invalid."""
    parts = urlsplit(url)
    try:
        if not parts.hostname or parts.path.strip("/"):
            raise ValueError("it must contain one master and no path")
        master = f"{parts.hostname}:{parts.port or _PORT}"
        options = parse_query(url, _Options)
    except ValueError as e:
        raise ConfigError(
            _SETTING, f"{label_of(url)!r}: {e}",
            f"Use mooncake://master:{_PORT}?segment=512MiB. Other options: device, host, metadata.",
        ) from e  # fmt: skip
    settings = ClientSettings(master, options.metadata, int(options.segment), options.device, options.host)
    return ProcessFarStore(
        "cornplug.store.far.mooncake_client", settings, max_bytes=MAX_RECORD_BYTES,
        variables={"MC_LOG_LEVEL": "ERROR"},  # log only errors, unless the operator sets another level
    )  # fmt: skip
