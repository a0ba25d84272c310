"""CONTRIBUTING's recipe for a store, followed: a package brings one by an entry point, a setting names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from expected_errors import expect_error

from cornplug.commands import doctor
from cornplug.config import StoreConfig, load
from cornplug.encoder_service.client.endpoints import open_local_store
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import ConfigError
from cornplug.store.client import open_store
from cornplug.testing import StoreContract
from cornplug.testing.store import StoreStage, contains, fill

MODULE = """
from cornplug.store.memory import MemoryStore

now_s = 1000.0
shared = MemoryStore(
    capacity_bytes=1 << 20, quarantine_s=5.0, reservation_s=30.0, reclaim_s=600.0, clock=lambda: now_s
)


def open(config, *, autostart=None, connect_timeout_s=None):
    return object() if config.backend == "lent:no store" else shared.connect()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package, as pip would leave it."""
    (tmp_path / "lent_store.py").write_text(MODULE)
    info = tmp_path / "lent_store-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lent-store\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[cornplug.stores]\nlent = lent_store:open\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "lent_store", raising=False)


class TestLentStore(StoreContract):
    @pytest.fixture
    def stage(self, installed: None) -> StoreStage:
        import lent_store  # type: ignore[import-not-found]

        def advance(seconds: float) -> None:
            lent_store.now_s += seconds

        config = StoreConfig(backend="lent:here")
        return StoreStage(
            lambda: open_store(config),
            advance,
            quarantine_s=5.0,
            reservation_s=30.0,
            reclaim_s=600.0,
            raw_view=lambda store, location: store.raw(location),  # type: ignore[attr-defined]
        )


def test_open_store_every_process_gets_the_store_of_the_setting(
    installed: None,
) -> None:
    address = "lent://10.0.0.1:7"
    config = load(environ={"CORNPLUG_STORE_BACKEND": address})
    assert not config.store.socket.exists()
    client = open_local_store(config)
    assert client is not None
    fill(client, "a", b"x")
    assert contains(EngineRuntime(config).store, "a") == b"\1"
    (found,) = doctor.check_other_store(config.store)
    assert (found.status, found.what.startswith(f"{address}: ")) == ("ok", True)
    assert "1 entries" in found.what
    assert not config.store.socket.exists(), "the host's own store is not started beside it"


def test_open_store_object_that_is_no_store_is_an_error(installed: None) -> None:
    with expect_error(ConfigError, field="store.backend", match="'lent'"):
        open_store(StoreConfig(backend="lent:no store"))


def test_open_store_backend_that_no_package_brings_is_an_error_naming_the_known(installed: None) -> None:
    config = StoreConfig(backend="mooncake:10.0.0.1")
    with expect_error(ConfigError, field="store.backend", match="'mooncake'"):
        open_store(config)
    (found,) = doctor.check_other_store(config)
    assert (found.status, "Available stores: lent, pool" in found.what) == ("fail", True)
