"""KV events of the store's pages under vLLM's own scheduler, beside vLLM's own events of its blocks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import msgspec
import pytest
from collaborators import kept
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.v1.core.block_pool import BlockPool

from cornplug.engine_common import engine_state
from cornplug.engine_common.runtime import NullStore
from cornplug.store.base import Tier
from cornplug.store.memory import MemoryConnection, MemoryStore
from cornplug.testing import FaultyStore
from cornplug.vllm_connector.kv import idle_saves, page_events
from cornplug.vllm_connector.kv.page_events import BlockSpans, PageSpan

from ..kv.core_rig import Clock
from .conftest import Announcing

PROMPT = [(7 * i) % 251 for i in range(150)]  # 4 whole pages of 32, and 22 tokens
EVENTS = page_events.__file__

Make = Callable[..., Announcing]


def page_keys(one: Announcing) -> list[bytes]:
    """Keys of the pages that were announced, as only this process knows them."""
    spans = {id(span): span for span in kept(one.engine.half.events, PageSpan, (BlockPool,))}
    return [key for span in spans.values() for key in span.keys]


def drop(store: MemoryStore, keys: list[bytes]) -> None:
    """As an eviction by the store."""
    assert store.connect().delete(keys, deadline_s=1) == len(keys)


@pytest.mark.parametrize(
    ("how", "blocks"),
    [
        ({}, 8),
        ({"tp": 2}, 8),
        ({"page_tokens": 16}, 9),
        ({"block_size": 64}, 2),  # a block of two pages
        ({"page_tokens": 64}, 8),
    ],
)
def test_page_events_saved_pages_have_the_names_that_vllm_gives_its_blocks(
    announcing: Make, how: dict[str, Any], blocks: int
) -> None:
    one = announcing(**how)
    one.answer(PROMPT)
    one.sleep()
    size = how.get("block_size", 16)
    # Pages that are committed in one step are one event.
    (event,) = one.stored("CPU")
    (own, *_) = one.stored("GPU")
    assert event.block_hashes == own.block_hashes[:blocks]
    assert len(event.block_hashes) == blocks
    assert (event.block_size, event.parent_block_hash, event.group_idx) == (size, None, own.group_idx)
    assert event.token_ids == PROMPT[: blocks * size]
    assert event.extra_keys == own.extra_keys[:blocks]
    assert event.kv_cache_spec_kind == own.kv_cache_spec_kind == "full_attention"
    assert (event.lora_id, event.lora_name) == (None, None)


def test_page_events_pages_that_follow_name_the_block_before(announcing: Make) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    one.answer([*PROMPT[:128], *range(100, 170)])
    one.sleep()
    first, second = one.stored("CPU")
    assert second.parent_block_hash == first.block_hashes[-1]
    assert second.token_ids == list(range(100, 164))


def test_page_events_survive_the_wire_and_hold_no_key_of_the_store(announcing: Make) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    sent = msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=one.events))
    back = msgspec.msgpack.decode(sent, type=KVEventBatch)
    assert [event for event in back.events if event.medium == "CPU"] == one.stored("CPU")
    keys = page_keys(one)
    assert len(keys) == 4
    assert not [key for key in keys if key in sent or key.hex().encode() in sent]


def test_page_events_evicted_pages_are_removed(announcing: Make, store: MemoryStore) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    everything = one.known()
    assert len(everything) == 8
    drop(store, page_keys(one)[2:3])
    one.rest()
    assert len(everything - one.known()) == 2
    drop(store, page_keys(one))
    one.rest()
    assert one.known() == set()
    # What is stored again is announced again.
    one.scheduler.reset_prefix_cache()
    one.answer(PROMPT)
    one.sleep()
    assert one.known() == everything


def test_page_events_hit_on_another_engines_pages_announces_them(announcing: Make) -> None:
    writer, reader = announcing(events=False), announcing()
    writer.answer(PROMPT)
    writer.sleep()
    assert writer.stored("CPU") == []
    reader.answer(PROMPT)
    reader.sleep()
    assert reader.engine.counts["saved_tokens",] == 128
    blocks = [block for event in reader.stored("GPU") for block in event.block_hashes]
    assert reader.known("CPU") == set(blocks[:8])


def test_page_events_page_that_the_store_has_already_is_announced(announcing: Make) -> None:
    writer, other = announcing(), announcing()
    writer.answer(PROMPT)
    writer.sleep()
    other.engine.offers.offered_tokens = lambda tracked, computed: 0
    other.answer(PROMPT)
    other.sleep()
    assert other.saved("present") == 4
    assert other.known() == writer.known()


def test_page_events_idle_save_of_a_finished_request_is_announced(
    announcing: Make, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_saves, "time", clock)
    one = announcing(save="second")
    one.answer(PROMPT)
    one.sleep()
    assert one.saved() == 4
    (event,) = one.stored("CPU")
    assert event.token_ids == PROMPT[:128]


def test_page_events_page_that_goes_to_disk_is_stored_there_and_removed_from_memory(
    announcing: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    everything = one.known("CPU")
    on_disk = set(page_keys(one)[1:])
    peek = MemoryConnection.peek
    moved = lambda self, keys: bytes(  # noqa: E731
        Tier.DISK if key in on_disk else tier for key, tier in zip(keys, peek(self, keys), strict=True)
    )
    monkeypatch.setattr(MemoryConnection, "peek", moved)
    one.events, before = [], one.events
    one.rest()
    assert [type(event).__name__ for event in one.events] == ["BlockStored", "BlockRemoved"]
    assert one.events[0].medium == "STORAGE"
    assert one.events[0].token_ids == PROMPT[32:128]
    one.events = before + one.events
    assert one.known("STORAGE") == everything - one.known("CPU")
    assert len(one.known("CPU")) == 2
    on_disk.clear()
    one.rest()
    assert (one.known("STORAGE"), one.known("CPU")) == (set(), everything)


def test_page_events_reset_of_connectors_removes_what_the_engine_no_longer_takes(announcing: Make) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    one.engine.connector.reset_cache()
    one.scheduler.reset_prefix_cache()
    one.answer(PROMPT)
    one.sleep()
    # The store has the old pages still, and takes no new ones under their keys.
    assert one.saved("present") == 4
    assert one.known() == set()


def test_page_events_reset_of_vllms_own_cache_announces_the_stores_pages_again(announcing: Make) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    before = one.stored("CPU")
    one.events = []
    assert one.scheduler.reset_prefix_cache()
    one.sleep()
    assert [type(event).__name__ for event in one.events] == ["AllBlocksCleared", "BlockStored"]
    assert one.stored("CPU") == before


def test_page_events_replaced_weights_remove_all(announcing: Make) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    assert one.known()
    engine_state.current().mark_weights_unknown(True)
    one.rest()
    assert one.known() == set()


def test_page_events_store_that_is_away_has_no_pages_after_a_while(
    announcing: Make, store: MemoryStore
) -> None:
    faulty = FaultyStore(store.connect())
    one = announcing(connect=lambda: faulty)
    one.answer(PROMPT)
    one.sleep()
    faulty.unavailable = True
    one.rest()
    assert len(one.known()) == 8, "a pause of the store is no eviction"
    one.rest(seconds=2.0)
    assert one.known() == set()


def test_page_events_save_that_fails_is_not_announced_and_lets_the_engine_sleep(
    announcing: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        MemoryConnection, "commit", lambda self, written, *, deadline_s: [False for _ in written]
    )
    one = announcing()
    one.answer(PROMPT)
    assert one.sleep() < 2
    assert one.stored("CPU") == []


def test_page_events_salt_and_adapter_are_in_the_names_as_in_vllms(announcing: Make) -> None:
    one = announcing()
    request = one.add_unscheduled(PROMPT)
    request.cache_salt = "tenant"
    request.lora_request = LoRARequest("french", 7, "/lora")
    spans = BlockSpans(one.pool, one.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec, 0, 32)
    named = spans.span_contents(request, 0, 9)
    assert len(named) == 4, "vLLM has not hashed a block that is not full"
    assert spans.span_contents(request, 4, 1) == []
    assert named[0].extra_keys == [("french", "tenant"), ("french",)]
    event = spans.stored_event(named[1], "CPU")
    assert (event.lora_id, event.lora_name, event.extra_keys) == (7, "french", [("french",)] * 2)


def test_page_events_disabled_make_no_python_call(announcing: Make, config: Any, clock: Clock) -> None:
    def calls(**options: Any) -> tuple[int, int]:
        one, count, in_events = announcing(**options), 0, 0

        def seen(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal count, in_events
            if event == "call":
                name = frame.f_code.co_filename
                count += "cornplug/vllm_connector" in name
                in_events += name.startswith(EVENTS)

        sys.setprofile(seen)
        try:
            one.answer(PROMPT, max_tokens=40)
            one.answer(PROMPT)
        finally:
            sys.setprofile(None)
        one.sleep()
        return count, in_events

    enabled, disabled = calls(), calls(events=False)
    assert enabled[1] > 0
    assert disabled[1] == 0


def test_page_events_step_without_a_look_makes_two_calls(announcing: Make, clock: Clock) -> None:
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    one.rest()
    calls: list[str] = []

    def seen(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith((EVENTS, __file__)):
            calls.append(frame.f_code.co_name)

    sys.setprofile(seen)
    try:
        one.engine.connector.take_events()
    finally:
        sys.setprofile(None)
    assert calls == ["take_events"]


def test_page_events_store_that_tells_no_evictions_is_in_no_event(caplog: pytest.LogCaptureFixture) -> None:
    settings = SimpleNamespace(enable_kv_cache_events=True)
    blind: Any = SimpleNamespace(store=NullStore("off"))
    found = page_events.create_page_events(
        SimpleNamespace(kv_events_config=settings), blind, SimpleNamespace()
    )  # type: ignore[arg-type]
    assert found is None
    assert "does not report evictions" in caplog.text


def test_page_events_look_at_all_pages_in_a_few_seconds(
    announcing: Make, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_events, "_SPANS_PER_CHECK", 1)
    one = announcing()
    one.answer(PROMPT)
    one.sleep()
    drop(store, page_keys(one))
    for left in (6, 4, 2, 0):
        one.clock.now += 0.1
        one.step()
        assert len(one.known()) == left


def test_page_events_name_media_without_their_data(announcing: Make) -> None:
    one = announcing()
    request = one.add_unscheduled(PROMPT)
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    feature = MultiModalFeatureSpec(object(), "image", "cp1-a", PlaceholderRange(offset=2, length=20), "h")  # type: ignore[arg-type]
    request.mm_features = [feature]
    spans = BlockSpans(one.pool, one.scheduler.kv_cache_config.kv_cache_groups[0].kv_cache_spec, 0, 32)
    (named,) = spans.span_contents(request, 0, 1)
    assert named.extra_keys == [(("cp1-a", 2),), (("cp1-a", -14),)]
