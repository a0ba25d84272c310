"""`cornplug top`: show statistics of the running store, once or continuously."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cornplug import config
from cornplug.commands.store_command import REPLY_TIMEOUT_S, open_running_store
from cornplug.errors import StoreError
from cornplug.store.base import ReserveRefusal, Store
from cornplug.store.store_stats import NamespaceStat, StoreStat

_BAR_WIDTH = 30
_MAX_APPS = 8


def main(argv: list[str]) -> int:
    """Run `cornplug top`, and return exit status 0. Raises StoreError if no store responds at the start."""
    parser = argparse.ArgumentParser(
        prog="cornplug top",
        description="Monitor the running store: usage, hit rate, evictions, rejected writes.",
    )
    parser.add_argument(
        "--interval",
        type=float,
        default=2.0,
        metavar="S",
        help="seconds between updates (default: %(default)s)",
    )
    parser.add_argument(
        "--once", action="store_true", help="print the counts since the store started, and exit"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the counts since the store started as JSON, and exit"
    )
    args = parser.parse_args(argv)
    if args.interval < 0.1:
        parser.error("--interval: must be at least 0.1 seconds")
    settings = config.load().store
    store = open_running_store(settings)
    try:
        first = store.stat(deadline_s=REPLY_TIMEOUT_S)
        if args.json:
            print(msgspec.json.encode(first).decode())
        elif args.once:
            Console().print(render(first, StatChange.since_start(first)))
        else:
            _watch(store, first, args.interval)
    finally:
        store.close()
    return 0


@dataclass(frozen=True, slots=True)
class StatChange:
    """Change of the store's counters over `seconds`, or since the store started if `seconds` is None."""

    seconds: float | None
    before: StoreStat | None
    now: StoreStat

    @classmethod
    def since_start(cls, now: StoreStat) -> StatChange:
        """Return the changes since the store started."""
        return cls(None, None, now)

    def format_change(self, count: str) -> str:
        """Format the change of a count as a rate, or as a number if `seconds` is None."""
        before = getattr(self.before, count) if self.before is not None else 0
        return self._format_count(getattr(self.now, count) - before)

    def format_hit_rate(self) -> str:
        """Format the hit rate in percent."""
        before = (self.before.hits, self.before.misses) if self.before is not None else (0, 0)
        hits, misses = self.now.hits - before[0], self.now.misses - before[1]
        return f"{100 * hits / (hits + misses):.0f} %" if hits + misses > 0 else "-"

    def format_namespace(self, name: str) -> tuple[str, str, str]:
        """Format the hits, evictions and rejected writes of a namespace."""
        was = None if self.before is None else self.before.namespaces.get(name)
        before_counts = (0, 0, 0) if was is None else _namespace_counts(was)
        counts = zip(_namespace_counts(self.now.namespaces[name]), before_counts, strict=True)
        hits, evicted, refused = (self._format_count(now - before) for now, before in counts)
        return hits, evicted, refused

    def _format_count(self, count: int) -> str:
        return f"{count}" if self.seconds is None else f"{max(0, count) / self.seconds:.1f}/s"


def _namespace_counts(stat: NamespaceStat) -> tuple[int, int, int]:
    refused = sum(stat.reservations.get(r.value, 0) for r in (ReserveRefusal.FULL, ReserveRefusal.TOO_LARGE))
    return stat.hits, stat.removals.get("evicted", 0), refused


def render(now: StoreStat, change: StatChange) -> Group:
    """Return the tables that `cornplug top` shows."""
    fill = now.used_bytes / now.capacity_bytes if now.capacity_bytes else 0.0
    bar = "█" * round(_BAR_WIDTH * fill)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        "fill",
        f"{bar:░<{_BAR_WIDTH}} {100 * fill:.0f} %",
        f"{_format_size(now.used_bytes)} of {_format_size(now.capacity_bytes)}",
    )
    head.add_row(
        "hit rate",
        change.format_hit_rate(),
        f"{change.format_change('hits')} hits, {change.format_change('misses')} misses",
    )
    head.add_row(
        "lookups", "", f"{change.format_change('found')} keys found, {change.format_change('absent')} absent"
    )
    head.add_row("entries", str(now.entries), f"{now.leases} leases, {now.reservations} being written")
    head.add_row("evicted", change.format_change("evictions"), f"refused {change.format_change('refusals')}")
    if (disk := now.disk) is not None:
        head.add_row(
            "disk",
            f"{_format_size(disk.used_bytes)} of {_format_size(disk.capacity_bytes)}",
            f"{disk.entries} entries, {disk.queued} to write, {disk.reads.get('read', 0)} recalled",
        )
    spaces = Table("namespace", title_justify="left")
    for column in ("used", "share", "ceiling", "entries", "hits", "evicted", "refused"):
        spaces.add_column(column, justify="right")
    for name, one in now.namespaces.items():
        sizes = [_format_size(size) for size in (one.used_bytes, one.share_bytes, one.ceiling_bytes)]
        spaces.add_row(escape(name), *sizes, str(one.entries), *change.format_namespace(name))
    apps = Table("app")
    apps.add_column("used", justify="right")
    for app, size in sorted(now.bytes_by_app.items(), key=lambda each: -each[1])[:_MAX_APPS]:
        apps.add_row(escape(app), _format_size(size))
    return Group(head, spaces, apps)


def _watch(store: Store, first: StoreStat, interval_s: float) -> None:
    before, looked_s = first, time.monotonic()
    with Live(render(first, StatChange.since_start(first)), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    now, now_s = store.stat(deadline_s=REPLY_TIMEOUT_S), time.monotonic()
                except StoreError as e:
                    live.update(Text(f"{e}\n\nRetrying every {interval_s:g} s."), refresh=True)
                    continue
                # If a count is smaller than before, the store was restarted.
                restarted = now.hits < before.hits or now.evictions < before.evictions
                change = (
                    StatChange.since_start(now) if restarted else StatChange(now_s - looked_s, before, now)
                )
                live.update(render(now, change), refresh=True)
                before, looked_s = now, now_s
        except KeyboardInterrupt:
            return


def _format_size(size_bytes: int) -> str:
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size_bytes / (1 << 20):.1f} MiB"
