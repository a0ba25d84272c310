"""`cornplug store purge`: end entries of the running store, by app or by age."""

from __future__ import annotations

import argparse
import json
import re
from typing import Final

import msgspec

from cornplug import config
from cornplug.commands.running_store import ANSWER_S, other_backend, running_store
from cornplug.store.base import PurgeableStore, PurgeCount, PurgeRule

_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_EPILOG: Final = """\
An entry that an engine reads at this moment is absent from now on, and gives its memory back
when the reader is done. Entries that are written afterwards stay.

The store knows apps, not tenants: a salt is inside an entry's key, which is a digest. Entries of a tenant
whose salt no request sends any more can be read by no request, and are evicted in time; to purge a tenant,
give its engines an app of their own."""


def main(argv: list[str]) -> int:
    """Exit status 0 when done. Raises StoreError where no store answers."""
    parser = argparse.ArgumentParser(prog="cornplug store", description="Look after the running store.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    purge = commands.add_parser(
        "purge",
        help="end entries by app or age",
        description="End the entries for which all of these flags are true.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    purge.add_argument("--app", metavar="NAME", help="entries that this app's engines and clients wrote")
    purge.add_argument(
        "--older-than",
        type=parse_age,
        metavar="AGE",
        help="entries written so long ago, as 90s, 30m, 2h or 1d",
    )
    purge.add_argument(
        "--unused-for", type=parse_age, metavar="AGE", help="entries that no reader had for so long"
    )
    purge.add_argument("--all", action="store_true", help="all entries")
    purge.add_argument("--dry-run", action="store_true", help="count the entries, and keep them")
    purge.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    chosen = [args.app, args.older_than, args.unused_for]
    if args.all != all(each is None for each in chosen):
        purge.error("name the entries by --app, --older-than or --unused-for; or all of them by --all alone")
    rule = PurgeRule(args.app, args.older_than or 0.0, args.unused_for or 0.0, args.dry_run)
    count = _purge(config.load().store, rule)
    print(json.dumps(msgspec.structs.asdict(count)) if args.json else told(count, dry_run=args.dry_run))
    return 0


def parse_age(text: str) -> float:
    """Seconds of "90", "90s", "30m", "2h" or "1d". Raises argparse.ArgumentTypeError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: write 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS_S[match[2]]


def told(count: PurgeCount, *, dry_run: bool) -> str:
    """A line for the operator."""
    done = "would purge" if dry_run else "purged"
    line = f"{done} {count.entries} entries, {count.size_bytes / (1 << 20):.1f} MiB"
    if count.leased:
        line += f"; {count.leased} of them are being read: their memory is free when the readers are done"
    return line + (f"; {count.writing} more were being written" if count.writing else "")


def _purge(settings: config.StoreConfig, rule: PurgeRule) -> PurgeCount:
    store = running_store(settings)
    try:
        if not isinstance(store, PurgeableStore):
            raise other_backend(settings, "purge")
        return store.purge(rule, deadline_s=ANSWER_S)
    finally:
        store.close()
