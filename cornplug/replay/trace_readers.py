"""Readers of request traces in four formats.

    cornplug     JSONL that a running store writes (`store.access_log`): `cornplug/store/daemon/access_log.py`
    mooncake     JSONL {"timestamp": ms, "input_length", "output_length", "hash_ids"}, blocks of 512 tokens
                 (kvcache-ai/Mooncake, FAST25-release/traces)
    qwen         JSONL {"chat_id", "parent_chat_id", "timestamp": s, "type", "turn", "hash_ids"}, blocks of 16
                 tokens (alibaba-edu/qwen-bailian-usagetraces-anon); the type is the app
    oracle       libCacheSim's oracleGeneral: little-endian u32 time, u64 object, u32 size, i64 next access

A trace may be compressed with gzip. The blocks of mooncake and qwen have neither sizes nor costs, so these
are computed with `TokenCost`.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

import msgspec

from cornplug.errors import ConfigError
from cornplug.store.daemon.access_log import LoggedCall

FORMATS: Final = ("cornplug", "mooncake", "qwen", "oracle")
MOONCAKE_TOKENS: Final = 512
QWEN_TOKENS: Final = 16
_ORACLE: Final = struct.Struct("<IQIq")
_KEY_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TraceAccess:
    """Access of a request to one entry."""

    key: int
    """Number below 2**64 that identifies the entry."""
    size_bytes: int
    cost_s: float
    """Seconds to recompute the entry."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request with its accesses. It looks up each entry, and writes the entry if it is missing."""

    time_s: float
    app: str
    accesses: tuple[TraceAccess, ...]
    is_prefix: bool
    """Whether each entry continues the previous entry, as KV pages do. An entry then saves nothing unless all
    previous entries are present."""


def distinct_bytes(requests: Iterable[TraceRequest]) -> int:
    """Return the sum of the sizes of all distinct entries of a trace, in bytes."""
    return sum({access.key: access.size_bytes for one in requests for access in one.accesses}.values())


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Size and cost of KV. The defaults are for Llama-3.1-8B in bfloat16, with 0.6 ms of prefill per MiB."""

    kv_bytes: int = 131072
    prefill_s: float = 75e-6
    seconds_per_byte: float = 0.6e-3 / (1 << 20)
    """Seconds to recompute a byte of an entry, for traces that contain neither costs nor tokens."""


class _Blocks(msgspec.Struct):
    timestamp: float
    hash_ids: list[int]
    type: str = "default"


def read_trace(path: Path, cost: TokenCost, format_name: str | None = None) -> list[TraceRequest]:
    """Return the requests of a trace in order.

    `cost` applies to entries for which the trace contains no size or cost. Without `format_name`, the format
    is detected from the beginning of the file. Raises ConfigError with the invalid line and the remedy.
    """
    try:
        with _open(path) as file:
            head = file.read(4096)
    except (OSError, EOFError) as e:
        raise ConfigError(str(path), f"cannot be read: {e}", "Pass the path of a readable trace.") from e
    name = format_name or _guess(head)
    if name == "oracle":
        return list(_oracle(path, cost))
    read = {"cornplug": _cornplug, "mooncake": _mooncake, "qwen": _qwen}[name]
    return list(_lines(path, lambda line: read(line, cost)))


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _guess(head: bytes) -> str:
    first = head.split(b"\n", 1)[0]
    if not first.startswith(b"{"):
        return "oracle"
    if b'"op"' in first:
        return "cornplug"
    return "qwen" if b'"chat_id"' in first else "mooncake"


def _lines(path: Path, read: Callable[[bytes], TraceRequest]) -> Iterator[TraceRequest]:
    with _open(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield read(line)
            except (msgspec.MsgspecError, ValueError) as e:
                raise ConfigError(
                    f"{path}:{number}", f"not a valid trace line: {e}", "Set the format with --format."
                ) from e


def _mooncake(line: bytes, cost: TokenCost) -> TraceRequest:
    one = msgspec.json.decode(line, type=_Blocks)
    return _request(one.timestamp / 1000, "default", one.hash_ids, MOONCAKE_TOKENS, cost)


def _qwen(line: bytes, cost: TokenCost) -> TraceRequest:
    one = msgspec.json.decode(line, type=_Blocks)
    return _request(one.timestamp, one.type, one.hash_ids, QWEN_TOKENS, cost)


def _request(
    time_s: float, app: str, hash_ids: list[int], block_tokens: int, cost: TokenCost
) -> TraceRequest:
    size, seconds = block_tokens * cost.kv_bytes, block_tokens * cost.prefill_s
    # A block may occur twice in a request (the digest of padding), but is one entry in the store.
    keys = dict.fromkeys(each & _KEY_MASK for each in hash_ids)
    return TraceRequest(time_s, app, tuple(TraceAccess(key, size, seconds) for key in keys), is_prefix=True)


def _cornplug(line: bytes, cost: TokenCost) -> TraceRequest:
    call = msgspec.json.decode(line, type=LoggedCall)
    accesses = tuple(
        TraceAccess(
            int(each.tag, 16), each.size_bytes, each.cost_s or each.size_bytes * cost.seconds_per_byte
        )
        for each in call.entries
    )
    # A line contains only entries that were present or were written, so a missing prefix cannot be detected.
    return TraceRequest(call.t, call.app, accesses, is_prefix=False)


def _oracle(path: Path, cost: TokenCost) -> Iterator[TraceRequest]:
    with _open(path) as file:
        data = file.read()
    if len(data) % _ORACLE.size:
        raise ConfigError(
            str(path),
            f"{len(data)} bytes are not a whole number of {_ORACLE.size}-byte records",
            "Decompress it (zstd -d), or set its format with --format.",
        )
    for time_s, key, size, _ in _ORACLE.iter_unpack(data):
        access = TraceAccess(key, size, size * cost.seconds_per_byte)
        yield TraceRequest(float(time_s), "default", (access,), is_prefix=False)
