"""Hosts with addresses of their own, as network namespaces: they share, and a cut cable costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from time_limits import TimeLimits

from cornplug.processes import ManagedProcess
from cornplug.store.base import Tier
from cornplug.testing.store import DEADLINE_S, key_of
from devkit.far_servers import redis_program
from devkit.network_hosts import ADDRESSES, NetworkHosts, reason_against

from ..conftest import eventually
from ..disk.disk_stage import KIB, payload_of, put
from .far_stage import Host
from .test_far_faults import near_is_quick
from .test_far_tier import found

pytestmark = [pytest.mark.more, pytest.mark.skipif(bool(reason_against()), reason=reason_against())]

Hosts = Callable[..., Host]
PORT = 8760


@pytest.fixture
def network() -> Iterator[NetworkHosts]:
    with NetworkHosts() as hosts:
        yield hosts


@pytest.fixture(params=["mooncake", "nixl", "valkey"])
def far_url(request: pytest.FixtureRequest, network: NetworkHosts, tmp_path: Path) -> Iterator[str]:
    """A far store of the network; its server, where it has one, is on host 0."""
    if request.param == "nixl":
        request.getfixturevalue("nixl")  # so that daemons find it
        yield f"nixl://{ADDRESSES[0]}:{PORT}+{ADDRESSES[1]}:{PORT}?segment=64MiB"
        return
    if request.param == "mooncake":
        pytest.importorskip("mooncake", reason="there is no wheel of it for every interpreter")
        command = [
            sys.executable,
            "-m",
            "mooncake.cli",
            f"--rpc_port={PORT}",
            f"--rpc_address={ADDRESSES[0]}",
        ]
        command += ["--metrics_port=8761", "--metrics_host=127.0.0.1", "--client_ttl=2"]
        url = f"mooncake://{ADDRESSES[0]}:{PORT}?segment=64MiB"
    else:
        program = redis_program()
        if program is None:
            pytest.skip("neither valkey-server nor redis-server is installed")
        command = [
            program,
            "--port",
            str(PORT),
            "--bind",
            ADDRESSES[0],
            "--save",
            "",
            "--protected-mode",
            "no",
        ]
        url = f"valkey://{ADDRESSES[0]}:{PORT}/0"
    with ManagedProcess(network.command(0, *command), log=tmp_path / "far.log"):
        yield url


def test_far_tier_of_another_address_is_read_and_one_that_is_cut_off_costs_near_nothing(
    host: Hosts, network: NetworkHosts, far_url: str, within: TimeLimits
) -> None:
    # The server, or the member that writes, is on host 0; host 1 reads, and then loses its cable.
    first, second = (host(far_url, inside=network.command(number)) for number in range(2))
    put(first.store, "a", 1500 * KIB)
    put(second.store, "near")
    eventually(lambda: first.written(1) and second.written(1))
    assert found(second, "a") == payload_of("a", 1500 * KIB)
    network.cut()
    second.store.start_far_lookup([key_of("x")])
    near_is_quick(second, "near", within)
    assert second.store.tiers([key_of("y")], deadline_s=DEADLINE_S) == bytes([Tier.ABSENT])
    network.mend()
    put(first.store, "b")
    assert found(second, "b") == payload_of("b", 20 * KIB)
