"""A daemon with a disk: what it writes back, what a restart and a kill leave, what comes back into memory."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cornplug.config import StoreConfig
from cornplug.private_paths import read_secret
from cornplug.settings import NamespaceConfig
from cornplug.store.base import PurgeRule, Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk.segment_files import OpenedDisk, open_disk
from cornplug.store.entry_table import MappedEntryTable
from cornplug.testing import StoreContract
from cornplug.testing.store import StoreStage, contains, key_of

from ..conftest import ServerClock, eventually, pool_stage
from .disk_stage import KIB, MIB, disk_of, end, get, payload_of, put, scanned, tier_of, written

Serve = Callable[..., StoreServer]
Connect = Callable[..., PoolStore]
Start = Callable[..., "subprocess.Popen[str]"]


class TestPoolStoreWithDisk(StoreContract):
    """Entries are written back all the time, and no rule of the store changes."""

    @pytest.fixture
    def stage(
        self, serve_in_thread: Serve, connect: Connect, server_clock: ServerClock, disk: OpenedDisk
    ) -> StoreStage:
        return pool_stage(serve_in_thread, connect, server_clock, size_bytes=self.capacity_bytes, disk=disk)


def test_disk_tier_entry_outlives_its_daemon(connect: Connect, start_daemon: Start, folder: Path) -> None:
    daemon = start_daemon("--disk", str(folder), "--disk-size", "64MiB")
    store = connect()
    names = range(30)
    for name in names:
        put(store, name, 1 + name * 7919)
    end(daemon)  # It writes the entries that wait.
    start_daemon("--disk", str(folder), "--disk-size", "64MiB")
    eventually(lambda: written(store, len(names)))
    assert contains(store, *names) == bytes(len(names)), "nothing is in memory"
    assert get(store, 3, recall_s=None) is None
    assert store.tiers([key_of(name) for name in names], deadline_s=5) == bytes([Tier.DISK]) * len(names)
    assert store.peek([key_of(name) for name in names]) == bytes([Tier.DISK]) * len(names)
    for name in names:
        assert get(store, name) == payload_of(name, 1 + name * 7919)
    assert contains(store, *names) == b"\1" * len(names)
    stat = disk_of(store)
    assert stat.reads == {"read": len(names)}
    assert stat.writes == {}, "an entry is written once"
    assert stat.namespaces["default"].hits == len(names)


def test_disk_tier_entry_recalled_while_it_is_looked_up_is_not_absent(
    connect: Connect, start_daemon: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = start_daemon("--disk", str(folder))
    store = connect()
    put(store, "a")
    end(daemon)
    start_daemon("--disk", str(folder))
    eventually(lambda: written(store, 1))

    def recalled_after(look: Callable[..., bytes]) -> Callable[..., bytes]:
        def look_first(table: MappedEntryTable, keys: list[bytes]) -> bytes:
            seen = look(table, keys)
            monkeypatch.undo()
            store.recall(keys)
            eventually(lambda: contains(store, "a") == b"\1")
            return seen

        return look_first

    for name in ("contains", "on_disk_mask"):
        monkeypatch.setattr(MappedEntryTable, name, recalled_after(getattr(MappedEntryTable, name)))
    assert tier_of(store, "a") in (Tier.DISK, Tier.MEMORY)


def test_disk_tier_kill_9_leaves_what_was_written(
    connect: Connect, start_daemon: Start, folder: Path
) -> None:
    daemon = start_daemon("--disk", str(folder), "--disk-size", "64MiB")
    store = connect()
    put(store, "before", 3 * MIB)
    eventually(lambda: written(store, 1))
    for name in range(8):
        put(store, name, MIB)
    daemon.kill()
    daemon.wait()
    start_daemon("--disk", str(folder), "--disk-size", "64MiB")
    eventually(lambda: scanned(store))
    assert get(store, "before") == payload_of("before", 3 * MIB)
    for name in range(8):
        assert get(store, name) in (None, payload_of(name, MIB))
        if get(store, name) is None:
            put(store, name, MIB)
    eventually(lambda: written(store, 9))


def test_disk_tier_kill_9_again_and_again_serves_no_wrong_byte(
    connect: Connect, start_daemon: Start, folder: Path
) -> None:
    store, chosen, lengths = connect(), random.Random(4), dict[int, int]()
    for turn in range(4):
        daemon = start_daemon("--disk", str(folder), "--disk-size", "16MiB")
        eventually(lambda: scanned(store))
        kept = sum(get(store, name) == payload_of(name, lengths[name]) for name in lengths)
        wrong = [n for n in lengths if get(store, n) not in (None, payload_of(n, lengths[n]))]
        assert wrong == []
        assert turn == 0 or kept > 0
        for name in range(100 * turn, 100 * turn + 12):
            lengths[name] = chosen.randrange(1, 600 * KIB)
            put(store, name, lengths[name])
        eventually(lambda: disk_of(store).writes.get("written", 0) > chosen.randrange(12))
        daemon.kill()
        daemon.wait()


def test_disk_tier_deleted_entry_is_gone_after_a_restart_too(
    connect: Connect, start_daemon: Start, folder: Path
) -> None:
    daemon = start_daemon("--disk", str(folder))
    store = connect()
    for name in "abc":
        put(store, name)
    eventually(lambda: written(store, 3))
    assert store.delete([key_of("a")], deadline_s=5) == 1
    end(daemon)
    daemon = start_daemon("--disk", str(folder))
    eventually(lambda: written(store, 2))
    assert store.delete([key_of("b"), key_of("a")], deadline_s=5) == 1, "on disk only"
    assert [tier_of(store, name) for name in "abc"] == [Tier.ABSENT, Tier.ABSENT, Tier.DISK]
    end(daemon)
    start_daemon("--disk", str(folder))
    eventually(lambda: written(store, 1))
    assert get(store, "b") is None
    assert get(store, "c") == payload_of("c", 20 * KIB)


def test_disk_tier_purge_of_an_app_ends_its_entries_on_disk(
    serve_in_thread: Serve, connect: Connect, disk: OpenedDisk
) -> None:
    serve_in_thread(size_bytes=MIB, disk=disk)
    store = connect()
    for name in range(8):
        put(store, name, 256 * KIB, app="chat" if name % 2 else "docs")
        eventually(lambda n=name: written(store, n + 1))  # type: ignore[misc]
    only_counted = store.purge(PurgeRule(app="docs", dry_run=True), deadline_s=5)
    assert only_counted.entries == 4
    assert disk_of(store).entries == 8
    assert store.purge(PurgeRule(app="docs"), deadline_s=5) == only_counted
    assert store.purge(PurgeRule(older_s=3600), deadline_s=5).entries == 0
    assert [tier_of(store, name) for name in range(0, 8, 2)] == [Tier.ABSENT] * 4
    assert Tier.ABSENT not in [tier_of(store, name) for name in range(1, 8, 2)]
    assert disk_of(store).namespaces["default"].removals == {"purged": 4}


@pytest.mark.more
def test_disk_tier_time_to_live_counts_from_the_first_writing(
    connect: Connect, start_daemon: Start, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "cornplug.toml"
    settings.write_text("[store.namespaces.short]\nttl_s = 4\n")
    monkeypatch.setenv("CORNPLUG_CONFIG", str(settings))
    daemon = start_daemon("--disk", str(folder))
    store, began_s = connect(), time.monotonic()
    put(store, "brief", app="short")
    put(store, "long", app="chat")
    eventually(lambda: written(store, 2))
    end(daemon)
    start_daemon("--disk", str(folder))
    eventually(lambda: scanned(store))
    came = get(store, "brief")
    assert came is not None or time.monotonic() - began_s > 4
    eventually(lambda: tier_of(store, "brief") == Tier.ABSENT)
    assert time.monotonic() - began_s >= 3.9
    assert get(store, "brief") is None
    assert get(store, "long") == payload_of("long", 20 * KIB)


def test_disk_tier_files_stay_within_their_bound(
    serve_in_thread: Serve, connect: Connect, folder: Path, store_config: StoreConfig
) -> None:
    disk = open_disk(folder, read_secret(store_config.secret_file), size_bytes=4 * MIB)
    serve_in_thread(size_bytes=4 * MIB, disk=disk)
    store, most = connect(), 0
    for name in range(60):
        put(store, name, 150 * KIB)
        eventually(lambda: disk_of(store).queued == 0)
        most = max(most, sum(file.stat().st_size for file in folder.glob("segment-*")))
        assert get(store, 0) == payload_of(0, 150 * KIB), "what is read moves on"
    assert most <= 4 * MIB
    stat = disk_of(store)
    assert stat.used_bytes <= 4 * MIB
    assert stat.namespaces["default"].removals["evicted"] > 20
    assert stat.entries == stat.writes["written"] - stat.namespaces["default"].removals["evicted"]
    assert tier_of(store, 2) == Tier.ABSENT


def test_disk_tier_entry_beyond_half_a_segment_stays_in_memory(
    serve_in_thread: Serve, connect: Connect, folder: Path, store_config: StoreConfig
) -> None:
    disk = open_disk(folder, read_secret(store_config.secret_file), size_bytes=4 * MIB)
    serve_in_thread(size_bytes=4 * MIB, disk=disk)
    store = connect()
    put(store, "large", 300 * KIB)
    eventually(lambda: disk_of(store).writes == {"too_large": 1})
    assert tier_of(store, "large") == Tier.MEMORY


def test_disk_tier_smaller_bound_at_restart_is_kept(
    connect: Connect, start_daemon: Start, folder: Path
) -> None:
    daemon = start_daemon("--disk", str(folder), "--disk-size", "64MiB")
    store = connect()
    for name in range(14):
        put(store, name, MIB)
    end(daemon)
    start_daemon("--disk", str(folder), "--disk-size", "8MiB")
    eventually(lambda: scanned(store))
    eventually(lambda: sum(file.stat().st_size for file in folder.glob("segment-*")) <= 8 * MIB)
    assert disk_of(store).used_bytes <= 8 * MIB


def test_disk_tier_metrics_name_it(serve_in_thread: Serve, connect: Connect, disk: OpenedDisk) -> None:
    from cornplug.store.daemon.metrics_endpoint import metric_families

    server = serve_in_thread(size_bytes=MIB, disk=disk, namespaces={"docs": NamespaceConfig(share=0.5)})
    store = connect()
    put(store, "a", app="docs")
    eventually(lambda: written(store, 1))
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in metric_families(server.telemetry.snapshot())
        for sample in family.samples
    }
    assert found["cornplug_store_capacity_bytes", "disk"] == 64 * MIB
    assert found["cornplug_store_entries", "docs", "disk"] == 1
    assert found["cornplug_store_bytes", "docs", "disk"] >= 20 * KIB
    assert found["cornplug_store_hits_total", "docs", "disk"] == 0
    assert found["cornplug_store_disk_writes_total", "written"] == 1
    assert found["cornplug_store_disk_queued",] == 0
    assert found["cornplug_store_disk_used_bytes",] == found["cornplug_store_bytes", "docs", "disk"]
