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
from cornplug.commands.store_command import ANSWER_S, running_store
from cornplug.errors import StoreError
from cornplug.store.base import ReserveRefusal, Store
from cornplug.store.store_stats import NamespaceStat, StoreStat

_BAR = 30
_APPS = 8


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
    store = running_store(settings)
    try:
        first = store.stat(deadline_s=ANSWER_S)
        if args.json:
            print(msgspec.json.encode(first).decode())
        elif args.once:
            Console().print(view(first, StatChange.since_began(first)))
        else:
            _watch(store, first, args.interval)
    finally:
        store.close()
    return 0


@dataclass(frozen=True, slots=True)
class StatChange:
    """Changes of the store's counts within `seconds`, or since the store started if `seconds` is None."""

    seconds: float | None
    before: StoreStat | None
    now: StoreStat

    @classmethod
    def since_began(cls, now: StoreStat) -> StatChange:
        """Return the changes since the store started."""
        return cls(None, None, now)

    def of(self, count: str) -> str:
        """Format the change of a count as a rate, or as a number if `seconds` is None."""
        before = getattr(self.before, count) if self.before is not None else 0
        return self._shown(getattr(self.now, count) - before)

    def hit_rate(self) -> str:
        """Format the hit rate in percent."""
        before = (self.before.hits, self.before.misses) if self.before is not None else (0, 0)
        hits, misses = self.now.hits - before[0], self.now.misses - before[1]
        return f"{100 * hits / (hits + misses):.0f} %" if hits + misses > 0 else "-"

    def of_namespace(self, name: str) -> tuple[str, str, str]:
        """Format the hits, evictions and rejected writes of a namespace."""
        was = None if self.before is None else self.before.namespaces.get(name)
        before_counts = (0, 0, 0) if was is None else _counts(was)
        counts = zip(_counts(self.now.namespaces[name]), before_counts, strict=True)
        hits, evicted, refused = (self._shown(now - before) for now, before in counts)
        return hits, evicted, refused

    def _shown(self, count: int) -> str:
        return f"{count}" if self.seconds is None else f"{max(0, count) / self.seconds:.1f}/s"


def _counts(one: NamespaceStat) -> tuple[int, int, int]:
    refused = sum(one.reservations.get(r.value, 0) for r in (ReserveRefusal.FULL, ReserveRefusal.TOO_LARGE))
    return one.hits, one.removals.get("evicted", 0), refused


def view(now: StoreStat, change: StatChange) -> Group:
    """Return the tables that `cornplug top` shows."""
    fill = now.used_bytes / now.capacity_bytes if now.capacity_bytes else 0.0
    bar = "█" * round(_BAR * fill)
    head = Table.grid(padding=(0, 2))
    head.add_row(
        "fill",
        f"{bar:░<{_BAR}} {100 * fill:.0f} %",
        f"{_size(now.used_bytes)} of {_size(now.capacity_bytes)}",
    )
    head.add_row("hit rate", change.hit_rate(), f"{change.of('hits')} hits, {change.of('misses')} misses")
    head.add_row("lookups", "", f"{change.of('found')} keys found, {change.of('absent')} absent")
    head.add_row("entries", str(now.entries), f"{now.leases} leases, {now.reservations} being written")
    head.add_row("evicted", change.of("evictions"), f"refused {change.of('refusals')}")
    if (disk := now.disk) is not None:
        head.add_row(
            "disk",
            f"{_size(disk.used_bytes)} of {_size(disk.capacity_bytes)}",
            f"{disk.entries} entries, {disk.queued} to write, {disk.reads.get('read', 0)} recalled",
        )
    spaces = Table("namespace", title_justify="left")
    for column in ("used", "share", "ceiling", "entries", "hits", "evicted", "refused"):
        spaces.add_column(column, justify="right")
    for name, one in now.namespaces.items():
        sizes = [_size(size) for size in (one.used_bytes, one.share_bytes, one.ceiling_bytes)]
        spaces.add_row(escape(name), *sizes, str(one.entries), *change.of_namespace(name))
    apps = Table("app")
    apps.add_column("used", justify="right")
    for app, size in sorted(now.bytes_by_app.items(), key=lambda each: -each[1])[:_APPS]:
        apps.add_row(escape(app), _size(size))
    return Group(head, spaces, apps)


def _watch(store: Store, first: StoreStat, interval_s: float) -> None:
    before, looked_s = first, time.monotonic()
    with Live(view(first, StatChange.since_began(first)), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    now, now_s = store.stat(deadline_s=ANSWER_S), time.monotonic()
                except StoreError as e:
                    live.update(Text(f"{e}\n\nRetrying every {interval_s:g} s."), refresh=True)
                    continue
                # If a count is smaller than before, the store was restarted.
                restarted = now.hits < before.hits or now.evictions < before.evictions
                change = (
                    StatChange.since_began(now) if restarted else StatChange(now_s - looked_s, before, now)
                )
                live.update(view(now, change), refresh=True)
                before, looked_s = now, now_s
        except KeyboardInterrupt:
            return


def _size(size_bytes: int) -> str:
    gib = size_bytes / (1 << 30)
    return f"{gib:.1f} GiB" if gib >= 1 else f"{size_bytes / (1 << 20):.1f} MiB"
