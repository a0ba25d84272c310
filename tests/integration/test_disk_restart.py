"""Everything on the host is killed, and new engines find their prefixes on the store's disk."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from integration.stack import PREAMBLE, Ask, count, wait_for_saves
from integration.text_host import TextHost

from devkit import checkpoints
from devkit.engines import Answer, StoreProcess

ASKS = tuple(Ask(f"{i}. {PREAMBLE} {PREAMBLE} What is a cache?") for i in range(3))


@pytest.fixture
def host(tmp_path: Path) -> Iterator[TextHost]:
    """Its store has a disk."""
    sockets = Path(tempfile.mkdtemp(prefix="cp-"))
    disk = ("--disk", str(tmp_path / "disk"), "--disk-size", "1GiB")
    yield TextHost("host", checkpoints.qwen2_text(tmp_path / "model"), tmp_path, sockets, *disk)
    shutil.rmtree(sockets, ignore_errors=True)


def on_disk(store: StoreProcess) -> int:
    """Entries on disk, once all of the store are there; -1 before."""
    stat = store.stat()
    assert stat.disk is not None
    return stat.disk.entries if stat.disk.entries >= stat.entries and not stat.disk.queued else -1


@pytest.mark.support("Faults", "the host restarts: a prefix from the store's disk", engine="{kind}")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_engine_after_everything_is_killed_takes_its_prefix_from_disk(host: TextHost, kind: str) -> None:
    answers: list[Answer] = []
    store, first = host.store(), host.engine(kind, "first")
    try:
        store.start()
        first.start()
        answers = [ask.put(first) for ask in ASKS]
        pages = sum((answer.prompt_tokens - 1) // 64 for answer in answers)
        wait_for_saves(first, lambda: on_disk(store) >= pages, what="all pages on disk")
    finally:
        store.kill()
        first.kill()
    store, second = host.store(), host.engine(kind, "second")
    try:
        store.start()
        assert store.stat().entries == 0, "nothing is in memory"
        second.start()
        again = [ask.put(second) for ask in ASKS]
        assert [one.token_ids for one in again] == [one.token_ids for one in answers]
        shareable = sum((answer.prompt_tokens - 1) // 64 * 64 for answer in answers)
        assert count(second, "saved_tokens_total", app="second") >= 0.9 * shareable
        stat = store.stat()
        assert stat.disk is not None
        assert stat.disk.reads["read"] >= 0.9 * pages
        assert count(second, "misses_total", reason="disk_late") == 0
    finally:
        second.stop()
        store.stop()
