"""An engine's log says at start what the host's store holds, in tokens of this model."""

from __future__ import annotations

import logging

import pytest

from cornplug.config import Config
from cornplug.engine_common.runtime import EngineRuntime, NullStore, log_store_size
from cornplug.kv_page import PageGeometry
from cornplug.store.base import Store
from cornplug.store.memory import MemoryStore

LLAMA_8B = PageGeometry(page_tokens=64, heads=8, layers=32, dim=128, dtype="bfloat16")
LOG = logging.getLogger("cornplug.test")


class Runtime(EngineRuntime):
    def __init__(self, store: Store) -> None:
        self.config, self.app, self.secret, self.store = Config(), "test", bytes(32), store


def test_store_size_is_logged_in_tokens_of_model(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(capacity_bytes=100 << 20).connect()
    with caplog.at_level(logging.INFO, "cornplug.test"):
        log_store_size(Runtime(store), LLAMA_8B, 512, LOG)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert record.getMessage() == "cornplug: the store's size is 0.1 GiB = 768 tokens of this model"


def test_store_size_below_own_cache_is_warned_with_setting(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(capacity_bytes=100 << 20).connect()
    log_store_size(Runtime(store), LLAMA_8B, 13_100, LOG)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "768 tokens of this model, which is less than the 13,100 tokens" in record.getMessage()
    assert "store.size_bytes" in record.getMessage()


def test_store_size_of_absent_store_is_unknown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "cornplug.test"):
        log_store_size(Runtime(NullStore("no secret")), LLAMA_8B, 1, LOG)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "cannot compute the store" in record.getMessage()
