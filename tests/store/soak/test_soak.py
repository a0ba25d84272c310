"""A short soak passes, and its verdict reports broken promises."""

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
