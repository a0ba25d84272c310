"""`cornplug replay TRACE --store SIZE`: predict a store's hits and savings from a recorded trace.

`StoreReplay` is a cache with the store's policy. It uses the same index as a store's daemon, but no memory
for payloads, no sockets and no clock. Traces have one of these formats:

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

import argparse
import gzip
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, Final, Protocol, cast

import msgspec
from rich.console import Console
from rich.table import Table

from cornplug import config
from cornplug.errors import ConfigError
from cornplug.settings import GIB, NamespaceConfig, parse_byte_size
from cornplug.store.base import KEY_BYTES, Reservation, ReserveTerms
from cornplug.store.daemon.access_log import LoggedCall
from cornplug.store.daemon.index import StoreIndex
from cornplug.store.daemon.reservations import ReservationTimes

_WIDTH: Final = 120
"""Minimum width of the output in columns, so that tables that are written to files are not wrapped."""
_OWNER: Final = 1
_BATCH: Final = 64
"""Number of entries that an engine reserves before it commits them, such as the pages of a step."""
_FORMATS: Final = ("cornplug", "mooncake", "qwen", "oracle")
MOONCAKE_TOKENS: Final = 512
QWEN_TOKENS: Final = 16
_ORACLE_RECORD: Final = struct.Struct("<IQIq")
_KEY_MASK: Final = (1 << 64) - 1


def main(argv: list[str]) -> int:
    """Replay the trace, print a table of the results for all sizes, and return 0.

    Raises ConfigError if the trace or a size is invalid.
    """
    options = _build_parser().parse_args(argv)
    cost = TokenCost(kv_bytes=options.token_bytes, prefill_s=options.token_us / 1e6)
    requests = read_trace(options.trace, cost, options.format)[: options.requests]
    if not requests:
        raise ConfigError(str(options.trace), "has no requests", "Use a trace with requests.")
    sizes = [_parse_store_size(text, requests) for text in options.store.split(",")]
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(_format_summary(options.trace, requests))
    namespaces = config.load().store.namespaces
    scores = {size: replay(requests, StoreReplay(size, namespaces)) for size in sizes}
    console.print(_build_table(scores))
    if options.plot is not None:
        _plot(options.plot, scores)
        console.print(f"wrote {options.plot}")
    return 0


def _build_parser() -> argparse.ArgumentParser:
    defaults = TokenCost()
    parser = argparse.ArgumentParser(
        prog="cornplug replay",
        description="Simulate stores with a recorded trace, and print their hits and savings. Namespaces are "
        "read from the file named by CORNPLUG_CONFIG.",
    )
    parser.add_argument(
        "trace",
        type=Path,
        metavar="TRACE",
        help="log of a store (store.access_log), JSONL of Mooncake or Qwen-Bailian, or oracleGeneral of "
        "libCacheSim; can be compressed with gzip",
    )
    parser.add_argument(
        "--store",
        required=True,
        metavar="SIZE[,SIZE...]",
        help="sizes of the store, for example 64GiB, or 10%% of all bytes in the trace",
    )
    parser.add_argument("--format", choices=_FORMATS, help="format of the trace (default: detected)")
    parser.add_argument(
        "--token-bytes",
        type=int,
        default=defaults.kv_bytes,
        help="bytes of KV per token, for formats without sizes (default: %(default)s, for Llama-3.1-8B)",
    )
    parser.add_argument(
        "--token-us",
        type=float,
        default=defaults.prefill_s * 1e6,
        help="microseconds of prefill per token, for formats without costs (default: %(default)s)",
    )
    parser.add_argument("--requests", type=int, help="number of requests to replay (default: all)")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="plot the saved seconds by size, as .png or .svg"
    )
    return parser


def _parse_store_size(text: str, requests: Sequence[TraceRequest]) -> int:
    """Return a size in bytes, from text that is a size or a percentage of the distinct bytes in the trace."""
    percent = text.strip().endswith("%")
    try:
        found = float(text.strip()[:-1]) / 100 if percent else parse_byte_size(text)
    except ValueError:
        found = 0
    if found <= 0 or (percent and found > 1):
        raise ConfigError("--store", f"{text!r} is not a size", "Use a size like 64GiB or 10%.")
    return max(64, int(distinct_bytes(requests) * found)) if percent else int(found)


def _format_summary(path: Path, requests: Sequence[TraceRequest]) -> str:
    accesses = sum(len(request.accesses) for request in requests)
    return (
        f"{path}: {len(requests):,} requests, {accesses:,} accesses, "
        f"{distinct_bytes(requests) / GIB:,.2f} GiB of distinct entries, "
        f"{sum(a.cost_s for r in requests for a in r.accesses):,.1f} s to compute every access"
    )


def _build_table(scores: Mapping[int, ReplayScore]) -> Table:
    """Return a table with a row for each size. If the trace has several apps, each size is followed by a row
    for each app."""
    table = Table()
    for head in ("store", "app", "accesses", "hits", "hits by bytes", "saved s", "saved of all"):
        table.add_column(head, justify="left" if head == "app" else "right")
    for size_bytes, score in scores.items():
        apps = sorted(score.by_app.items()) if len(score.by_app) > 1 else []
        for app, counts in (("", score.total), *apps):
            table.add_row(
                "" if app else f"{size_bytes / GIB:,.2f} GiB",
                app or "all",
                f"{counts.accesses:,}",
                f"{counts.hit_rate:.2%}",
                f"{counts.byte_hit_rate:.2%}",
                f"{counts.saved_s:,.2f}",
                f"{counts.saved_s / max(counts.cost_s, 1e-12):.2%}",
            )
    return table


def _plot(path: Path, scores: Mapping[int, ReplayScore]) -> None:
    from matplotlib.figure import Figure  # an optional dependency, not needed for the table

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    sizes = sorted(scores)
    axes.plot([size / GIB for size in sizes], [scores[size].total.saved_s for size in sizes], marker="o")
    axes.set_xlabel("store, GiB")
    axes.set_ylabel("recomputation saved, s")
    axes.set_ylim(bottom=0)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise ConfigError("--plot", str(e), "Use a .png or .svg file in a writable folder.") from e


class StoreReplay:
    """Cache with the store's policy. For each request, it leases the present entries, then reserves and
    commits the missing entries, as an engine would do.
    """

    def __init__(self, capacity_bytes: int, namespaces: Mapping[str, NamespaceConfig] | None = None) -> None:
        self._index = StoreIndex(
            bytes(16), capacity_bytes, times=ReservationTimes(0.0), grow=lambda missing: missing,
            namespaces=namespaces,
        )  # fmt: skip

    def serve(self, request: TraceRequest) -> list[bool]:
        """Return whether each access finds its entry, and write the missing entries."""
        keys = [_key_bytes(access) for access in request.accesses]
        mask = self._index.contains(keys)
        there = [key for key, is_there in zip(keys, mask, strict=True) if is_there]
        if request.is_prefix and 0 in mask:
            there = keys[: mask.index(0)]
        if there:
            leases = self._index.lease(_OWNER, there, ttl_s=60.0, now_s=request.time_s)
            self._index.release(_OWNER, sorted(set(leases.tokens)), now_s=request.time_s)
        missing = [access for access, is_there in zip(request.accesses, mask, strict=True) if not is_there]
        for start in range(0, len(missing), _BATCH):
            self._write(request, missing[start : start + _BATCH])
        return [bool(each) for each in mask]

    def _write(self, request: TraceRequest, missing: Sequence[TraceAccess]) -> None:
        reserved: list[Reservation] = []
        for cost_s, some in groupby(missing, key=lambda access: access.cost_s):
            entries = [(_key_bytes(access), access.size_bytes) for access in some]
            terms = ReserveTerms(request.app, cost_s=cost_s)
            results = self._index.reserve(_OWNER, entries, terms, now_s=request.time_s)
            reserved += [result for result in results if isinstance(result, Reservation)]
        # Like the daemon, commit the entries of one message in reverse order.
        for one in reversed(reserved):
            self._index.commit(_OWNER, one.token, b"")


def _key_bytes(access: TraceAccess) -> bytes:
    return access.key.to_bytes(KEY_BYTES)


class ReplayedCache(Protocol):
    """Cache for which a trace can be replayed."""

    def serve(self, request: TraceRequest) -> Sequence[bool]:
        """Return whether each access finds its entry, and write the missing entries."""


@dataclass(slots=True)
class AccessCounts:
    """Sums over a set of accesses. If an earlier entry of a prefix is missing, a hit still counts as a hit,
    but saves no time.
    """

    accesses: int = 0
    hits: int = 0
    size_bytes: int = 0
    hit_bytes: int = 0
    cost_s: float = 0.0
    saved_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.accesses)

    @property
    def byte_hit_rate(self) -> float:
        return self.hit_bytes / max(1, self.size_bytes)


@dataclass(slots=True)
class ReplayScore:
    """Result of replaying a trace with one cache."""

    total: AccessCounts = field(default_factory=AccessCounts)
    by_app: dict[str, AccessCounts] = field(default_factory=lambda: defaultdict(AccessCounts))


def replay(requests: Sequence[TraceRequest], cache: ReplayedCache) -> ReplayScore:
    """Replay the requests with `cache`, which should be empty, and return its score."""
    score = ReplayScore()
    for request in requests:
        found = cache.serve(request)
        counts, of_app = score.total, score.by_app[request.app]
        is_useful = True
        for access, hit in zip(request.accesses, found, strict=True):
            is_useful = hit and (is_useful or not request.is_prefix)
            for each in (counts, of_app):
                each.accesses += 1
                each.hits += hit
                each.size_bytes += access.size_bytes
                each.hit_bytes += access.size_bytes * hit
                each.cost_s += access.cost_s
                each.saved_s += access.cost_s * is_useful
    return score


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


class _BlockLine(msgspec.Struct):
    timestamp: float
    hash_ids: list[int]
    type: str = "default"


def read_trace(path: Path, cost: TokenCost, format_name: str | None = None) -> list[TraceRequest]:
    """Return the requests of a trace in order.

    `cost` applies to entries for which the trace contains no size or cost. Without `format_name`, the format
    is detected from the beginning of the file. Raises ConfigError with the invalid line and the remedy.
    """
    try:
        with _open_trace(path) as file:
            head = file.read(4096)
    except (OSError, EOFError) as e:
        raise ConfigError(str(path), f"cannot be read: {e}", "Pass the path of a readable trace.") from e
    name = format_name or _detect_format(head)
    if name == "oracle":
        return list(_read_oracle(path, cost))
    read = {"cornplug": _parse_cornplug, "mooncake": _parse_mooncake, "qwen": _parse_qwen}[name]
    return list(_parse_lines(path, lambda line: read(line, cost)))


def _open_trace(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _detect_format(head: bytes) -> str:
    first = head.split(b"\n", 1)[0]
    if not first.startswith(b"{"):
        return "oracle"
    if b'"op"' in first:
        return "cornplug"
    return "qwen" if b'"chat_id"' in first else "mooncake"


def _parse_lines(path: Path, parse: Callable[[bytes], TraceRequest]) -> Iterator[TraceRequest]:
    with _open_trace(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                yield parse(line)
            except (msgspec.MsgspecError, ValueError) as e:
                raise ConfigError(
                    f"{path}:{number}", f"not a valid trace line: {e}", "Set the format with --format."
                ) from e


def _parse_mooncake(line: bytes, cost: TokenCost) -> TraceRequest:
    one = msgspec.json.decode(line, type=_BlockLine)
    return _block_request(one.timestamp / 1000, "default", one.hash_ids, MOONCAKE_TOKENS, cost)


def _parse_qwen(line: bytes, cost: TokenCost) -> TraceRequest:
    one = msgspec.json.decode(line, type=_BlockLine)
    return _block_request(one.timestamp, one.type, one.hash_ids, QWEN_TOKENS, cost)


def _block_request(
    time_s: float, app: str, hash_ids: list[int], block_tokens: int, cost: TokenCost
) -> TraceRequest:
    size, seconds = block_tokens * cost.kv_bytes, block_tokens * cost.prefill_s
    # A block may occur twice in a request (the digest of padding), but the store has only one entry for it.
    keys = dict.fromkeys(each & _KEY_MASK for each in hash_ids)
    return TraceRequest(time_s, app, tuple(TraceAccess(key, size, seconds) for key in keys), is_prefix=True)


def _parse_cornplug(line: bytes, cost: TokenCost) -> TraceRequest:
    call = msgspec.json.decode(line, type=LoggedCall)
    accesses = tuple(
        TraceAccess(
            int(each.tag, 16), each.size_bytes, each.cost_s or each.size_bytes * cost.seconds_per_byte
        )
        for each in call.entries
    )
    # A line lists only entries that were present or were written, so it does not show a missing prefix.
    return TraceRequest(call.t, call.app, accesses, is_prefix=False)


def _read_oracle(path: Path, cost: TokenCost) -> Iterator[TraceRequest]:
    with _open_trace(path) as file:
        data = file.read()
    if len(data) % _ORACLE_RECORD.size:
        raise ConfigError(
            str(path),
            f"{len(data)} bytes are not a whole number of {_ORACLE_RECORD.size}-byte records",
            "Decompress it (zstd -d), or set its format with --format.",
        )
    for time_s, key, size, _ in _ORACLE_RECORD.iter_unpack(data):
        access = TraceAccess(key, size, size * cost.seconds_per_byte)
        yield TraceRequest(float(time_s), "default", (access,), is_prefix=False)
