"""The soak: a short one passes, and its verdict tells broken promises."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console

from cornplug.config import StoreConfig
from cornplug.store.client import PoolStore
from devkit.far_servers import redis_program
from devkit.store_soak.__main__ import run_soak, show
from devkit.store_soak.soak_client import SoakClient
from devkit.store_soak.soak_faults import QUIET_DAEMON_FROM, STEADY_CLIENT, plan_faults
from devkit.store_soak.soak_growth import GrowthBound, ProcessSample, growth
from devkit.store_soak.soak_payload import KEYS, SIZES, key_of, payload_of, size_of
from devkit.store_soak.soak_run import SoakOptions, SoakOutcome
from devkit.store_soak.soak_verdict import LONGEST_S, verdict

_SEALS = bool(importlib.util.find_spec("cryptography"))
_FAR = _SEALS and redis_program() is not None and bool(importlib.util.find_spec("valkey"))
_TIERS = {
    "disk_bytes": SoakOptions.disk_bytes if _SEALS else 0,
    "far_bytes": SoakOptions.far_bytes if _FAR else 0,
}
NEAR_FAULTS = {"kill client", "stop client", "kill daemon", "stop daemon"}
FAR_FAULTS = {"kill far", "stop far"}


def test_soak_payload_of_a_key_is_always_the_same() -> None:
    key = key_of(1, 5)
    assert payload_of(key) == payload_of(key_of(1, 5))
    assert len(payload_of(key)) == size_of(key)
    assert payload_of(key) != payload_of(key_of(2, 5))
    assert {size_of(key_of(1, number)) for number in range(KEYS)} == set(SIZES)


def test_plan_faults_same_seed_same_faults() -> None:
    faults = plan_faults(3, 30, 4)
    assert faults == plan_faults(3, 30, 4)
    assert faults != plan_faults(4, 30, 4)
    assert {fault.kind for fault in faults} == NEAR_FAULTS
    assert {fault.kind for fault in plan_faults(3, 30, 4, far=True)} == NEAR_FAULTS | FAR_FAULTS
    assert all(0 < fault.at_s < 30 for fault in faults)
    assert all(fault.client != STEADY_CLIENT for fault in faults if fault.kind.endswith("client"))
    last = max(fault.at_s for fault in faults if fault.kind == "kill daemon")
    assert last < 30 * QUIET_DAEMON_FROM


def _samples(leak_bytes: int, leak_descriptors: int) -> list[ProcessSample]:
    """Ten minutes; every third look meets a copy of 40 MiB."""
    return [
        ProcessSample(
            at_s=float(second),
            private_bytes=(100 << 20) + leak_bytes * second // 600 + (40 << 20) * (second % 3 == 0),
            descriptors=20 + leak_descriptors * second // 600,
            threads=4,
            arenas=3,
        )
        for second in range(600)
    ]


def test_growth_copies_that_come_and_go_are_none() -> None:
    found = growth(_samples(0, 0), warm_up_s=60)
    assert found is not None
    assert found.private_bytes == 0
    assert found.excess(GrowthBound()) == []


def test_growth_leak_exceeds_its_bound() -> None:
    found = growth(_samples(200 << 20, 100), warm_up_s=60)
    assert found is not None
    memory, descriptors = found.excess(GrowthBound())
    assert "private memory grew" in memory
    assert "descriptors grew" in descriptors


def test_growth_of_a_short_life_is_unknown() -> None:
    assert growth(_samples(0, 0)[:30], warm_up_s=5) is None


def test_verdict_names_each_broken_promise() -> None:
    assert verdict(SoakOutcome(hits=1)) == []
    outcome = SoakOutcome(wrong=["copy of 00"], broken=["client 1 ended"], longest_s={"put": LONGEST_S + 1})
    wrong, ended, nothing, slow = verdict(outcome)
    (unread,) = verdict(SoakOutcome(hits=1, far=Counter({"write: written": 3})))
    assert "far store" in unread
    assert "copy of 00" in wrong
    assert ended == "client 1 ended"
    assert "no entry was read" in nothing
    assert "put" in slow


def test_soak_client_other_bytes_are_reported(
    monkeypatch: pytest.MonkeyPatch, serve_in_thread: object, connect: object, tmp_path: Path,
    store_config: StoreConfig,
) -> None:  # fmt: skip
    """Of a writer that stores other bytes under a key, with right checksums: a reader must find it."""
    serve_in_thread(size_bytes=256 << 20)  # type: ignore[operator]
    store: PoolStore = connect()  # type: ignore[operator]
    report = tmp_path / "report.json"
    client = SoakClient(store, report, 1, 0, 0)
    monkeypatch.setattr("devkit.store_soak.soak_client.KEYS", 3)
    for _ in range(60):
        client.step()
    client.write_report()
    assert '"wrong":[]' in report.read_text()
    monkeypatch.setattr("devkit.store_soak.soak_client.payload_of", lambda key: b"other")
    for _ in range(60):
        client.step()
    assert "other bytes than were written" in report.read_text()


@pytest.mark.more
@pytest.mark.timeout(300)
def test_soak_for_half_a_minute_keeps_the_stores_promises(short_path: Path) -> None:
    """Three clients, fewer than in `script/soak`: CI has two cores."""
    outcome = run_soak(SoakOptions(short_path, 25, clients=3, size_bytes=96 << 20, **_TIERS), Console())
    show(outcome, Console())
    assert verdict(outcome) == []
    assert set(outcome.faults) == NEAR_FAULTS | (FAR_FAULTS if _FAR else set())


@pytest.mark.more
@pytest.mark.timeout(900)
def test_soak_for_five_minutes_keeps_the_stores_promises(short_path: Path) -> None:
    outcome = run_soak(SoakOptions(short_path, 300, seed=2, **_TIERS), Console())
    show(outcome, Console())
    assert verdict(outcome) == []
    assert outcome.samples["client"]
