"""`cornplug top`: one look, and the rates between two."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from cornplug import cli
from cornplug.commands import top
from cornplug.config import StoreConfig
from cornplug.store.client import PoolStore
from cornplug.store.store_stats import NamespaceStat, StoreStat
from cornplug.testing.store import fill, lease


def stat(*, hits: int = 0, misses: int = 0, evicted: int = 0, full: int = 0) -> StoreStat:
    space = NamespaceStat(1 << 30, 0, 4 << 30, 7, hits, {"given": 9, "full": full}, {"evicted": evicted})
    return StoreStat(
        capacity_bytes=4 << 30, used_bytes=1 << 30, entries=7, reservations=1, leases=2,
        bytes_by_app={"[bold]chat": 1 << 30}, evictions=evicted, hits=hits, misses=misses, refusals=full,
        found=3, absent=4, namespaces={"default": space},
    )  # fmt: skip


def shown(now: StoreStat, change: top.StatChange) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(top.render(now, change))
    return console.export_text()


def test_top_once_prints_fill_hits_and_namespaces(
    store: PoolStore, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(store, "a", bytes(32 << 20), app="chat")
    assert lease(store, "a") is not None
    assert lease(store, "b") is None
    assert cli.main(["top", "--once"]) == 0
    out = capsys.readouterr().out
    for expected in ("50 %", "32.0 MiB of 64.0 MiB", "1 hits, 1 misses", "default", "chat", "1 leases"):
        assert expected in out


def test_top_json_is_the_stores_account(store: PoolStore, capsys: pytest.CaptureFixture[str]) -> None:
    fill(store, "a", b"x", app="chat")
    assert cli.main(["top", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["entries"], said["bytes_by_app"]) == (1, {"chat": 64})
    assert said["namespaces"]["default"]["reservations"] == {"given": 1}


def test_top_without_a_store_is_an_error_and_makes_no_secret(
    settings: StoreConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", "--once"]) == 2
    assert "no store" in capsys.readouterr().err
    assert not settings.secret_file.exists()


def test_top_between_two_looks_shows_rates() -> None:
    before, now = stat(hits=100, misses=0, evicted=10), stat(hits=130, misses=10, evicted=14, full=1)
    text = shown(now, top.StatChange(2.0, before, now))
    for expected in ("75 %", "15.0/s hits, 5.0/s misses", "refused 0.5/s", "2.0/s"):
        assert expected in text


def test_top_since_it_began_shows_counts() -> None:
    now = stat(hits=3, misses=1, evicted=14)
    text = shown(now, top.StatChange.since_start(now))
    for expected in (
        "75 %",
        "3 hits, 1 misses",
        "14",
        "1.0 GiB of 4.0 GiB",
        "3 keys found, 4 absent",
        "[bold]chat",
    ):
        assert expected in text


def test_top_store_without_reads_has_no_hit_rate() -> None:
    now = stat()
    assert top.StatChange.since_start(now).format_hit_rate() == "-"
