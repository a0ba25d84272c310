"""Scheduler half and worker halves together, over real stores: every byte, every ending."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
from expected_errors import expect_error
from keyed_store import KeyedStore
from time_limits import TimeLimits
from vllm.v1.outputs import KVConnectorOutput

from cornplug.codec import decode_header, encode_header
from cornplug.config import StoreConfig
from cornplug.engine_common import engine_state, lora_digests
from cornplug.engine_common.load_policy import LoadRule
from cornplug.engine_common.lora_digests import LoraDigests
from cornplug.engine_common.rank_pages import RankPages
from cornplug.errors import CheckpointError, ConfigError
from cornplug.store.client import PoolStore
from cornplug.store.memory import MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.kv import load_offers, page_saves, tracked_requests
from cornplug.vllm_connector.kv.costs import LoadCosts
from cornplug.vllm_connector.kv.metadata import CornplugKVWorkerMetadata
from devkit.processes import StoreProcess

from ..conftest import open_in
from ..rig import BrokenBackend, Engine, tracked_of

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens

Make = Callable[..., Engine]


@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ({}, {}),
        ({}, {"tp": 2}),
        ({"tp": 2}, {}),
        ({"tp": 4}, {"tp": 2, "pp": 2}),
        ({"pp": 2}, {"tp": 8}),
        ({"tp": 8}, {"pp": 4}),
        ({"block_size": 16}, {"block_size": 32}),
        ({"block_size": 128}, {"block_size": 16}),
        ({"block_size": 16}, {"block_size": 128}),
        ({"accelerator": True}, {"tp": 2}),
        ({"tp": 2}, {"accelerator": True}),
        ({"accelerator": True, "tp": 2, "block_size": 64}, {"accelerator": True, "pp": 2}),
        ({"second_runner": True, "accelerator": True}, {"second_runner": True, "tp": 2}),
        ({"kernel_block": 8}, {"block_size": 64, "kernel_block": 16}),
        (
            {"kernel_block": 8, "accelerator": True},
            {"block_size": 64, "kernel_block": 32, "accelerator": True},
        ),
    ],
)
def test_kv_pages_load_across_ranks_and_block_sizes(
    engine: Make, store: MemoryStore, writer: dict[str, Any], reader: dict[str, Any]
) -> None:
    first, second = engine(**writer), engine(**reader)
    first.run("a", PROMPT)
    assert first.counts["saves", "kv_page", "stored"] == 4
    request = second.run("b", PROMPT)
    assert request.external_tokens == 128
    assert second.counts["hits", "kv_page", "store"] == 4
    assert second.counts[("saved_tokens",)] == 128
    assert open_in(store) == (0, 0)


@pytest.mark.parametrize("page_tokens", [16, 64, 128])
def test_kv_pages_of_another_size_are_not_shared(engine: Make, page_tokens: int) -> None:
    engine(page_tokens=page_tokens).run("a", PROMPT)
    assert (
        engine(page_tokens=page_tokens).run("b", PROMPT).external_tokens == 149 // page_tokens * page_tokens
    )
    assert engine(page_tokens=32).run("c", PROMPT).external_tokens == 0


def test_kv_bytes_saved_and_loaded_are_counted(engine: Make) -> None:
    first, second = engine(), engine(tp=2)
    first.run("a", PROMPT)
    second.run("b", PROMPT)
    page_bytes = 4 * 4 * 2 * 32 * 8 * 4
    assert first.counts["bytes", "kv_page", "save"] == 4 * page_bytes
    assert second.counts["bytes", "kv_page", "load"] == 4 * page_bytes


def test_kv_load_leaves_last_token_to_compute(engine: Make) -> None:
    engine().run("a", PROMPT[:128])
    assert engine().run("b", PROMPT[:128]).external_tokens == 96


def test_kv_load_after_local_hit_begins_inside_page(engine: Make) -> None:
    first, second = engine(), engine()
    first.run("a", PROMPT)
    request = second.add("b", PROMPT, local_tokens=16)
    # The engine's own prefix cache has the first block.
    request.blocks = [second.free_blocks.pop(0)]
    for rank in second.ranks:
        rank.compute(request, 16, 0, 16)
    second.settle()
    second.check(request)
    assert request.external_tokens == 112
    assert second.counts[("saved_tokens",)] == 112


@pytest.mark.parametrize("accelerator", [False, True])
@pytest.mark.parametrize("take", [128, 96, 70, 33, 16])
def test_kv_load_shorter_than_offer_is_counted(
    engine: Make, store: MemoryStore, take: int, accelerator: bool
) -> None:
    engine().run("a", PROMPT)
    second = engine(accelerator=accelerator)
    request = second.add("b", PROMPT)
    second.settle(take=take)
    second.check(request)
    assert request.external_tokens == take
    assert second.counts[("saved_tokens",)] == take
    assert second.counts["hits", "kv_page", "store"] == -(-take // 32)
    assert open_in(store) == (0, 0)


def test_kv_save_in_chunked_prefill_stores_page_once(engine: Make, store: MemoryStore) -> None:
    first = engine()
    request = first.add("a", PROMPT)
    first.settle(chunk=10)
    first.check(request)
    assert first.counts == {
        ("misses", "kv_page", "absent"): 4,
        ("saves", "kv_page", "stored"): 4,
        ("bytes", "kv_page", "save"): first.counts["bytes", "kv_page", "save"],
    }
    assert store.connect().stat(deadline_s=1).entries == 4


def test_kv_save_of_generated_tokens_follows_full_pages(engine: Make) -> None:
    first = engine()
    request = first.run("a", PROMPT[:30])
    for token in range(40):
        request.all_token_ids.append(token)
        request.blocks += [first.free_blocks.pop(0)] if len(request.blocks) * 16 < request.num_tokens else []
        first.settle()
    assert first.counts["saves", "kv_page", "stored"] == 2
    assert engine().run("b", request.all_token_ids).external_tokens == 64


def test_kv_load_of_partial_prefix_counts_absent_pages(engine: Make) -> None:
    engine().run("a", PROMPT[:70])
    second = engine()
    assert second.run("b", PROMPT).external_tokens == 64
    assert second.counts["misses", "kv_page", "absent"] == 2
    assert second.counts["saves", "kv_page", "stored"] == 2


def test_kv_pages_of_another_salt_are_not_shared(engine: Make) -> None:
    engine().run("a", PROMPT, cache_salt="x")
    assert engine().run("b", PROMPT, cache_salt="y").external_tokens == 0
    assert engine().run("c", PROMPT).external_tokens == 0
    assert engine().run("d", PROMPT, cache_salt="x").external_tokens == 128


def write_adapter(folder: Path, data: bytes) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(data)


def adapter(folder: Path, number: int = 1) -> Any:
    """vLLM's LoRARequest."""
    return SimpleNamespace(lora_path=str(folder), lora_int_id=number, load_inplace=False)


def test_kv_lora_on_file_system_that_hangs_delays_no_step(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    """Stock reads an adapter's files once, when it loads them."""
    write_adapter(tmp_path, b"1")
    first, answers, look = engine(blocks=128), threading.Event(), lora_digests._signature
    first.run("before", PROMPT[:40], lora_request=adapter(tmp_path))

    def hangs(path: str) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        answers.wait(30)
        return look(path)

    monkeypatch.setattr(lora_digests, "_signature", hangs)
    with within(10, "stock waits for no file"):
        for number in range(20):
            first.add(f"a{number}", PROMPT[:40], lora_request=adapter(tmp_path))
        plain = first.add("plain", PROMPT[:40])
        first.step()
    assert plain.num_computed_tokens == 40
    assert first.counts["misses", "kv_page", "identifying"] >= 20
    answers.set()
    first.settle()


def test_kv_lora_rewritten_and_loaded_again_is_shared_again(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that writes each version to one folder, and unloads and loads it."""
    monkeypatch.setattr(tracked_requests, "BackgroundLoraDigests", LoraDigests)
    write_adapter(tmp_path, b"version 1")
    first = engine()
    first.run("a", PROMPT, lora_request=adapter(tmp_path))
    write_adapter(tmp_path, b"version 2 ")
    first.run("stale", PROMPT, lora_request=adapter(tmp_path))
    assert first.counts["misses", "kv_page", "lora_changed"] == 1
    assert first.run("b", PROMPT, lora_request=adapter(tmp_path, 2)).external_tokens == 0
    assert first.counts["saves", "kv_page", "stored"] == 8
    # Blocks in vLLM's own cache, which names an adapter by its path, may be of version 1.
    request = first.add("c", [7] * 150, lora_request=adapter(tmp_path, 2), local_tokens=64)
    request.blocks = [first.free_blocks.pop(0) for _ in range(4)]
    first.settle()
    assert first.counts["saves", "kv_page", "stored"] == 8
    second = engine(blocks=128)
    assert second.run("d", PROMPT, lora_request=adapter(tmp_path, 3)).external_tokens == 128


def test_kv_lora_loaded_in_place_shares_nothing_from_then_on(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM then reads its files in every step: a request that runs may have KV of two versions."""
    monkeypatch.setattr(tracked_requests, "BackgroundLoraDigests", LoraDigests)
    monkeypatch.setattr(lora_digests, "_reread_ids", set())
    write_adapter(tmp_path, b"version 1")
    first = engine(blocks=128)
    running = first.add("running", PROMPT, lora_request=adapter(tmp_path))
    again = adapter(tmp_path)
    again.load_inplace = True
    first.add("again", [7] * 150, lora_request=again)
    first.settle()
    assert running.num_computed_tokens >= 150
    first.run("later", PROMPT, lora_request=adapter(tmp_path))
    assert first.counts["misses", "kv_page", "lora_reread"] == 3
    assert ("saves", "kv_page", "stored") not in first.counts
    # Loaded under another id, once, it is of one version.
    first.run("other", PROMPT, lora_request=adapter(tmp_path, 2))
    assert first.counts["saves", "kv_page", "stored"] > 0


def test_kv_of_requests_without_adapter_beside_adapters_that_leak_is_not_shared(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a request may have KV of the adapter of another one in its batch."""
    monkeypatch.setattr(tracked_requests, "BackgroundLoraDigests", LoraDigests)
    monkeypatch.setattr(compat, "may_apply_foreign_adapter", lambda config: True)
    write_adapter(tmp_path, b"1")
    first = engine(blocks=128)
    first.run("plain", PROMPT)
    assert first.counts["misses", "kv_page", "lora_neighbour"] == 1
    assert ("saves", "kv_page", "stored") not in first.counts
    first.run("adapted", PROMPT, lora_request=adapter(tmp_path))
    assert first.counts["saves", "kv_page", "stored"] > 0


def test_kv_pages_are_shared_between_equal_loras(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracked_requests, "BackgroundLoraDigests", LoraDigests)
    loras = []
    for name, data in (("x", b"1"), ("y", b"1"), ("z", b"2")):
        write_adapter(tmp_path / name, data)
        loras.append(adapter(tmp_path / name))
    engine().run("a", PROMPT, lora_request=loras[0])
    second = engine(blocks=128)
    assert second.run("b", PROMPT, lora_request=loras[2]).external_tokens == 0
    assert second.run("c", PROMPT).external_tokens == 0
    assert second.run("d", PROMPT, lora_request=loras[1]).external_tokens == 128
    second.run("e", PROMPT, lora_request=adapter(tmp_path))
    assert second.counts["misses", "kv_page", "lora"] == 1


def test_kv_lora_read_on_thread_delays_no_step(
    engine: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    """The first request under it is a miss and holds up nobody; what it computes is saved none the less."""
    write_adapter(tmp_path, b"1")
    lora, reading, read = adapter(tmp_path), threading.Event(), LoraDigests.digest

    def slow(self: LoraDigests, path: str, load: int) -> bytes:
        assert threading.current_thread() is not threading.main_thread()
        reading.wait(30)
        return read(self, path, load)

    monkeypatch.setattr(LoraDigests, "digest", slow)
    first = engine()
    request = first.add("a", PROMPT, lora_request=lora)
    with within(20):
        first.step(chunk=64)
    assert first.counts == {("misses", "kv_page", "identifying"): 1}
    reading.set()
    monkeypatch.setattr(lora_digests, "_CHECK_TIMEOUT_S", 30)
    end_s = time.monotonic() + 30
    while True:
        try:
            first.adapters.digest(lora.lora_path, 1)
            break
        except CheckpointError:
            assert time.monotonic() < end_s, "the adapter stays unread"
            time.sleep(0.001)
    first.settle()
    first.check(request)
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert first.run("b", PROMPT, lora_request=lora).external_tokens == 128


def test_kv_finish_of_unseen_request_leaves_nothing(engine: Make) -> None:
    first = engine()
    first.finish(first.add("a", PROMPT))
    first.connector.update_connector_output(KVConnectorOutput(finished_recving={"unknown"}))
    assert not first.busy()


def test_kv_save_by_two_engines_is_stored_once(engine: Make, store: MemoryStore) -> None:
    first, second = engine(), engine()
    first.add("a", PROMPT)
    second.add("b", PROMPT)
    steps = [(one, one.schedule()) for one in (first, second)]
    for one, step in steps:
        one.update(one.execute(step))
    first.settle()
    second.settle()
    assert second.counts["saves", "kv_page", "pending"] == 4
    assert store.connect().stat(deadline_s=1).entries == 4


# -- damage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [{}, {"tp": 2}, {"block_size": 128}, {"pp": 2}])
@pytest.mark.parametrize("nth", [0, 2, 3])
def test_kv_load_of_corrupt_page_recomputes_and_saves_it(
    engine: Make, store: KeyedStore, nth: int, reader: dict[str, int]
) -> None:
    engine().run("a", PROMPT)
    store.damage(nth)
    second = engine(**reader)
    request = second.run("b", PROMPT)
    assert request.failed
    assert second.counts["misses", "kv_page", "corrupt"] == 1
    assert ("hits", "kv_page", "store") not in second.counts
    # The damaged page and those after it are stored anew: whole prefixes heal at once.
    assert second.counts["saves", "kv_page", "stored"] == 4 - nth
    assert open_in(store) == (0, 0)
    assert engine().run("c", PROMPT).external_tokens == 128


def test_kv_load_bad_blocks_begin_at_corrupt_page(engine: Make, store: KeyedStore) -> None:
    engine(page_tokens=128).run("a", [i % 251 for i in range(520)])
    store.damage(2)
    second = engine(page_tokens=128)
    second.add("b", [i % 251 for i in range(520)])
    seen: list[int] = []
    while not seen:
        step = second.schedule()
        output = second.execute(step)
        if output.invalid_block_ids:
            blocks = second.requests["b"].blocks
            seen = sorted(blocks.index(block) for block in output.invalid_block_ids)
        second.update(output)
    assert seen == list(range(2 * 8, 4 * 8))


def test_kv_load_that_failed_is_not_repeated(engine: Make, store: KeyedStore) -> None:
    engine().run("a", PROMPT)
    store.damage(0)
    second = engine()
    request = second.run("b", PROMPT)
    second.preempt(request)
    request.failed = False
    second.settle()
    second.check(request)
    assert request.external_tokens == 0


@pytest.mark.parametrize("change", [{"dtype": "float16"}, {"shape": (4, 4, 2, 8, 32)}])
def test_kv_page_of_wrong_shape_is_miss_and_deleted(
    engine: Make, store: KeyedStore, change: dict[str, Any]
) -> None:
    engine().run("a", PROMPT)
    one = store.entries()[1]
    header = decode_header(one.meta, key=one.key)
    one.meta = encode_header(msgspec.structs.replace(header, **change))
    second = engine()
    assert second.run("b", PROMPT).external_tokens == 32
    assert second.counts["misses", "kv_page", "wrong_shape"] == 1
    assert open_in(store) == (0, 0)


def test_kv_page_evicted_before_lease_shortens_load(
    engine: Make, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().run("a", PROMPT[:70])
    second = engine(connect=lambda: faulty)
    monkeypatch.setattr(faulty, "contains", lambda keys, deadline_s: b"\1" * len(keys))
    assert second.run("b", PROMPT).external_tokens == 64


def test_kv_page_with_damaged_header_is_miss_and_deleted(engine: Make, store: KeyedStore) -> None:
    engine().run("a", PROMPT)
    second = engine()
    store.entries()[0].meta = b"rubbish"
    assert second.run("b", PROMPT).external_tokens == 0
    assert second.counts["misses", "kv_page", "codec"] == 1
    assert second.counts["saves", "kv_page", "stored"] == 1
    assert open_in(store) == (0, 0)


# -- a store that fails -----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["contains", "lease", "reserve", "commit", "release", "delete", "view"])
@pytest.mark.parametrize("tp", [1, 2])
def test_kv_store_down_at_any_call_is_only_miss(
    engine: Make, store: KeyedStore, method: str, tp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().run("a", PROMPT[:100])
    store.damage(2)
    faults: list[FaultyStore] = []

    def connect() -> Any:
        faults.append(FaultyStore(store.connect()))
        return faults[-1]

    second = engine(connect=connect, tp=tp)

    def die(*args: Any, **kwargs: Any) -> Any:
        for fault in faults:
            fault.unavailable = True
            monkeypatch.setattr(fault, method, type(fault).__dict__[method].__get__(fault))
            if method == "view":
                fault.inner.close()
        if method == "view":
            from cornplug.errors import StoreUnavailable

            raise StoreUnavailable("gone", reason="stale_location")
        return getattr(faults[0], method)(*args, **kwargs)

    for fault in faults:
        monkeypatch.setattr(fault, method, die)
    second.run("b", PROMPT)
    second.run("c", PROMPT[:128])
    reasons = {labels[2] for labels in second.counts if labels[0] in ("misses", "saves")}
    assert reasons & {"store_down", "stale_location", "write_failed"}
    assert not second.connector.has_pending_push_work()
    for request in list(second.requests.values()):
        second.finish(request)
    second.settle()
    assert not second.requests
    assert len(second.free_blocks) == 64


def test_kv_save_to_full_store_is_counted(engine: Make, faulty: FaultyStore) -> None:
    faulty.full = True
    first = engine(connect=lambda: faulty)
    first.run("a", PROMPT)
    assert first.counts["saves", "kv_page", "full"] == 4


def test_kv_save_while_store_grows_is_retried(engine: Make, faulty: FaultyStore) -> None:
    """Of a long first prompt most were never stored: the store was as if full for a moment."""
    first = engine(connect=lambda: faulty)
    faulty.growing = 1
    request = first.add("a", PROMPT)
    first.step(chunk=100)
    assert first.counts["saves", "kv_page", "growing"] == 2
    first.step(chunk=30)
    assert first.counts["saves", "kv_page", "growing"] == 4
    faulty.growing = None
    first.settle()
    first.check(request)
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert engine(connect=lambda: faulty).run("b", PROMPT).external_tokens == 128


def test_kv_load_from_replaced_store_is_miss(engine: Make, store: MemoryStore) -> None:
    engine().run("a", PROMPT)
    other = MemoryStore(capacity_bytes=1 << 20)
    connections = iter([store.connect(), other.connect()])
    second = engine(connect=lambda: next(connections))
    second.run("b", PROMPT)
    assert second.counts["misses", "kv_page", "stale_location"] == 1
    # Its own pages cannot be written either: to the worker they are in another arena.
    second.run("c", [1, *PROMPT])
    assert second.counts["saves", "kv_page", "write_failed"] == 4
    assert open_in(store) == (0, 0)


def test_kv_commit_after_reservation_end_is_counted(engine: Make, store: MemoryStore) -> None:
    connection = store.connect()
    first = engine(connect=lambda: connection)
    first.add("a", PROMPT)
    step = first.schedule()
    tokens = [page.token for save in step.meta.saves for page in save.pages]
    output = first.execute(step)
    first.ranks[0].worker.drain()
    connection.release(tokens, deadline_s=1)
    first.update(output)
    first.settle()
    assert first.counts["saves", "kv_page", "reservation_ended"] == 4


# -- endings ----------------------------------------------------------------------------------


def slow_views(monkeypatch: pytest.MonkeyPatch, engine: Engine, seconds: float) -> None:
    """Every copy of the engine's workers takes so long."""
    held_views(monkeypatch, engine, lambda: time.sleep(seconds))


def held_views(monkeypatch: pytest.MonkeyPatch, engine: Engine, wait: Callable[[], object]) -> None:
    """Every copy of the engine's workers waits first."""
    for name in ("write", "copy"):
        before_each(monkeypatch, name, [rank.pages for rank in engine.ranks], wait)


def before_each(
    monkeypatch: pytest.MonkeyPatch, name: str, ranks: list[RankPages], do: Callable[[], object]
) -> None:
    """Do something before each call of this function of the ranks' pages."""
    original = getattr(RankPages, name)

    def called(pages: RankPages, *args: Any) -> Any:
        if any(pages is one for one in ranks):
            do()
        return original(pages, *args)

    monkeypatch.setattr(RankPages, name, called)


@pytest.mark.parametrize("tp", [1, 2])
def test_kv_request_ends_before_its_save_does(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tp: int
) -> None:
    first = engine(tp=tp)
    slow_views(monkeypatch, first, 0.05)
    request = first.add("a", PROMPT)
    first.step()
    first.finish(request)
    assert not first.requests
    assert len(first.free_blocks) == 64
    assert first.connector.has_pending_push_work()
    first.settle()
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert engine().run("b", PROMPT).external_tokens == 128
    assert open_in(store) == (0, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_kv_save_of_preempted_request_is_given_up(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, tp: int, within: TimeLimits
) -> None:
    """vLLM's second model runner copies and zeroes blocks before it calls `handle_preemptions`."""
    first = engine(tp=tp)
    go = threading.Event()
    held_views(monkeypatch, first, lambda: go.wait(90))
    request = first.add("a", PROMPT)
    first.step()
    first.preempt(request)  # the rig overwrites its blocks at once
    with within(60, "nobody waits for a copy that counts for nothing"):
        step = first.schedule()
        for rank in first.ranks:
            rank.connector.handle_preemptions(step.meta)
    go.set()
    first.update(first.execute(step))
    first.settle()
    assert first.counts["saves", "kv_page", "preempted"] == 4
    first.check(request)
    # What it computed again is offered again once the first room is given back, and is right: `run` looks at
    # every byte.
    for token in range(3):
        request.all_token_ids.append(token)
        first.step()
    first.settle()
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert ("saves", "kv_page", "pending") not in first.counts
    assert engine().run("b", PROMPT).external_tokens == 128
    assert open_in(store) == (0, 0)


def test_kv_save_acknowledged_before_preemption_stays(engine: Make, store: MemoryStore) -> None:
    first = engine()
    request = first.run("a", PROMPT)
    first.preempt(request)
    first.settle()
    assert first.counts["saves", "kv_page", "stored"] == 4
    assert ("saves", "kv_page", "preempted") not in first.counts
    assert engine().run("b", PROMPT).external_tokens == 128


def test_kv_abort_while_loading_keeps_blocks_until_end(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine().run("a", PROMPT)
    second = engine(tp=2)
    slow_views(monkeypatch, second, 0.05)
    request = second.add("b", PROMPT)
    second.step()
    assert request.status == "loading"
    second.finish(request)
    assert "b" in second.requests, "blocks that are being written must not be given away"
    second.settle()
    assert not second.requests
    assert open_in(store) == (0, 0)


def test_kv_abort_with_load_and_saves_frees_request_once(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM asserts that nobody is freed twice: by the end of a load, and by the end of saves."""
    engine().run("a", PROMPT[:100])
    second = engine()
    request = second.add("b", PROMPT)
    while request.status != "running":
        second.step()
        time.sleep(0.01)
    # The step that saves the last page is under way when the request is preempted.
    under_way = second.schedule()
    held = second.execute(under_way)
    second.preempt(request)
    slow_views(monkeypatch, second, 0.05)
    resumed = second.schedule()
    assert request.status == "loading"
    assert tracked_of(second, "b").open_saves
    second.finish(request)
    second.update(held)
    second.update(second.execute(resumed))
    second.settle()
    assert not second.requests
    assert open_in(store) == (0, 0)


def test_kv_offer_declined_releases_leases(engine: Make, store: MemoryStore) -> None:
    engine().run("a", PROMPT)
    second = engine()
    second.add("b", PROMPT)
    second.settle(take=0)
    assert second.requests["b"].external_tokens == 0
    assert open_in(store) == (0, 0)


def test_kv_offer_never_taken_releases_leases(engine: Make, store: MemoryStore) -> None:
    engine().run("a", PROMPT)
    second = engine(blocks=2)
    request = second.add("b", PROMPT)
    second.step()
    assert request.status == "waiting"
    assert open_in(store) == (4, 0)
    second.finish(request)
    second.step()
    assert open_in(store) == (0, 0)


def test_kv_offer_is_remembered_and_leases_renewed(
    engine: Make, faulty: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(connect=lambda: faulty)
    first.run("a", PROMPT)
    request = first.add("b", PROMPT)
    before = dict(faulty.calls)
    for _ in range(50):
        assert first.connector.get_num_new_matched_tokens(request, 0) == (128, True)
    assert faulty.calls["lease"] == before.get("lease", 0) + 1
    later = time.monotonic() + 11
    monkeypatch.setattr("cornplug.vllm_connector.kv.load_offers.time.monotonic", lambda: later)
    assert first.connector.get_num_new_matched_tokens(request, 0) == (128, True)
    assert faulty.calls["lease"] == before.get("lease", 0) + 2
    # Another local hit asks anew as well.
    assert first.connector.get_num_new_matched_tokens(request, 32) == (96, True)
    first.finish(request)
    first.step()
    assert faulty.stat(deadline_s=1).leases == 0


def test_kv_saves_of_two_steps_in_flight_are_stored(engine: Make, store: MemoryStore) -> None:
    """Async scheduling: the next step is made before the last one's output has been seen."""
    first = engine()
    one, two = first.add("a", PROMPT), first.add("b", [1, *PROMPT])
    steps = [first.schedule(chunk=40)]
    for _ in range(8):
        steps.append(first.schedule(chunk=40))
        first.update(first.execute(steps.pop(0)))
    first.update(first.execute(steps.pop(0)))
    first.settle()
    first.check(one)
    first.check(two)
    reader = engine()
    assert reader.run("c", PROMPT).external_tokens == 128
    assert reader.run("d", [1, *PROMPT]).external_tokens == 128


# -- what pays --------------------------------------------------------------------------------


def rule_of(engine: Engine) -> Any:
    return engine.costs.rule


def test_kv_costs_unmeasured_load_is_tried_and_measured(
    engine: Make, monkeypatch: pytest.MonkeyPatch, within: TimeLimits
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(compat.logger, "info", lambda form, *args: lines.append(form % args))
    first = engine(load_when="pays")
    first.run("a", PROMPT)
    prefill_s = rule_of(first).compute_s(100)
    assert prefill_s is not None
    assert prefill_s >= 0
    within.check(prefill_s, 5)
    assert rule_of(first).load_s(1 << 20) is None
    second = engine(load_when="pays", tp=2)
    second.run("other", [1, *PROMPT])
    noticed = LoadRule.record_delay
    with mock.patch.object(LoadRule, "record_delay", autospec=True, side_effect=noticed) as noted:
        assert second.run("b", PROMPT).external_tokens == 128, "no load was measured yet: it is tried"
    load_s = rule_of(second).load_s(1 << 20)
    assert load_s is not None
    assert load_s > 0
    within.check(load_s, 5)
    assert noted.called, "what the engine's steps delay a load is not measured"
    [said] = [line for line in lines if "measured: KV loads at" in line]
    assert "prefill at" in said


def test_kv_costs_cheaper_prefill_skips_load_and_save(engine: Make, faulty: FaultyStore) -> None:
    engine().run("a", PROMPT)
    second = engine(connect=lambda: faulty, load_when="pays")
    for _ in range(50):
        rule_of(second).record_step(1000, 0.001)
        rule_of(second).record_transfer(1 << 20, 10.0)
    assert second.run("b", PROMPT).external_tokens == 0
    assert second.counts["misses", "kv_page", "cheaper"] == 4
    assert "lease" not in faulty.calls
    assert "reserve" not in faulty.calls, "what is there is not offered"
    for _ in range(100):
        rule_of(second).record_step(1000, 1000.0)
        rule_of(second).record_transfer(1 << 20, 0.001)
    assert second.run("c", PROMPT).external_tokens == 128


@pytest.mark.parametrize(("lease_s", "stored"), [(30.0, 0), (-1.0, 4)])
def test_kv_costs_pages_evicted_while_a_request_waits_are_saved(
    engine: Make, store: MemoryStore, lease_s: float, stored: int
) -> None:
    engine().run("a", PROMPT)
    second = engine(load_when="pays")
    request = second.add("b", PROMPT)
    with (
        mock.patch.object(load_offers, "LEASE_S", lease_s),
        mock.patch.object(LoadCosts, "should_load", return_value=False),
    ):
        assert second.connector.get_num_new_matched_tokens(request, 0) == (0, False)
        store.connect().delete([entry.key for entry in store.entries()], deadline_s=1)
        second.settle()
    assert second.counts.get(("saves", "kv_page", "stored"), 0) == stored


def test_kv_costs_of_queued_load_include_its_wait(engine: Make) -> None:
    engine().run("a", PROMPT)
    second = engine(load_when="pays")
    page_bytes = 4 * 4 * 2 * 32 * 8 * 4

    def measured() -> None:
        for _ in range(100):
            rule_of(second).record_step(100, 0.1)  # 4 pages: 0.128 s
            rule_of(second).record_transfer(page_bytes, 0.01)  # 4 pages: 0.04 s

    measured()
    costs = second.costs
    costs.begin_load("another", 20)
    assert second.run("b", PROMPT).external_tokens == 0
    costs.end_load("another", is_complete=False)
    measured()
    assert second.run("c", PROMPT).external_tokens == 128
    assert costs.queued_bytes == 0


def test_kv_load_past_deadline_is_recomputed(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cornplug.vllm_connector.kv_copies.block_copies._DIRECT_TOKENS", 32)  # a page a slab
    engine().run("a", PROMPT)
    second = engine(load_when="pays")
    slow_views(monkeypatch, second, 0.2)
    monkeypatch.setattr(rule_of(second), "compute_s", lambda tokens: 0.1)
    monkeypatch.setattr("cornplug.vllm_connector.kv.costs._LOAD_FLOOR_S", 0.3)
    request = second.run("b", PROMPT)
    assert request.failed
    assert second.counts["misses", "kv_page", "load_timeout"] == 1
    second.finish(request)
    second.settle()
    assert open_in(store) == (0, 0)


def test_kv_costs_deadline_follows_prefill_time(engine: Make) -> None:
    costs = engine(load_when="pays").costs
    assert costs.deadline_s(1000) == 20
    for _ in range(50):
        costs.rule.record_step(1000, 1.0)
    assert costs.deadline_s(1000) == pytest.approx(3.0, rel=0.01)
    assert costs.deadline_s(10) == 1.0
    assert costs.deadline_s(1_000_000) == 20
    assert engine().costs.deadline_s(10) == 20


def test_kv_save_over_byte_limit_is_busy(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 4 * 4 * 2 * 32 * 8 * 4
    monkeypatch.setattr(page_saves, "MAX_OPEN_SAVES_BYTES", 3 * page_bytes)
    first = engine()
    slow_views(monkeypatch, first, 0.05)
    first.run("a", PROMPT)
    assert first.counts["saves", "kv_page", "busy"] == 1
    assert first.counts["saves", "kv_page", "stored"] == 3
    assert engine().run("b", PROMPT).external_tokens == 96


# -- what shares nothing ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"prompt_embeds": object()}, "prompt_embeds"), ({"resumable": True}, "streaming")],
)
def test_kv_request_without_page_keys_shares_nothing(
    engine: Make, store: MemoryStore, fields: dict[str, Any], reason: str
) -> None:
    first = engine()
    first.run("a", PROMPT, **fields)
    assert first.counts == {("misses", "kv_page", reason): 1}
    assert store.connect().stat(deadline_s=1).entries == 0


def test_kv_request_skipping_prefix_cache_loads_nothing(engine: Make) -> None:
    engine().run("a", PROMPT)
    assert engine().run("b", PROMPT, skip_reading_prefix_cache=True).external_tokens == 0


def test_kv_replaced_weights_end_sharing(engine: Make, store: MemoryStore) -> None:
    engine().run("a", PROMPT)
    second = engine()
    waiting = second.add("b", PROMPT)
    assert second.connector.get_num_new_matched_tokens(waiting, 0)[0] == 128
    engine_state.current().mark_weights_unknown()
    second.settle()
    second.check(waiting)
    assert waiting.external_tokens == 0
    second.run("c", [9, *PROMPT])
    assert second.counts == {("misses", "kv_page", "weights_updated"): 1}
    second.finish(waiting)
    second.step()
    assert open_in(store) == (0, 0)
    assert store.connect().stat(deadline_s=1).entries == 4


def test_kv_unidentified_model_shares_nothing(engine: Make) -> None:
    def no_identity(config: Any) -> Any:
        raise CheckpointError("no safetensors", reason="no_weights")

    first = engine(identity=no_identity)
    first.run("a", PROMPT)
    assert first.counts == {("misses", "kv_page", "no_weights"): 1}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_kv_identity_error_ends_identifying(engine: Make) -> None:
    def broken(config: Any) -> Any:
        raise KeyError("rope_parameters")

    first = engine(identity=broken)
    first.run("a", PROMPT)
    assert first.counts == {("misses", "kv_page", "identity_error"): 1}


def test_kv_requests_while_weights_are_read_are_misses(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornplug.engine_common.weights_guard.INITIAL_WAIT_S", 0.01)

    read = threading.Event()

    def slow(config: Any) -> Any:
        assert read.wait(60)
        return b"lm" * 16, {"model": "rig"}

    first = engine(identity=slow)
    first.run("a", PROMPT)
    assert first.counts == {("misses", "kv_page", "identifying"): 1}
    read.set()
    assert first.identity.current()[1].wait(30)
    first.run("b", [3, *PROMPT])
    assert first.counts["saves", "kv_page", "stored"] == 4


@pytest.mark.parametrize("tp", [1, 2])
def test_kv_layout_refused_by_worker_recomputes_load(engine: Make, store: MemoryStore, tp: int) -> None:
    """One rank is enough; the request that came before the scheduler knew is recomputed."""
    engine().run("a", PROMPT)
    backends = [BrokenBackend()] * tp
    second = engine(tp=tp, backends=backends)
    second.run("b", PROMPT)
    assert second.counts["misses", "kv_page", "layout"] == 1
    second.run("c", [1, *PROMPT])
    assert second.counts["misses", "kv_page", "layout"] == 2
    assert open_in(store) == (0, 0)


def test_kv_load_failed_by_two_ranks_is_one_miss(engine: Make) -> None:
    engine().run("a", PROMPT)
    second = engine(tp=2)
    second.add("b", PROMPT)
    step = second.schedule()
    for _rank in range(2):
        second.half.handle_acks(CornplugKVWorkerMetadata(failed_loads={"b": "layout"}))
    second.update(second.execute(step))
    second.settle()
    assert second.counts["misses", "kv_page", "layout"] == 1


def test_kv_layout_with_extra_layer_fails_load_and_save(engine: Make, store: MemoryStore) -> None:
    """A draft model's layer in the group: only the worker finds out."""
    engine().run("a", PROMPT)
    second = engine(extra_layers=1)
    second.add("b", PROMPT)
    second.add("new", [5, *PROMPT])
    second.settle()
    assert second.requests["b"].failed
    assert second.counts["misses", "kv_page", "layout"] == 1
    assert second.counts["saves", "kv_page", "write_failed"] == 4
    for request in list(second.requests.values()):
        second.finish(request)
    second.settle()
    assert not second.requests
    assert open_in(store) == (0, 0)


@pytest.mark.parametrize("tp", [1, 2])
def test_kv_draft_layers_travel_with_their_model(engine: Make, tp: int) -> None:
    """Otherwise a draft would read blocks of other requests behind a loaded prefix, and propose badly."""
    engine(draft=1).run("a", PROMPT)
    second = engine(draft=1, tp=tp)
    second.run("b", PROMPT)
    assert second.requests["b"].external_tokens == len(PROMPT) // 32 * 32


def test_kv_engine_without_the_draft_shares_none_of_its_pages(engine: Make) -> None:
    engine(draft=1).run("a", PROMPT)
    second = engine()
    second.run("b", PROMPT)
    assert second.requests["b"].external_tokens == 0
    third = engine()
    third.run("c", PROMPT)
    assert third.requests["c"].external_tokens > 0


def test_kv_draft_beside_pipeline_parallelism_shares_nothing(engine: Make, store: MemoryStore) -> None:
    engine(draft=1, pp=2).run("a", PROMPT)
    assert store.connect().stat(deadline_s=1).entries == 0


def test_kv_context_parallel_engine_shares_nothing(engine: Make, store: MemoryStore) -> None:
    first = engine(context_parallel=2)
    first.run("a", PROMPT)
    assert first.counts == {}
    assert store.connect().stat(deadline_s=1).entries == 0
    assert not first.connector.has_pending_push_work()


def test_kv_share_kv_off_counts_nothing(engine: Make) -> None:
    first = engine(share_kv=False)
    first.run("a", PROMPT)
    assert first.counts == {}


def test_kv_policy_fail_error_names_remedy(engine: Make) -> None:
    with expect_error(ConfigError, field="kv_load_failure_policy", match="recompute"):
        engine(policy="fail")


def test_kv_copy_error_ends_load_and_save(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine().run("a", PROMPT[:70])
    second = engine()

    def out_of_memory() -> None:
        raise RuntimeError("CUDA out of memory")

    for name in ("write", "copy"):
        before_each(monkeypatch, name, [second.ranks[0].pages], out_of_memory)
    request = second.run("b", PROMPT)
    assert request.failed
    assert second.counts["misses", "kv_page", "load_error"] == 1
    assert second.counts["saves", "kv_page", "write_failed"] == 2
    second.finish(request)
    second.settle()
    assert not second.requests
    assert open_in(store) == (0, 0)


def test_kv_reservation_stays_until_slowest_rank_wrote(
    engine: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(tp=2)
    broken, slow = (rank.pages for rank in first.ranks)

    def fails() -> None:
        raise RuntimeError("broken")

    before_each(monkeypatch, "write", [broken], fails)
    before_each(monkeypatch, "write", [slow], lambda: time.sleep(0.2))
    first.add("a", PROMPT[:40])
    for _ in range(5):
        first.step()
        time.sleep(0.01)
    assert open_in(store) == (0, 1)
    first.settle()
    assert open_in(store) == (0, 0)
    assert first.counts["saves", "kv_page", "write_failed"] == 1


def test_kv_connector_unregister_before_sleep_ends_copies(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, written = engine(), list[Any]()
    slow_views(monkeypatch, first, 0.05)
    write = RankPages.write
    monkeypatch.setattr(RankPages, "write", lambda *args: written.append(write(*args)) or written[-1])
    first.add("a", PROMPT)
    output = first.execute(first.schedule())
    assert len(written) < 4
    first.ranks[0].connector.unregister_kv_caches()
    assert len(written) == 4
    first.update(output)
    first.settle()


def test_kv_pages_pass_through_real_daemon(engine: Make, short_path: Any) -> None:
    config = StoreConfig(socket=short_path / "s.sock", autostart=False, deadline_s=2.0)
    with StoreProcess(config.socket, size="32MiB", log=short_path / "log"):
        stores: list[PoolStore] = []

        def connect() -> PoolStore:
            stores.append(PoolStore(config))
            return stores[-1]

        first = engine(connect=connect, tp=2, deadline_s=2.0)
        second = engine(connect=connect, deadline_s=2.0)
        first.finish(first.run("a", PROMPT))
        second.finish(second.run("b", PROMPT))
        first.settle()
        second.settle()
        assert second.counts["hits", "kv_page", "store"] == 4
        stat = stores[0].stat(deadline_s=2)
        assert (stat.entries, stat.leases, stat.reservations) == (4, 0, 0)
        for one in stores:
            one.close()
