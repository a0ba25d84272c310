"""`cornplug replay TRACE --store SIZE`: compare the savings of a store of this size with known policies."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from cornplug import config
from cornplug.errors import ConfigError
from cornplug.replay.reference_policies import REFERENCES, OfflineOptimum, offline_optimum
from cornplug.replay.scores import ReplayScore, StoreReplay, replay
from cornplug.replay.trace_readers import FORMATS, TokenCost, TraceRequest, distinct_bytes, read_trace
from cornplug.settings import bytes_of

STORE: Final = "cornplug"
_GIB: Final = 1 << 30
_WIDTH: Final = 120
"""Minimum width of the output, so that tables in files are not wrapped."""


def main(argv: list[str]) -> int:
    """Print a table for each size and return 0. Raises ConfigError for an invalid trace or size."""
    options = _parser().parse_args(argv)
    cost = TokenCost(kv_bytes=options.token_bytes, prefill_s=options.token_us / 1e6)
    requests = read_trace(options.trace, cost, options.format)[: options.requests]
    if not requests:
        raise ConfigError(str(options.trace), "has no requests", "Use a trace with requests.")
    sizes = [_size(text, requests) for text in options.store.split(",")]
    console = Console(highlight=False)
    console.width = max(console.width, _WIDTH)
    console.print(_summary(options.trace, requests))
    curves: dict[str, list[float]] = {}
    for size_bytes in sizes:
        scores = _scores(requests, size_bytes)
        optimum = offline_optimum([access for request in requests for access in request.accesses], size_bytes)
        console.print(_table(size_bytes, scores, optimum))
        if len(scores[STORE].by_app) > 1:
            console.print(_app_table(scores))
        for name, score in scores.items():
            curves.setdefault(name, []).append(score.total.saved_s)
        curves.setdefault(optimum.name, []).append(optimum.saved_s)
    if options.plot is not None:
        _plot(options.plot, sizes, curves)
        console.print(f"wrote {options.plot}")
    return 0


def _parser() -> argparse.ArgumentParser:
    defaults = TokenCost()
    parser = argparse.ArgumentParser(
        prog="cornplug replay",
        description="Simulate the store with a recorded trace, and compare it with LRU, FIFO, SIEVE, GDSF "
        "and the offline optimum. Namespaces are read from the file named by CORNPLUG_CONFIG.",
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
    """Parse a size in bytes, or as a percentage of the distinct bytes in the trace."""
    percent = text.strip().endswith("%")
    try:
        found = float(text.strip()[:-1]) / 100 if percent else bytes_of(text)
    except ValueError:
        found = 0
    if found <= 0 or (percent and found > 1):
        raise ConfigError("--store", f"{text!r} is not a size", "Use a size like 64GiB or 10%.")
    return max(64, int(distinct_bytes(requests) * found)) if percent else int(found)


def _scores(requests: Sequence[TraceRequest], size_bytes: int) -> dict[str, ReplayScore]:
    namespaces = config.load().store.namespaces
    scores = {STORE: replay(requests, StoreReplay(size_bytes, namespaces))}
    return scores | {name: replay(requests, cache(size_bytes)) for name, cache in REFERENCES.items()}


def _summary(path: Path, requests: Sequence[TraceRequest]) -> str:
    accesses = sum(len(request.accesses) for request in requests)
    return (
        f"{path}: {len(requests):,} requests, {accesses:,} accesses, "
        f"{distinct_bytes(requests) / _GIB:,.2f} GiB of distinct entries, "
        f"{sum(a.cost_s for r in requests for a in r.accesses):,.1f} s to compute every access"
    )


def _table(size_bytes: int, scores: dict[str, ReplayScore], optimum: OfflineOptimum) -> Table:
    table = Table(title=f"store of {size_bytes / _GIB:,.2f} GiB", title_justify="left")
    for head in ("policy", "hits", "hits by bytes", "saved s", "saved of all", "of optimum"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for name, score in scores.items():
        total = score.total
        table.add_row(
            name,
            f"{total.hit_rate:.2%}",
            f"{total.byte_hit_rate:.2%}",
            f"{total.saved_s:,.2f}",
            f"{total.saved_s / max(total.cost_s, 1e-12):.2%}",
            f"{total.saved_s / max(optimum.saved_s, 1e-12):.2f}",
        )
    whole = scores[STORE].total
    table.add_row(
        optimum.name,
        f"{optimum.hits / max(1, whole.accesses):.2%}",
        "",
        f"{optimum.saved_s:,.2f}",
        f"{optimum.saved_s / max(whole.cost_s, 1e-12):.2%}",
        "1.00",
    )
    return table


def _app_table(scores: dict[str, ReplayScore]) -> Table:
    table = Table(title="by app", title_justify="left")
    for head in ("app", "accesses", *(f"{name}: hits, saved s" for name in (STORE, "LRU"))):
        table.add_column(head, justify="left" if head == "app" else "right")
    for app in sorted(scores[STORE].by_app):
        cells = [
            f"{one.hit_rate:.2%}, {one.saved_s:,.2f}"
            for one in (scores[name].by_app[app] for name in (STORE, "LRU"))
        ]
        table.add_row(app, f"{scores[STORE].by_app[app].accesses:,}", *cells)
    return table


def _plot(path: Path, sizes: Sequence[int], curves: dict[str, list[float]]) -> None:
    from matplotlib.figure import Figure  # an optional dependency, not needed for the table

    order = sorted(range(len(sizes)), key=lambda i: sizes[i])
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, saved in curves.items():
        line = "--" if name.startswith("optimum") else "-"
        gib = [sizes[i] / _GIB for i in order]
        axes.plot(gib, [saved[i] for i in order], marker="o", label=name, linestyle=line)
    axes.set_xlabel("store, GiB")
    axes.set_ylabel("recomputation saved, s")
    axes.set_ylim(bottom=0)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as e:
        raise ConfigError("--plot", str(e), "Use a .png or .svg file in a writable folder.") from e
