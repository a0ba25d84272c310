"""`script/soak`: runs a soak, shows it, and says whether the store kept its promises."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from devkit.store_soak.soak_faults import plan_faults
from devkit.store_soak.soak_run import SoakOptions, SoakOutcome, SoakProcesses
from devkit.store_soak.soak_verdict import growth_of, verdict


def main(argv: Sequence[str]) -> int:
    """Run one soak. Exit status: 0 all promises kept, 1 one is broken, 2 wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="script/soak",
        description="Clients load a store; clients and daemon are killed and stopped; every byte is checked.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="processes, at least 2 (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="names entries and faults (default: %(default)s)")
    parser.add_argument("--no-disk", action="store_true", help="the store keeps nothing on disk")
    parser.add_argument("--no-far", action="store_true", help="the store has no far store (Redis or Valkey)")
    options = parser.parse_args(argv)
    if options.minutes <= 0 or options.clients < 2:
        parser.error("--minutes must be above 0, --clients at least 2")
    console = Console()
    with tempfile.TemporaryDirectory(prefix="soak-") as work:
        run = SoakOptions(
            *(Path(work), options.minutes * 60, options.clients, options.seed),
            disk_bytes=0 if options.no_disk else SoakOptions.disk_bytes,
            far_bytes=0 if options.no_far else SoakOptions.far_bytes,
        )
        outcome = run_soak(run, console)
    show(outcome, console)
    broken = verdict(outcome)
    for line in broken:
        console.print(f"BROKEN: {line}", style="red", markup=False)
    console.print("The store did not keep its promises." if broken else "The store kept its promises.")
    return 1 if broken else 0


def run_soak(options: SoakOptions, console: Console) -> SoakOutcome:
    """The outcome of one run, which is shown while it lasts."""
    faults = plan_faults(options.seed, options.duration_s, options.clients, far=bool(options.far_bytes))
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress, SoakProcesses(options) as processes:
        task = progress.add_task("starting", total=options.duration_s)

        def look(now_s: float, outcome: SoakOutcome) -> None:
            line = f"{outcome.hits:,} hits, {sum(outcome.misses.values()):,} misses, "
            line += f"{sum(outcome.faults.values())} faults, {len(outcome.wrong)} wrong"
            progress.update(task, completed=now_s, description=line)

        processes.run(faults, look)
        return processes.outcome


def show(outcome: SoakOutcome, console: Console) -> None:
    """Print the table of a run."""
    table = Table("what", "count", title="Soak of the store")
    for title, counts in (
        ("operation", outcome.operations),
        ("miss", outcome.misses),
        ("far store", outcome.far),
        ("fault", outcome.faults),
    ):
        for name, count in sorted(counts.items()):
            table.add_row(f"{title}: {name}", f"{count:,}")
    table.add_row("entries read whole", f"{outcome.hits:,}")
    table.add_row("checked", f"{outcome.checked_bytes / 2**20:,.0f} MiB")
    table.add_row("entries with wrong bytes", f"{len(outcome.wrong)}")
    for name, took_s in sorted(outcome.longest_s.items()):
        table.add_row(f"longest: {name}", f"{took_s:.2f} s")
    for name, found in growth_of(outcome).items():
        text = "too few samples"
        if found is not None:
            text = f"{found.private_bytes / 2**20:+.1f} MiB private, {found.descriptors:+d} descriptors, "
            text += f"{found.threads:+d} threads, {found.arenas:+d} arenas in {found.minutes:.1f} min"
        table.add_row(f"growth of the {name}", text)
    console.print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
