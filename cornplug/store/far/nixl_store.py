"""`nixl://`: hosts that give each other memory for records, and move them by NIXL; no other service.

nixl_client.py ──> nixl_client.py of the other hosts
"""

from __future__ import annotations

import importlib.util
import re
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel, ByteSize, Field, ValidationError

from cornplug.errors import ConfigError
from cornplug.store.disk.record_seal import derive_key
from cornplug.store.far.client_process import ProcessFarStore
from cornplug.store.far.far_store import label_of
from cornplug.store.far.nixl_client import MOST_BYTES, MemberSettings

_SETTING: Final = "store.far"
_PORT: Final = 8760
_KEY_DOMAIN: Final = b"cornplug nixl members 1"
_MEMBER: Final = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\[\]:/+\s]+)(?::(?P<port>\d{1,5}))?")


class _Fields(BaseModel, extra="forbid"):
    """The query of a URL."""

    segment: ByteSize = Field(default=ByteSize(1 << 30), ge=2 * MOST_BYTES)
    own: str = ""


def open_nixl_url(url: str, secret: bytes) -> ProcessFarStore:
    """The store of nixl://MEMBER+MEMBER...[?segment=SIZE&own=MEMBER], a member being HOST[:PORT]. Its process
    begins to connect. Raises ConfigError."""
    parts = urlsplit(url)
    try:
        if parts.path.strip("/") or not parts.netloc:
            raise ValueError("it names no members")
        members = [_member(text) for text in parts.netloc.split("+")]
        if len(set(members)) < max(2, len(members)):
            raise ValueError("it names fewer than two members, or one twice")
        options = _Fields.model_validate(dict(parse_qsl(parts.query, strict_parsing=bool(parts.query))))
        if options.own and _member(options.own) not in members:
            raise ValueError(f"'own': {options.own!r} is none of them")
        own = members.index(_member(options.own)) if options.own else -1
    except ValueError as e:
        why = e.errors()[0] if isinstance(e, ValidationError) else None
        problem = f"{why['loc'][0]!r}: {why['msg']}" if why else str(e)
        raise ConfigError(
            _SETTING, f"{label_of(url)!r}: {problem}",
            f"Write it as nixl://10.0.0.5:{_PORT}+10.0.0.6:{_PORT}?segment=1GiB, the same on all hosts; "
            "own=10.0.0.5:8760 names this one where cornplug does not find it.",
        ) from e  # fmt: skip
    if importlib.util.find_spec("nixl") is None:
        # Its process imports it; its absence is known before.
        raise ConfigError(
            _SETTING, f"{label_of(url)!r} needs a package: nixl", "Run: pip install 'cornplug[far-nixl]'"
        )
    key = derive_key(secret, salt=None, info=_KEY_DOMAIN)
    settings = MemberSettings(members, own, int(options.segment), key)
    return ProcessFarStore(
        "cornplug.store.far.nixl_client", settings, most_bytes=MOST_BYTES,
        variables={"NIXL_LOG_LEVEL": "ERROR", "UCX_LOG_LEVEL": "error"},
    )  # fmt: skip


def _member(text: str) -> tuple[str, int]:
    found = _MEMBER.fullmatch(text)
    port = int(found["port"] or _PORT) if found else 0
    if found is None or not 0 < port < 1 << 16:
        raise ValueError(f"{text!r} is no HOST:PORT")
    return found["host"].strip("[]"), port
