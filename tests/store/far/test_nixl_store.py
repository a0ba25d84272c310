"""Members that give each other memory by NIXL: one that dies, strangers at a member's port, bad addresses."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.errors import ConfigError
from cornplug.store.base import Tier
from cornplug.store.disk.record_format import derive_key
from cornplug.store.far.nixl_client import MemberChannel
from cornplug.store.far.open_far import FarFailure, FarStore, open_far
from cornplug.testing.store import DEADLINE_S, key_of

from ..conftest import eventually
from ..disk.disk_stage import KIB, payload_of, put
from .far_stage import Host
from .test_far_faults import near_is_quick
from .test_far_tier import found

Hosts = Callable[..., Host]
SECRET = b"s" * 32


def answers(store: FarStore) -> bool:
    try:
        return store.exists(["cp1/none"]) == [False]
    except FarFailure:
        return False


def ports_of(url: str) -> list[int]:
    return [int(port.partition("?")[0].partition("+")[0]) for port in url.split(":")[2:]]


@pytest.fixture
def members(nixl: str, tmp_path: Path) -> Iterator[tuple[FarStore, FarStore]]:
    """Two of three; the third is not there."""
    made = []
    for _ in range(2):
        ((_, store),) = open_far([nixl], SECRET, secret_file=tmp_path / "own").stores
        made.append(store)
        eventually(lambda store=store: answers(store))  # type: ignore[misc]
    yield made[0], made[1]
    for store in made:
        store.close()


@pytest.mark.more
def test_nixl_store_records_of_one_member_are_read_and_deleted_by_another(
    members: tuple[FarStore, FarStore],
) -> None:
    first, second = members
    for record in (b"old", secrets.token_bytes(3 << 20), secrets.token_bytes(31 << 20)):
        first.put("cp1/a", record)
        eventually(lambda: second.exists(["cp1/a", "cp1/b"]) == [True, False])
        assert second.get("cp1/a") == first.get("cp1/a") == record
    assert second.get("cp1/b") is None
    with pytest.raises(FarFailure, match="not every member"):
        second.delete(["cp1/a", "cp1/b"])  # the third member may have them
    assert first.exists(["cp1/a"]) == [False]
    with pytest.raises(FarFailure, match="a record of 104857600 bytes exceeds the memory of 67108864 bytes"):
        first.put("cp1/larger than its memory", bytes(100 << 20))


@pytest.mark.more
def test_nixl_store_killed_member_is_replaced_empty_and_found_again(
    members: tuple[FarStore, FarStore],
) -> None:
    first, second = members
    first.put("cp1/a", b"record")
    eventually(lambda: second.exists(["cp1/a"]) == [True])
    first._client._process.kill()  # type: ignore[attr-defined]
    eventually(lambda: first._client.has_exited)  # type: ignore[attr-defined]
    assert second.get("cp1/a") is None
    assert second.exists(["cp1/a"]) == [False]
    eventually(lambda: answers(first))
    first.put("cp1/b", b"another")
    eventually(lambda: second.exists(["cp1/b"]) == [True])
    assert second.get("cp1/b") == b"another"


@pytest.mark.more
def test_nixl_store_member_that_hangs_costs_one_deadline(members: tuple[FarStore, FarStore]) -> None:
    first, second = members
    first.put("cp1/a", b"record")
    eventually(lambda: second.exists(["cp1/a"]) == [True])
    pid: int = first._client._process.pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        for _ in range(20):
            second.exists(["cp1/b"])
        assert time.monotonic() - began_s < 20 * 0.2, "each would wait for its deadline"
    finally:
        os.kill(pid, signal.SIGCONT)
    eventually(lambda: second.exists(["cp1/a"]) == [True])
    assert second.get("cp1/a") == b"record"


@pytest.mark.more
def test_nixl_store_strangers_at_its_port_get_nothing_and_end_nothing(
    nixl: str, members: tuple[FarStore, FarStore]
) -> None:
    first, second = members
    address = "127.0.0.1", ports_of(nixl)[0]
    for said in (
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 4096,
        bytes(4096),
        (1 << 30).to_bytes(4, "big") * 8,
    ):
        # The member ends the connection by itself, before all is sent perhaps.
        with socket.create_connection(address, timeout=10) as stranger, suppress(ConnectionError):
            stranger.sendall(said)
            while stranger.recv(4096):
                pass
    wrong = derive_key(b"another secret".ljust(32), salt=None, info=b"cornplug nixl members 1")
    channel = MemberChannel(socket.create_connection(address), wrong, is_client=True, within_s=10)
    channel.send(b"\x94\xa4join\x90\xc4\x00\x00")
    with pytest.raises((OSError, EOFError)):
        channel.receive(10)
    channel.close()
    first.put("cp1/a", b"record")
    eventually(lambda: second.exists(["cp1/a"]) == [True])
    assert second.get("cp1/a") == b"record"


@pytest.mark.more
def test_far_tier_member_that_ends_costs_near_nothing_and_is_found_again(
    host: Hosts, nixl: str, within: TimeLimits
) -> None:
    first, second = host(nixl), host(nixl)
    put(first.store, "a")
    put(second.store, "near")
    eventually(lambda: first.written(1) and second.written(1))
    assert found(second, "a") == payload_of("a", 20 * KIB)
    first.end()
    second.store.start_far_lookup([key_of("x")])
    near_is_quick(second, "near", within)
    eventually(lambda: second.store.tiers([key_of("y")], deadline_s=DEADLINE_S) == bytes([Tier.ABSENT]))
    third = host(nixl)
    put(third.store, "b")
    eventually(lambda: third.written(1))
    assert found(second, "b") == payload_of("b", 20 * KIB)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("nixl://", "it must contain hosts"),
        ("nixl://10.0.0.5:8760", "at least two different hosts"),
        ("nixl://10.0.0.5+10.0.0.5:8760", "at least two different hosts"),
        ("nixl://10.0.0.5+10.0.0.6/path", "it must contain hosts"),
        ("nixl://10.0.0.5+10.0.0.6:port", "'10.0.0.6:port' is not HOST:PORT"),
        ("nixl://10.0.0.5+10.0.0.6:70000", "is not HOST:PORT"),
        ("nixl://10.0.0.5+10.0.0.6?segment=many", "'segment'"),
        ("nixl://10.0.0.5+10.0.0.6?segment=1MiB", "'segment': .*greater than or equal to 67108864"),
        ("nixl://10.0.0.5+10.0.0.6?segments=1GiB", "'segments'"),
        ("nixl://10.0.0.5+10.0.0.6?own=10.0.0.7", "own.*is not one of the hosts"),
    ],
)
def test_open_far_bad_members_are_an_error_naming_the_remedy(url: str, problem: str, tmp_path: Path) -> None:
    with expect_error(ConfigError, field="store.far", match=rf"{problem}.*nixl://10\.0\.0\.5:8760\+10"):
        open_far([url], SECRET, secret_file=tmp_path / "own")


def test_open_far_members_without_nixl_are_an_error_naming_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with expect_error(ConfigError, field="store.far", match="far-nixl"):
        open_far(["nixl://10.0.0.5+10.0.0.6"], SECRET, secret_file=tmp_path / "own")


def test_store_without_its_url_does_not_import_nixl() -> None:
    code = "import sys, cornplug.store.daemon.main, cornplug.store.far.open_far\nprint('nixl' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
