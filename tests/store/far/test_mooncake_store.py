"""A Mooncake cluster: a master that dies, one that hangs, and addresses that name none."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from expected_errors import expect_error
from time_limits import TimeLimits

from cornplug.errors import ConfigError
from cornplug.store.base import Tier
from cornplug.store.far.open_far import FarFailure, FarStore, open_far
from cornplug.testing.store import DEADLINE_S, key_of

from ..conftest import eventually
from ..disk.disk_stage import KIB, payload_of, put
from .far_stage import Host, MooncakeMaster
from .test_far_faults import near_is_quick
from .test_far_tier import found

pytest.importorskip("mooncake", reason="there is no wheel of it for every interpreter")

Hosts = Callable[..., Host]


@pytest.fixture
def cluster(mooncake: MooncakeMaster, tmp_path: Path) -> FarStore:
    ((_, store),) = open_far([mooncake.url], b"s" * 32, secret_file=tmp_path / "own").stores
    return store


@pytest.mark.more
def test_mooncake_store_record_takes_the_place_of_an_older_one(cluster: FarStore) -> None:
    for record in (b"old", b"newer" * 1000):
        cluster.put("cp1/a", record)
        assert cluster.get("cp1/a") == record
    assert cluster.get("cp1/b") is None
    assert cluster.exists(["cp1/a", "cp1/b"]) == [True, False]
    cluster.delete(["cp1/a", "cp1/b"])
    assert cluster.exists(["cp1/a", "cp1/b"]) == [False, False]
    with pytest.raises(FarFailure, match="Mooncake's error -"):
        cluster.put("cp1/larger than its segments", bytes(100 << 20))
    cluster.close()
    eventually(lambda: cluster._client.has_exited)  # type: ignore[attr-defined]


@pytest.mark.more
def test_mooncake_store_killed_client_is_replaced(cluster: FarStore) -> None:
    cluster.put("cp1/a", b"record")
    cluster._client._process.kill()  # type: ignore[attr-defined]
    eventually(lambda: cluster._client.has_exited)  # type: ignore[attr-defined]
    assert cluster.exists(["cp1/b"]) == [False]
    cluster.close()


@pytest.mark.more
@pytest.mark.parametrize("hangs", [False, True])
def test_far_tier_master_that_ends_costs_near_nothing_and_is_found_again(
    host: Hosts, mooncake: MooncakeMaster, hangs: bool, within: TimeLimits
) -> None:
    first, second = host(mooncake.url), host(mooncake.url)
    put(first.store, "a")
    put(second.store, "near")
    eventually(lambda: first.written(1) and second.written(1))
    if hangs:
        mooncake.freeze()
    else:
        mooncake.kill()
    asked = itertools.count()

    def noticed() -> bool:
        second.store.start_far_lookup([key_of("a"), key_of(f"asked {next(asked)}")])
        return not second.store.is_far_up

    eventually(noticed)
    assert second.store.tiers([key_of("a")], deadline_s=DEADLINE_S) == bytes([Tier.ABSENT])
    near_is_quick(second, "near", within)
    mooncake.kill()
    mooncake.start()
    eventually(lambda: second.store.is_far_up and first.store.is_far_up)
    numbers = itertools.count()

    def writes_again() -> bool:
        # Until the new master knows its segment, entries have no room there.
        put(first.store, next(numbers), 64)
        time.sleep(0.1)
        return first.far().writes["written"] > 1

    eventually(writes_again)
    put(first.store, "b")
    assert found(second, "b") == payload_of("b", 20 * KIB)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mooncake://", "it must be the address of one master"),
        ("mooncake://master/path", "it must be the address of one master"),
        ("mooncake://master:port", "[Pp]ort"),
        ("mooncake://master?segment=many", "'segment'"),
        ("mooncake://master?segments=1GiB", "'segments'"),
        ("mooncake://master?segment", "bad query field"),
    ],
)
def test_open_far_bad_address_of_a_master_is_an_error_naming_the_remedy(
    url: str, problem: str, tmp_path: Path
) -> None:
    with expect_error(
        ConfigError,
        field="store.far",
        match=rf"{problem}.*mooncake://master:50051\?segment=512MiB",
    ):
        open_far([url], b"s" * 32, secret_file=tmp_path / "own")


def test_store_without_its_url_does_not_import_mooncake() -> None:
    code = "import sys, cornplug.store.daemon.main, cornplug.store.far.open_far\n"
    code += "print('mooncake' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
