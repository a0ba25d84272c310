"""CONTRIBUTING's recipe for a store, followed: a package brings one by an entry point, a setting names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cornplug.config import StoreConfig, load
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import ConfigError
from cornplug.store.backends import open_store
from cornplug.store.memory import MemoryStore
from cornplug.testing import StoreContract
from cornplug.testing.store import StoreStage

MODULE = """
from cornplug.store.memory import MemoryStore

now_s = 1000.0
shared = MemoryStore(
    capacity_bytes=1 << 20, quarantine_s=5.0, reservation_s=30.0, reclaim_s=600.0, clock=lambda: now_s
)


def open(config, *, autostart=None, connect_timeout_s=None):
    return shared.connect()
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

        config = StoreConfig(backend="lent")
        return StoreStage(
            lambda: open_store(config),
            advance,
            quarantine_s=5.0,
            reservation_s=30.0,
            reclaim_s=600.0,
            raw=lambda store, location: store.raw(location),  # type: ignore[attr-defined]
        )


def test_an_engine_opens_the_store_that_the_setting_names(installed: None) -> None:
    store = EngineRuntime(load(environ={"CORNPLUG_STORE_BACKEND": "lent"})).store
    assert isinstance(store, MemoryStore) or type(store).__module__ == "cornplug.store.memory"


def test_a_store_that_nobody_brings_is_an_error_that_names_those_there_are(installed: None) -> None:
    with pytest.raises(ConfigError, match=r"store\.backend.*'mooncake'.*Known here: lent, pool"):
        open_store(StoreConfig(backend="mooncake"))
