"""The tables at the demo's end. Knows the ledger, nothing of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from checkpoints import App, fingerprints
from ledger import Ledger, Row
from rich import box
from rich.table import Table
from rich.text import Text

from cornplug.store.stats.store_stats import StoreStat


def models(apps: Sequence[App]) -> Table:
    """Each app's fingerprints; equal ones are marked."""
    table = Table(title="Three checkpoints, by what their results depend on", box=box.SIMPLE)
    for column in ("app", "tower", "projector", "language model"):
        table.add_column(column, no_wrap=True)
    found = {app.name: fingerprints(app) for app in apps}
    for name, parts in found.items():
        cells = []
        for part in ("tower", "projector", "language_model"):
            shared = sum(other[part] == parts[part] for other in found.values()) > 1
            cells.append(Text(parts[part][:12] + (" same" if shared else ""), "green" if shared else ""))
        table.add_row(name, *cells)
    return table


def requests(rows: Sequence[Row]) -> Table:
    """One row a request."""
    table = Table(title="Every request to the engines that share", box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in ("app", "image", "tower run by", "embedding from"):
        table.add_column(column, no_wrap=True)
    for column in ("prompt tokens", "KV reused: own", "KV reused: store", "TTFT ms", "stock TTFT ms"):
        table.add_column(column, justify="right", max_width=9)
    table.add_column("same output as stock", max_width=9)
    act = ""
    for row in rows:
        if row.request.act != act:
            act = row.request.act
            table.add_section()
            table.add_row(Text(act, "bold"))
        table.add_row(
            row.request.app.name,
            row.request.image.name,
            row.tower,
            row.embedding,
            str(row.answer.prompt_tokens),
            str(row.kv_own),
            str(row.kv_store),
            f"{1000 * row.answer.ttft_s:.0f}",
            f"{1000 * row.stock.ttft_s:.0f}",
            Text("yes", "green") if row.same else Text("no", "bold red"),
        )
    return table


def totals(ledger: Ledger, stat: StoreStat) -> Table:
    """Tower passes, bytes by app, seconds saved."""
    table = Table(title="Totals", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold")
    table.add_column()
    exact = "exactly one each" if ledger.passes == ledger.distinct else "NOT one each"
    table.add_row(
        "tower passes", f"{ledger.passes} for {ledger.distinct} distinct images, all apps together: {exact}"
    )
    by_engines = sum(row.engine_passes for row in ledger.rows)
    table.add_row("of them by engines", str(by_engines))
    for app, size in sorted(stat.bytes_by_app.items()):
        table.add_row(f"store bytes of {app}", f"{size:,} ({size / 2**20:.1f} MiB)")
    table.add_row("KV tokens out of the store", str(sum(row.kv_store for row in ledger.rows)))
    stock_s = sum(row.stock.ttft_s for row in ledger.rows)
    share = 100 * ledger.saved_s / stock_s
    table.add_row("seconds saved", f"{ledger.saved_s:.1f} of stock's {stock_s:.1f} ({share:.0f} %)")
    table.add_row("", "sum over the rows above: TTFT of stock minus TTFT here; losses count against it")
    table.add_row("", "store bytes include the warm-up's; all other figures leave the warm-up out")
    return table


def record(ledger: Ledger) -> dict[str, Any]:
    """The rows and the sums of both tables, for JSON: docs/index.md shows them."""
    return {
        "tower_passes": ledger.passes,
        "distinct_images": ledger.distinct,
        "tower_passes_of_engines": sum(row.engine_passes for row in ledger.rows),
        "kv_tokens_of_the_store": sum(row.kv_store for row in ledger.rows),
        "ttft_s": round(sum(row.answer.ttft_s for row in ledger.rows), 3),
        "stock_ttft_s": round(sum(row.stock.ttft_s for row in ledger.rows), 3),
        "requests": [
            {
                "act": row.request.act,
                "app": row.request.app.name,
                "image": row.request.image.name,
                "tower": row.tower,
                "embedding": row.embedding,
                "prompt_tokens": row.answer.prompt_tokens,
                "kv_own": row.kv_own,
                "kv_store": row.kv_store,
                "ttft_ms": round(1000 * row.answer.ttft_s),
                "stock_ttft_ms": round(1000 * row.stock.ttft_s),
                "same": row.same,
            }
            for row in ledger.rows
        ],
    }
