"""A first long prompt of a model of real size, into the host's store while the store still grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from subprocess import Popen
from typing import Any

import pytest
from time_limits import TimeLimits

from cornplug import settings
from cornplug.config import StoreConfig
from cornplug.engine_common.page_publish import PagePublisher
from cornplug.sglang_hooks.kv_pages import writer as kv_writer
from cornplug.store.client import PoolStore
from cornplug.store.memory import MemoryStore

# Fixtures of the store's tests.
from ...store.conftest import connect, start_daemon, store_config  # noqa: F401
from ..kv_rig import Engine, sequence

PAGE_BYTES = 8 << 20
"""64 tokens of Llama 3 8B."""
PAGES, HOST = 24, 8
DIM = PAGE_BYTES // (4 * 3 * 2 * 64 * 2)
TOKENS = [(7 * i) % 991 for i in range(512)]


def offered(engine: Engine) -> tuple[list[str], list[int]]:
    """A prompt's pages as SGLang writes them back; of the host pool's few pages each has several hashes."""
    slots = engine.put(sequence(engine.geometry, HOST * 64), 0, HOST)
    return engine.knows([i % 991 for i in range(PAGES * 64)]), [slots[i % HOST] for i in range(PAGES)]


@pytest.mark.more
@pytest.mark.timeout(300)
def test_kv_save_of_first_long_prompt_into_young_daemon_is_whole(
    store_config: StoreConfig,  # noqa: F811
    start_daemon: Callable[..., Popen[str]],  # noqa: F811
    connect: Callable[..., PoolStore],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each round finds less room ready than it asks for: 64 MiB are, beyond the bytes in use."""
    start_daemon("--size", str(256 << 20))
    engine = Engine(connect(), dim=DIM)
    assert engine.geometry.page_bytes in range(PAGE_BYTES - (1 << 16), PAGE_BYTES + 1)
    hashes, slots = offered(engine)
    monkeypatch.setattr(kv_writer, "_ROUND_BYTES", 128 << 20)
    engine.writer.save(hashes, slots)
    assert engine.counts()["cornplug_saves_total", "stored"] == PAGES
    assert engine.reader.count_present(hashes) == PAGES


def test_kv_save_in_slow_rounds_offers_refused_pages_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that take longer than one answer of the store may: as on a busy host."""
    engine = Engine(MemoryStore(capacity_bytes=16 << 20).connect())
    monkeypatch.setattr(settings, "BACKGROUND_TIMEOUT_S", 0.2)
    monkeypatch.setattr(kv_writer, "_ROUND_BYTES", 4 * engine.geometry.page_bytes)
    engine.faulty.growing, engine.faulty.slow_s = 1, 0.15
    engine.save(TOKENS, sequence(engine.geometry, len(TOKENS)))
    assert engine.counts()["cornplug_saves_total", "stored"] == 8


def test_kv_save_into_store_that_grows_one_page_a_call_has_no_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader stops at the first page that is lacking: pages before it come first."""
    engine = Engine(MemoryStore(capacity_bytes=16 << 20).connect())
    stored: list[int] = []
    hashes = engine.knows(TOKENS)
    commit = PagePublisher.commit

    def counted(publisher: PagePublisher, written: Any) -> None:
        commit(publisher, written)
        stored.append(engine.reader.count_leading(hashes)[0])

    monkeypatch.setattr(PagePublisher, "commit", counted)
    monkeypatch.setattr(kv_writer, "_ROUND_BYTES", 4 * engine.geometry.page_bytes)
    engine.faulty.growing = 1
    engine.writer.save(hashes, engine.put(sequence(engine.geometry, len(TOKENS)), 0, 8))
    assert stored == [1, 2, 3, 4, 5, 6, 7, 8]


def test_kv_save_into_store_that_never_grows_ends_by_deadline(within: TimeLimits) -> None:
    engine = Engine(MemoryStore(capacity_bytes=16 << 20).connect())
    engine.faulty.growing = 0
    began = time.monotonic()
    with within(15):
        engine.save(TOKENS, sequence(engine.geometry, len(TOKENS)))
    assert time.monotonic() - began >= engine.run.background_timeout_s
    assert engine.counts()["cornplug_saves_total", "growing"] == 8


def test_kv_save_and_load_end_when_sglang_stops_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives its storage threads 10 s to stop, and ends the server otherwise."""
    store = MemoryStore(capacity_bytes=16 << 20)
    engine = Engine(store.connect())
    monkeypatch.setattr(kv_writer, "_ROUND_BYTES", engine.geometry.page_bytes)
    monkeypatch.setattr(kv_writer, "_STOP_GRACE_S", 0.25)
    engine.faulty.slow_s, engine.stopping = 0.1, True
    pages = engine.knows(TOKENS), engine.put(sequence(engine.geometry, len(TOKENS)), 0, 8)
    engine.writer.save(*pages)
    assert engine.counts()["cornplug_saves_total", "late"] >= 6
    # The next batches of the same operation too.
    engine.writer.save(*pages)
    assert engine.counts()["cornplug_saves_total", "late"] == 8
    engine.faulty.slow_s = 0
    assert engine.load(TOKENS).shape[3] == 0
    stat = store.connect().stat(deadline_s=1)
    assert (stat.reservations, stat.leases) == (0, 0)


def test_kv_save_under_way_when_sglang_stops_its_threads_is_whole() -> None:
    engine = Engine(MemoryStore(capacity_bytes=16 << 20).connect())
    engine.stopping = True
    engine.save(TOKENS, sequence(engine.geometry, len(TOKENS)))
    assert engine.counts()["cornplug_saves_total", "stored"] == 8
