"""`cornplug store purge`: delete entries of the running store, by app or by age.

Other commands also use `open_running_store`, which connects to the running store. It does not start a store
or create a secret.
"""

from __future__ import annotations

import argparse
import json
import re
from typing import Final

import msgspec

from cornplug import config
from cornplug.errors import ConfigError, StoreUnavailable
from cornplug.store.base import PurgeCount, PurgeRule, Store
from cornplug.store.client import is_host_store, open_store

REPLY_TIMEOUT_S: Final = 2.0
_UNITS_S: Final = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_EPILOG: Final = """\
Entries that are written later are not affected. The store cannot purge by tenant, because a salt is hashed
into the key. Give the engines of a tenant a separate app instead."""


def open_running_store(settings: config.StoreConfig) -> Store:
    """Connect to the running store.

    Raises StoreUnavailable if no store has ever run, and ConfigError if the store rejects the settings.
    """
    if is_host_store(settings) and not settings.secret_file.exists():
        why = f"no store has run here, because there is no secret yet ({settings.secret_file})"
        raise StoreUnavailable(why, reason="store_down")
    return open_store(settings, autostart=False, connect_timeout_s=REPLY_TIMEOUT_S)


def unsupported_error(settings: config.StoreConfig, command: str) -> ConfigError:
    """Return the error for a command that the configured store backend does not support."""
    return ConfigError(
        "store.backend", f"{settings.backend} does not support {command}", "Use the tools of that store."
    )


def main(argv: list[str]) -> int:
    """Run `cornplug store`, and return exit status 0. Raises StoreError if no store responds."""
    parser = argparse.ArgumentParser(prog="cornplug store", description="Manage the running store.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    purge = commands.add_parser(
        "purge",
        help="delete entries by app or age",
        description="Delete the entries that match all given flags.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    purge.add_argument("--app", metavar="NAME", help="entries written by engines and clients of this app")
    purge.add_argument(
        "--older-than",
        type=parse_age,
        metavar="AGE",
        help="entries written at least AGE ago, for example 90s, 30m, 2h or 1d",
    )
    purge.add_argument(
        "--unused-for", type=parse_age, metavar="AGE", help="entries that were not read for at least AGE"
    )
    purge.add_argument("--all", action="store_true", help="all entries")
    purge.add_argument("--dry-run", action="store_true", help="count the entries without deleting them")
    purge.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    chosen = [args.app, args.older_than, args.unused_for]
    if args.all != all(each is None for each in chosen):
        purge.error("select entries with --app, --older-than or --unused-for, or all entries with only --all")
    rule = PurgeRule(args.app, args.older_than or 0.0, args.unused_for or 0.0, args.dry_run)
    count = _purge(config.load().store, rule)
    print(
        json.dumps(msgspec.structs.asdict(count)) if args.json else purge_summary(count, dry_run=args.dry_run)
    )
    return 0


def parse_age(text: str) -> float:
    """Convert an age such as "90", "90s", "30m", "2h" or "1d" to seconds.

    Raises argparse.ArgumentTypeError if the text is not an age.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_S:
        raise argparse.ArgumentTypeError(f"{text!r} is not an age: write 90s, 30m, 2h or 1d")
    return float(match[1]) * _UNITS_S[match[2]]


def purge_summary(count: PurgeCount, *, dry_run: bool) -> str:
    """Return a summary of what was purged, for the operator."""
    done = "would purge" if dry_run else "purged"
    line = f"{done} {count.entries} entries, {count.size_bytes / (1 << 20):.1f} MiB"
    if count.leased:
        line += f"; {count.leased} of them are being read, and their memory is freed after that"
    return line + (f"; {count.writing} more were being written" if count.writing else "")


def _purge(settings: config.StoreConfig, rule: PurgeRule) -> PurgeCount:
    store = open_running_store(settings)
    try:
        return store.purge(rule, deadline_s=REPLY_TIMEOUT_S)
    except NotImplementedError:
        raise unsupported_error(settings, "purge") from None
    finally:
        store.close()
