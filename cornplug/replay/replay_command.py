"""Command `cornplug replay TRACE --store SIZE`, which predicts the hits and savings of a store of this size
from a recorded trace."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from cornplug import config
from cornplug.errors import ConfigError
from cornplug.replay.scores import ReplayScore, StoreReplay, replay
from cornplug.replay.trace_readers import FORMATS, TokenCost, TraceRequest, distinct_bytes, read_trace
from cornplug.settings import bytes_of

_GIB: Final = 1 << 30
_WIDTH: Final = 120
"""Minimum width of the output in columns, so that tables that are written to files are not wrapped."""


def main(argv: list[str]) -> int:
    """Replay the trace, print a table of the results for all sizes, and return 0.

    Raises ConfigError if the trace or a size is invalid.
    """
    options = _parser().parse_args(argv)
    cost = TokenCost(kv_bytes=options.token_bytes, prefill_s=options.token_us / 1e6)
    requests = read_trace(options.trace, cost, options.format)[: options.requests]
    if not requests:
        raise ConfigError(str(options.trace), "has no requests", "Use a trace with requests.")
    sizes = [_size(text, requests) for text in options.store.split(",")]
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(_summary(options.trace, requests))
    namespaces = config.load().store.namespaces
    scores = {size: replay(requests, StoreReplay(size, namespaces)) for size in sizes}
    console.print(_table(scores))
    if options.plot is not None:
        _plot(options.plot, scores)
        console.print(f"wrote {options.plot}")
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = TokenCost()
    parser = argparse.ArgumentParser(
        prog="cornplug replay",
        description="Simulate stores of one or more sizes with a recorded trace, and print their hits and "
        "savings. Namespaces are read from the file named by CORNPLUG_CONFIG.",
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
        help="sizes of the store, for example 64GiB, or 10%% of the bytes of all entries in the trace",
    )
    parser.add_argument("--format", choices=FORMATS, help="format of the trace (default: detected)")
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


def _size(text: str, requests: Sequence[TraceRequest]) -> int:
    """Return a size in bytes, from text that is a size or a percentage of the distinct bytes in the trace."""
    percent = text.strip().endswith("%")
    try:
        found = float(text.strip()[:-1]) / 100 if percent else bytes_of(text)
    except ValueError:
        found = 0
    if found <= 0 or (percent and found > 1):
        raise ConfigError("--store", f"{text!r} is not a size", "Use a size like 64GiB or 10%.")
    return max(64, int(distinct_bytes(requests) * found)) if percent else int(found)


def _summary(path: Path, requests: Sequence[TraceRequest]) -> str:
    accesses = sum(len(request.accesses) for request in requests)
    return (
        f"{path}: {len(requests):,} requests, {accesses:,} accesses, "
        f"{distinct_bytes(requests) / _GIB:,.2f} GiB of distinct entries, "
        f"{sum(a.cost_s for r in requests for a in r.accesses):,.1f} s to compute every access"
    )


def _table(scores: Mapping[int, ReplayScore]) -> Table:
    """Return a table with a row for each size. If the trace has several apps, each size is followed by a row
    for each app."""
    table = Table()
    for head in ("store", "app", "accesses", "hits", "hits by bytes", "saved s", "saved of all"):
        table.add_column(head, justify="left" if head == "app" else "right")
    for size_bytes, score in scores.items():
        apps = sorted(score.by_app.items()) if len(score.by_app) > 1 else []
        for app, counts in (("", score.total), *apps):
            table.add_row(
                "" if app else f"{size_bytes / _GIB:,.2f} GiB",
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
    axes.plot([size / _GIB for size in sizes], [scores[size].total.saved_s for size in sizes], marker="o")
    axes.set_xlabel("store, GiB")
    axes.set_ylabel("recomputation saved, s")
    axes.set_ylim(bottom=0)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise ConfigError("--plot", str(e), "Use a .png or .svg file in a writable folder.") from e
