"""Pages in far stores: SGLang's storage thread waits for the answers about them, and recalls them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from collaborators import recorded
from keyed_store import KeyedStore
from time_limits import TimeLimits

from cornplug.config import StoreConfig
from cornplug.engine_common.load_policy import LoadRule
from cornplug.sglang_hooks.kv.early_lookup import EarlyLookup
from cornplug.sglang_hooks.kv_pages import costs as kv_costs
from cornplug.sglang_hooks.kv_pages.costs import LoadPace
from cornplug.store.base import Tier
from cornplug.store.client import PoolStore
from cornplug.store.memory import MemoryStore

from ...store.conftest import eventually
from ...store.shelved_store import FarShelvedStore
from ..kv_rig import PLAIN, Engine, sequence

TOKENS = [(7 * i) % 991 for i in range(256)]


def on(store: Any) -> Engine:
    """An engine whose threads use this store."""
    return Engine(store, faulty=store, asks=store)


def ahead(engine: Engine, tokens: list[int] = TOKENS) -> int:
    """What SGLang's scheduler thread finds."""
    engine.knows(tokens)
    lookup = EarlyLookup(engine.index, engine.reader, LoadPace("pays", 1), engine.tally, "test")
    return lookup.count_worth_fetching(array("q", tokens), array("q"), None, PLAIN)


@pytest.fixture
def store() -> KeyedStore:
    return KeyedStore(capacity_bytes=16 << 20)


@pytest.fixture
def saved(store: MemoryStore) -> torch.Tensor:
    """KV of TOKENS, which an engine has saved."""
    writer = Engine(store.connect())
    kv = sequence(writer.geometry, len(TOKENS))
    writer.save(TOKENS, kv)
    return kv


@pytest.fixture
def far(store: KeyedStore, saved: torch.Tensor) -> FarShelvedStore:
    found = FarShelvedStore(store.connect())
    found.shelve_all(store)
    return found


def test_far_pages_that_were_found_are_recalled_and_loaded(far: FarShelvedStore, saved: torch.Tensor) -> None:
    engine = on(far)
    assert ahead(engine) == 64, "a prefetch is queued, for one page at least"
    assert [len(keys) for keys in far.sought] == [1]
    assert torch.equal(engine.load(TOKENS), saved)
    assert [len(keys) for keys in far.sought] == [1, 3]
    assert engine.counts()["cornplug_hits_total", "store"] == 4


def test_far_pages_tiers_are_those_of_a_disk(far: FarShelvedStore) -> None:
    engine = on(far)
    hashes = engine.knows(TOKENS)
    assert engine.reader.tiers(hashes, on_scheduler=True) == [Tier.ABSENT] * 4
    assert engine.reader.tiers(hashes) == [Tier.DISK] * 4, "the windows of a model are looked up so"
    assert far.recalls == []


def test_far_pages_page_that_is_near_under_one_of_its_names_is_not_asked_for(
    store: MemoryStore, saved: torch.Tensor
) -> None:
    far = FarShelvedStore(store.connect())
    engine = Engine(far, page_size=16)  # type: ignore[arg-type]
    engine.run.store = far  # type: ignore[assignment]
    hashes = engine.knows(TOKENS[:64])
    engine.knows([*TOKENS[:32], *range(32)])
    assert engine.reader.count_present(hashes[:2]) == 2
    assert far.sought == []


def test_far_pages_answer_absent_ends_the_wait(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    monkeypatch.setattr(LoadRule, "far_wait_s", lambda self, tokens: 600.0)
    far = FarShelvedStore(store.connect())
    with within(10):
        engine = on(far)
        assert engine.load(TOKENS).shape[3] == 0
    assert len(far.sought) == 1
    assert engine.counts() == {("cornplug_misses_total", "absent"): 4}


def test_far_pages_answer_that_never_comes_is_a_counted_miss(
    far: FarShelvedStore, within: TimeLimits
) -> None:
    far.answers_after = None
    engine, began_s = on(far), time.monotonic()
    with within(20):
        assert engine.load(TOKENS).shape[3] == 0
    assert time.monotonic() - began_s >= 0.005
    assert (len(far.sought), far.recalls) == (1, [])
    assert engine.counts() == {("cornplug_misses_total", "absent"): 4}


def test_early_lookup_without_a_far_store_that_answers_queues_nothing(far: FarShelvedStore) -> None:
    far.is_far_up = False
    engine = on(far)
    assert ahead(engine) == 0
    assert far.sought == []
    assert engine.counts() == {("cornplug_misses_total", "absent"): 4}


def test_early_lookup_after_far_pages_that_were_late_asks_for_none(far: FarShelvedStore) -> None:
    far.looks = None
    engine = on(far)
    assert engine.load(TOKENS).shape[3] == 0
    assert engine.counts() == {("cornplug_misses_total", "disk_late"): 4}
    assert ahead(engine, [1, *TOKENS]) == 0
    assert len(far.sought) == 1


def test_load_pace_waits_for_far_stores_are_no_part_of_a_loads_delay() -> None:
    now = [0.0]
    with recorded(kv_costs, "LoadRule") as rules:
        pace = LoadPace("pays", 1.0, lambda: now[0])
    pace.record_step(1000, 0.0)
    pace.record_queued("a", 100)
    now[0] = 3.0
    pace.record_wait(2.5)
    pace.record_copy(64_000, 0.25)
    pace.record_prefetch_end("a")
    # 0.25 s a copy of this size, and 0.25 s until somebody looked.
    assert rules[0].load_s(64_000) == pytest.approx(0.5)


# -- a real daemon -------------------------------------------------------------------------------

TREE = Path(__file__).parents[3]


def python_with_far() -> str | None:
    """An interpreter with the packages of far stores: SGLang's environment of tests has none of them."""
    for python in (sys.executable, str(TREE / ".venv" / "bin" / "python"), "python"):
        found = subprocess.run([python, "-c", "import cryptography, obstore, valkey"], capture_output=True)
        if found.returncode == 0:
            return python
    return None


@pytest.fixture
def host(short_path: Path) -> Iterator[Callable[[str], StoreConfig]]:
    """Starts the daemon of one more host, with a far store."""
    python, daemons = python_with_far(), list[subprocess.Popen[bytes]]()
    if python is None:
        pytest.skip("no interpreter has cryptography, obstore and valkey")
    (short_path / "secret").write_bytes(b"d" * 32)
    (short_path / "secret").chmod(0o600)

    def start(url: str) -> StoreConfig:
        folder = short_path / f"h{len(daemons)}"
        folder.mkdir(mode=0o700)
        secret, path = short_path / "secret", folder / "s.sock"
        command = [python, "-m", "cornplug.store.daemon.main", "--size", str(16 << 20), "--socket", str(path)]
        command += ["--secret-file", str(secret), "--far", url]
        daemons.append(subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(TREE)}))
        eventually(path.exists)
        return StoreConfig(socket=path, size_bytes=16 << 20, secret_file=secret, autostart=False)

    yield start
    for daemon in daemons:
        daemon.terminate()
        daemon.wait(30)


@pytest.fixture
def connected(host: Callable[[str], StoreConfig]) -> Iterator[Callable[[str], Engine]]:
    """Makes engines, each on a host of its own."""
    stores = list[PoolStore]()

    def make(url: str) -> Engine:
        config = host(url)
        stores.extend(PoolStore(config, connect_timeout_s=10) for _ in range(2))
        eventually(lambda: all(store.is_connected for store in stores))
        return Engine(stores[-1], faulty=stores[-1], asks=stores[-2])

    yield make
    for store in stores:
        store.close()


def test_far_pages_of_second_host_loads_what_the_first_one_wrote(
    connected: Callable[[str], Engine], tmp_path: Path
) -> None:
    url = f"file://{tmp_path}"
    first, second = connected(url), connected(url)
    kv = sequence(first.geometry, len(TOKENS))
    first.save(TOKENS, kv)
    eventually(lambda: len(list(tmp_path.glob("cp1/*"))) == 4)
    assert ahead(second) == 64
    found = list[torch.Tensor]()

    def whole() -> bool:
        # A machine that is busy just then may answer too late for the first one.
        found.append(second.load(TOKENS))
        return found[-1].shape[3] == len(TOKENS)

    eventually(whole, within_s=60)
    assert torch.equal(found[-1], kv)


def test_far_pages_store_that_does_not_answer_is_a_miss_in_time(
    connected: Callable[[str], Engine], monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    monkeypatch.setattr(LoadRule, "far_wait_s", lambda self, tokens: 600.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = connected(f"valkey://127.0.0.1:{silent.getsockname()[1]}/0")
        with within(30, "the daemon gives up after 0.25 s, and says so"):
            assert engine.load(TOKENS).shape[3] == 0
        assert engine.counts() == {("cornplug_misses_total", "absent"): 4}
        store: Any = engine.run.store
        eventually(lambda: not store.is_far_up, within_s=60)
        assert ahead(engine, [1, *TOKENS]) == 0, "no request pays for it again"
