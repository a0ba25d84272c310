"""`cornplug store purge` against a store that runs."""

from __future__ import annotations

import argparse
import json

import pytest

from cornplug import cli
from cornplug.commands.store_command import parse_age, purge_summary
from cornplug.config import StoreConfig
from cornplug.store.base import PurgeCount
from cornplug.store.client import PoolStore
from cornplug.testing.store import contains, fill, lease


def test_store_purge_ends_an_apps_entries_and_says_so(
    store: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(store, "a", bytes(1 << 20), app="chat")
    fill(store, "b", bytes(1 << 20), app="docs")
    held = lease(store, "a")
    assert held is not None
    assert cli.main(["store", "purge", "--app", "chat", "--dry-run"]) == 0
    assert "would purge 1 entries, 1.0 MiB; 1 of them are being read" in capsys.readouterr().out
    assert contains(store, "a", "b") == b"\1\1"
    assert cli.main(["store", "purge", "--app", "chat", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"entries": 1, "size_bytes": 1 << 20, "leased": 1, "writing": 0}
    assert contains(store, "a", "b") == b"\0\1"
    assert cli.main(["store", "purge", "--older-than", "1h"]) == 0
    assert contains(store, "b") == b"\1"
    assert cli.main(["store", "purge", "--all"]) == 0
    assert contains(store, "b") == b"\0"


def test_store_purge_without_a_store_is_an_error(
    settings: StoreConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["store", "purge", "--all"]) == 2
    assert "no store" in capsys.readouterr().err
    assert not settings.secret_file.exists()


@pytest.mark.parametrize("flags", [[], ["--all", "--app", "x"], ["--older-than", "soon"]])
def test_store_purge_unclear_flags_purge_nothing(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["store", "purge", *flags])
    assert exit_.value.code == 2
    assert "--all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("1.5h", 5400), ("30 min", 1800), ("30M", 1800), ("2d", 172800)],
)
def test_parse_age_units_give_seconds(text: str, seconds: float) -> None:
    assert parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "2 weeks", "1h30m"])
def test_parse_age_other_text_is_an_error(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="2h"):
        parse_age(text)


def test_told_names_entries_that_were_being_written() -> None:
    assert purge_summary(PurgeCount(2, 3 << 20, 0, 1), dry_run=False) == (
        "purged 2 entries, 3.0 MiB; 1 more were being written"
    )
