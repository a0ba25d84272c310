"""A store as a process, which commands find by this environment's settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cornplug.config import StoreConfig
from cornplug.store.client import PoolStore
from devkit.processes import StoreProcess, wait_until


@pytest.fixture
def settings(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> StoreConfig:
    made = StoreConfig(
        socket=short_path / "s.sock", secret_file=short_path / "secret", size_bytes=64 << 20, autostart=False
    )
    monkeypatch.setenv("CORNPLUG_STORE_SOCKET", str(made.socket))
    monkeypatch.setenv("CORNPLUG_STORE_SECRET_FILE", str(made.secret_file))
    return made


@pytest.fixture
def store(settings: StoreConfig) -> Iterator[PoolStore]:
    secret = ("--secret-file", str(settings.secret_file))
    with StoreProcess(settings.socket, *secret, size="64MiB"):
        client = PoolStore(settings, connect_timeout_s=20)
        wait_until(lambda: client.is_connected, deadline_s=60, what="a connection")
        yield client
        client.close()
