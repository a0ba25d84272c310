"""An engine on a second host continues what an engine of the first one has computed, by a far store."""

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

# Together they fit in a test server's pool of 8,192 tokens: what leaves it before a pause is not stored.
ASKS = tuple(Ask(f"{i}. {PREAMBLE} {PREAMBLE} What is a cache?") for i in range(5))


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[TextHost, TextHost]]:
    """They have a folder and a secret in common, and nothing else."""
    sockets, share = Path(tempfile.mkdtemp(prefix="cp-")), tmp_path / "share"
    share.mkdir()
    model = checkpoints.qwen2_text(tmp_path / "model")
    first, second = (
        TextHost(name, model, tmp_path, sockets, "--far", f"file://{share}") for name in ("one", "two")
    )
    yield first, second
    shutil.rmtree(sockets, ignore_errors=True)


def written(store: StoreProcess) -> int:
    """Entries in the far store, once all of this store are there; -1 before."""
    stat = store.stat()
    (far,) = stat.far.values()
    entries = far.writes.get("written", 0)
    return entries if entries >= stat.entries and not far.queued else -1


@pytest.mark.support("Sharing", "another host's prefix, by a far store", engine="{kind}")
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_second_host_engine_takes_prefixes_of_the_first_host(
    hosts: tuple[TextHost, TextHost], tmp_path: Path, kind: str
) -> None:
    # A far store refuses the default secret, which each host makes by chance.
    env = {"CORNPLUG_STORE_SECRET_FILE": str(tmp_path / "secret")}
    answers: list[Answer] = []
    store, engine = hosts[0].store(env), hosts[0].engine(kind, "first", env)
    try:
        store.start()
        engine.start()
        answers = [ask.put(engine) for ask in ASKS]
        pages = sum((answer.prompt_tokens - 1) // 64 for answer in answers)
        wait_for_saves(engine, lambda: written(store) >= pages, what="all pages in the far store")
    finally:
        store.kill()
        engine.kill()
    store, engine = hosts[1].store(env), hosts[1].engine(kind, "second", env)
    try:
        store.start()
        assert store.stat().entries == 0
        engine.start()
        again = [ask.put(engine) for ask in ASKS]
        assert [one.token_ids for one in again] == [one.token_ids for one in answers]
        shareable = sum((answer.prompt_tokens - 1) // 64 * 64 for answer in answers)
        # A request waits 5 to 50 ms for the far store: a machine that is busy just then computes that prompt.
        assert count(engine, "saved_tokens_total", app="second") >= 0.2 * shareable
    finally:
        engine.stop()
        store.stop()
