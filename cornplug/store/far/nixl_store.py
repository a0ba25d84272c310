"""`nixl://`: a far store in the memory of several hosts, which transfer records with NIXL.

nixl_client.py ──> nixl_client.py of the other hosts
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, Field

from cornplug.errors import ConfigError
from cornplug.store.disk.record_format import derive_key
from cornplug.store.far.client_process import ProcessFarStore
from cornplug.store.far.nixl_client import MAX_RECORD_BYTES, MemberSettings
from cornplug.store.far.open_far import label_of, parse_query

_SETTING: Final = "store.far"
_PORT: Final = 8760
_KEY_DOMAIN: Final = b"cornplug nixl members 1"
_MEMBER: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:/+\s]+)(?::(?P<port>\d{1,5}))?")


class _NixlOptions(BaseModel, extra="forbid"):
    """Options in the query of a URL."""

    segment: ByteSize = Field(default=ByteSize(1 << 30), ge=2 * MAX_RECORD_BYTES)
    own: str = ""


def open_nixl_url(url: str, secret: bytes) -> ProcessFarStore:
    """Open nixl://MEMBER+MEMBER...[?segment=SIZE&own=MEMBER] with MEMBER = HOST[:PORT]. A process is started
    and connects in the background. Raises ConfigError if the URL is invalid, and ImportError without nixl."""
    parts = urlsplit(url)
    try:
        if parts.path.strip("/") or not parts.netloc:
            raise ValueError("it must contain hosts and no path")
        members = [_parse_member(text) for text in parts.netloc.split("+")]
        if len(set(members)) < max(2, len(members)):
            raise ValueError("it needs at least two different hosts")
        options = parse_query(url, _NixlOptions)
        own = _own_index(options.own, members)
    except ValueError as e:
        raise ConfigError(
            _SETTING, f"{label_of(url)!r}: {e}",
            f"Use the same URL, such as nixl://10.0.0.5:{_PORT}+10.0.0.6:{_PORT}?segment=1GiB, on all hosts. "
            "If cornplug cannot detect which of the addresses belongs to a host, add own=10.0.0.5:8760 on "
            "that host.",
        ) from e  # fmt: skip
    if importlib.util.find_spec("nixl") is None:
        # Only the process imports the package, but a missing package should be reported before it starts.
        raise ImportError("nixl")
    key = derive_key(secret, salt=None, info=_KEY_DOMAIN)
    settings = MemberSettings(members, own, int(options.segment), key)
    return ProcessFarStore(
        "cornplug.store.far.nixl_client", settings, max_bytes=MAX_RECORD_BYTES,
        variables={"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"},
    )  # fmt: skip


def _own_index(text: str, members: Sequence[tuple[str, int]]) -> int:
    """Return the index of a member, or -1 if `text` is empty."""
    if not text:
        return -1
    if (member := _parse_member(text)) not in members:
        raise ValueError(f"'own': {text!r} is not one of the hosts")
    return members.index(member)


def _parse_member(text: str) -> tuple[str, int]:
    found = _MEMBER.fullmatch(text)
    port = int(found["port"] or _PORT) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise ValueError(f"{text!r} is not HOST:PORT")
    return found["host"].strip("[]"), port
