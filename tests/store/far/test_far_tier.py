"""Two hosts, one far store: what one writes the other one reads, if they have one secret."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.config import StoreConfig
from cornplug.errors import ConfigError
from cornplug.private_paths import cache_dir, read_secret
from cornplug.store.base import PurgeRule, Tier
from cornplug.store.client import PoolStore
from cornplug.store.daemon.server import StoreServer
from cornplug.store.disk.record_format import FarSealer
from cornplug.store.far.open_far import open_far
from cornplug.store.payload import recall_and_wait
from cornplug.testing import StoreContract
from cornplug.testing.store import DEADLINE_S, StoreStage, key_of
from devkit.far_servers import RedisServer

from ..conftest import ServerClock, eventually, pool_stage
from ..disk.disk_stage import KIB, get, payload_of, put, tier_of
from .far_stage import Host

Hosts = Callable[..., Host]
SIZES = {"small": 1, "page": 64 * KIB, "odd": 100 * KIB + 7, "chunks": 1500 * KIB}


class TestPoolStoreWithFar(StoreContract):
    """Entries are written to a far store all the time, and no rule of the store changes."""

    @pytest.fixture
    def stage(
        self,
        serve_in_thread: Callable[..., StoreServer],
        connect: Callable[..., PoolStore],
        server_clock: ServerClock,
        store_config: StoreConfig,
        share: Path,
    ) -> StoreStage:
        secret = read_secret(store_config.secret_file)
        far = open_far([f"file://{share}"], secret, secret_file=store_config.secret_file)
        return pool_stage(serve_in_thread, connect, server_clock, size_bytes=self.capacity_bytes, far=far)


def found(one: Host, name: object) -> bytes | None:
    """An entry, with all the time that far stores may need on a busy machine."""
    value: list[bytes | None] = [None]

    def there() -> bool:
        value[0] = get(one.store, name)
        return value[0] is not None

    eventually(there, within_s=60)
    return value[0]


def test_far_tier_second_host_reads_what_the_first_one_wrote(host: Hosts, url: str) -> None:
    first, second = host(url), host(url)
    for name, size_bytes in SIZES.items():
        put(first.store, name, size_bytes)
    eventually(lambda: first.written(len(SIZES)))
    for name, size_bytes in SIZES.items():
        assert found(second, name) == payload_of(name, size_bytes)
    far = second.far()
    assert far.reads == {"read": len(SIZES)}
    assert far.read_bytes == first.far().written_bytes > sum(SIZES.values())
    eventually(lambda: second.far().queued == 0)
    assert "written" not in second.far().writes, "what came from there goes there no more"


def test_far_tier_absent_key_is_asked_for_once_a_second(host: Hosts, url: str) -> None:
    one = host(url)
    for _ in range(20):
        assert get(one.store, "none") is None
    eventually(lambda: bool(one.far().asks))
    asks = one.far().asks
    assert asks["absent"] <= 3, asks


def test_far_tier_another_secret_finds_nothing(host: Hosts, url: str) -> None:
    first, other = host(url), host(url, secret=b"o" * 32)
    put(first.store, "a")
    eventually(lambda: first.written(1))
    assert get(other.store, "a") is None
    eventually(lambda: other.far().asks.get("absent", 0) == 1)
    assert get(other.store, "a") is None
    assert other.far().reads == {}


def test_far_tier_entry_found_is_shown_and_recalled_as_one_on_disk(host: Hosts, url: str) -> None:
    first, second = host(url), host(url)
    for name in range(10):
        put(first.store, name)
    eventually(lambda: first.written(10))
    keys = [key_of(name) for name in [*range(10), "none"]]
    ticket = second.store.start_far_lookup(keys)
    assert ticket
    assert second.store.start_far_lookup(keys) in (ticket, 0), "within the second"
    expected = bytes([Tier.DISK] * 10 + [Tier.ABSENT])
    eventually(lambda: second.store.tiers(keys, deadline_s=DEADLINE_S) == expected)
    tiers = recall_and_wait(second.store, keys, within_s=60, deadline_s=DEADLINE_S)
    assert tiers == bytes([Tier.MEMORY] * 10 + [Tier.ABSENT])
    assert [get(second.store, name) for name in range(10)] == [
        payload_of(name, 20 * KIB) for name in range(10)
    ]


def test_far_tier_evicted_entry_comes_back(host: Hosts, url: str) -> None:
    one = host(url, size_bytes=1 << 20)
    for name in range(40):
        put(one.store, name, 100 * KIB)
        eventually(lambda name=name: one.written(name + 1))  # type: ignore[misc]
    assert tier_of(one.store, 0) != Tier.MEMORY
    assert found(one, 0) == payload_of(0, 100 * KIB)


def test_far_tier_deleted_entry_is_not_read_again_until_it_is_written(host: Hosts, url: str) -> None:
    one = host(url)
    put(one.store, "a")
    eventually(lambda: one.written(1))
    assert one.store.delete([key_of("a")], deadline_s=DEADLINE_S) == 1
    assert get(one.store, "a") is None
    one.store.start_far_lookup([key_of("a")])
    assert get(one.store, "a") is None
    put(one.store, "a")
    eventually(lambda: one.written(2))


def test_far_tier_deleted_and_purged_entries_are_deleted_there(host: Hosts, url: str) -> None:
    one = host(url)
    put(one.store, "deleted")
    put(one.store, "purged")
    eventually(lambda: one.written(2))
    secret = one.config.secret_file.read_bytes()
    ((_, records),) = open_far([url], secret, secret_file=one.config.secret_file).stores
    names = [FarSealer(secret).record_name(key_of(name)) for name in ("deleted", "purged")]
    assert records.exists(names) == [True, True]
    assert one.store.delete([key_of("deleted")], deadline_s=DEADLINE_S) == 1
    eventually(lambda: records.exists(names) == [False, True])
    assert one.store.purge(PurgeRule(app="chat"), deadline_s=DEADLINE_S).entries == 1
    eventually(lambda: records.exists(names) == [False, False])
    records.close()


def test_far_tier_sealing_secret_is_replaced_while_hosts_run(
    host: Hosts, url: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (short_path / name for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(path.name.encode().ljust(32))
        path.chmod(0o600)

    def with_secrets(*paths: Path) -> Host:
        monkeypatch.setenv("CORNPLUG_STORE_FAR_SECRET_FILES", ",".join(map(str, paths)))
        one: Host = host(url)
        return one

    before, between = with_secrets(old), with_secrets(old, new)
    after = with_secrets(new, old)
    put(before.store, "a")
    put(after.store, "b")
    eventually(lambda: before.written(1) and after.written(1))
    assert found(after, "a") == payload_of("a", 20 * KIB)
    assert found(between, "b") == payload_of("b", 20 * KIB)
    eventually(lambda: get(before.store, "b") is not None or before.far().reads.get("damaged") == 1)
    assert get(before.store, "b") is None


def test_far_tier_two_stores_are_both_written_and_either_one_is_read(
    host: Hosts, share: Path, redis: RedisServer
) -> None:
    folder, server = f"file://{share}", redis.url
    first = host(folder, server)
    put(first.store, "a")
    eventually(lambda: first.far(0).writes == first.far(1).writes == {"written": 1})
    for url in (folder, server):
        assert found(host(url), "a") == payload_of("a", 20 * KIB)


def test_far_tier_record_beyond_the_stores_cap_is_counted(host: Hosts, redis: RedisServer) -> None:
    one = host(redis.url, size_bytes=16 << 20)
    put(one.store, "large", 5 << 20)
    eventually(lambda: one.far().writes == {"too_large": 1})


def test_far_tier_daemon_without_far_asks_nothing(host: Hosts) -> None:
    one = host()
    put(one.store, "a")
    assert not one.store.is_far_up
    assert not one.store.start_far_lookup([key_of("b")])
    assert not one.store.has_disk
    assert one.store.stat(deadline_s=DEADLINE_S).far == {}


@pytest.mark.parametrize(
    ("far", "secret", "field", "value"),
    [
        ("gopher://x", "own", "store.far", "gopher"),
        ("file:///no/such/folder", "own", "store.far", "/no/such/folder"),
        ("valkey://", "own", "store.far", "valkey://"),
        ("file:///tmp", "default", "store.secret_file", ""),
    ],
)
def test_open_far_url_that_cannot_be_used_is_an_error_naming_the_remedy(
    far: str, secret: str, field: str, value: str, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(short_path))
    path = cache_dir() / "secret" if secret == "default" else short_path / "own"
    with expect_error(ConfigError, field=field, match=value):
        open_far([far], b"s" * 32, secret_file=path)


def test_open_far_sealing_secret_that_is_missing_is_not_made(short_path: Path) -> None:
    path = short_path / "sealing"
    with expect_error(ConfigError, field="store.far_secret_files", match="CORNPLUG_STORE_FAR_SECRET_FILES"):
        open_far(["file:///tmp"], b"s" * 32, secret_file=short_path / "own", sealing_files=[path])
    assert not path.exists()
