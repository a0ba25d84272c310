from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
import torch
from time_limits import TimeLimits

from cornplug.codec import PayloadKind
from cornplug.config import StoreConfig
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest, WireTensor
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.errors import EncoderRefused, EncoderUnavailable
from cornplug.metrics import Tally
from cornplug.sglang_hooks.media import embedding_prefetch, placeholder_tokens
from cornplug.sglang_hooks.media.embedding_prefetch import EmbeddingPrefetcher, source_of
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, get_payload, put_payload
from cornplug.testing import FaultyStore
from devkit.strangers import NOBODY, listener

from ..media_rig import SECRET, TOWER, Service, item, runtime

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
KEYS = [bytes([i]) * 32 for i in range(4)]


@pytest.fixture
def store() -> FaultyStore:
    return FaultyStore(MemoryStore(capacity_bytes=1 << 20).connect())


def tower(served: bytes | None = TOWER) -> TowerIdentity:
    return TowerIdentity(b"i" * 32, served, ("pixel_values", "image_grid_thw"))


class Stage:
    def __init__(self, store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.service = Service()
        monkeypatch.setattr(embedding_prefetch, "engine_encoder", lambda config, secret: self.service)
        self.tally = Tally()
        self.run = runtime(store)
        self.prefetcher = EmbeddingPrefetcher(self.run, self.tally)
        self.store = store

    def prepare(
        self, *keys: bytes, served: bytes | None = TOWER, salt: str | None = None
    ) -> list[str | None]:
        items = []
        for i, key in enumerate(keys):
            one = item(i)
            placeholder_tokens.assign_key(one, key)
            items.append(one)
        asyncio.run(self.prefetcher.prepare(items, lambda _: tower(served), salt))
        return [source_of(one) for one in items]

    def publish(self, key: bytes) -> None:
        put_payload(
            self.store,
            NewPayload(bytes(96), PayloadKind.EMBEDDING, key=key, dtype="float32", shape=(4, 6)),
            app="x",
            deadline_s=1,
        )

    def missed(self) -> dict[str, float]:
        rows = self.tally.drain().get("cornplug_misses_total", [])
        return {labels[2]: values[0] for labels, values in rows}


@pytest.fixture
def here(store: FaultyStore, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(store, monkeypatch)


def encoded(
    origin: Any = "computed", tensor: WireTensor | None = None
) -> Callable[[EncodeRequest], EncodeReply]:
    return lambda request: EncodeReply(
        id=1, key=request.key, origin=origin, stored=tensor is None, tensor=tensor, service_time_s=0.1
    )


def test_prefetch_inputs_hold_only_fields_of_family() -> None:
    """Not what else SGLang's processor keeps: the service refuses what its tower does not take."""
    one = item()
    one.model_specific_data["num_crops"] = torch.tensor([0])
    assert set(embedding_prefetch._tower_inputs(one, ("pixel_values", "image_grid_thw"))) == {
        "pixel_values",
        "image_grid_thw",
    }
    assert set(embedding_prefetch._tower_inputs(one, ("pixel_values",))) == {"pixel_values"}


def test_prefetch_inputs_with_image_sizes_are_refused() -> None:
    """SGLang keeps (width, height), where everybody else has (height, width)."""
    one = item()
    one.model_specific_data["image_sizes"] = [(70, 60)]
    with pytest.raises(EncoderRefused) as error:
        embedding_prefetch._tower_inputs(one, ("pixel_values", "image_sizes"))
    assert error.value.reason == "no_inputs"


def test_prefetch_of_stored_embedding_asks_no_encoder(here: Stage) -> None:
    here.publish(KEYS[0])
    assert here.prepare(KEYS[0]) == ["store"]
    assert not here.service.asked
    assert here.missed() == {}


def test_prefetch_deadline_follows_measured_tower_time(here: Stage) -> None:
    """A tower of 50 ms does not wait 10 s: its scheduler process says what it takes."""
    here.service.answer = encoded()
    here.prepare(KEYS[0])
    engine_state.current().publish_costs(encode_row_s=0.4, is_fetch_faster=True)
    here.prepare(KEYS[1])
    engine_state.current().publish_costs(encode_row_s=0.001, is_fetch_faster=True)
    here.prepare(KEYS[2])
    waited = [request.deadline_s for request in here.service.asked]
    assert waited == pytest.approx([10.0, 3 * 4 * 0.4, 0.5], abs=0.2)


def test_prefetch_dearer_than_tower_is_skipped(here: Stage) -> None:
    here.publish(KEYS[0])
    engine_state.current().publish_costs(encode_row_s=1e-6, is_fetch_faster=False)
    assert here.prepare(KEYS[0], KEYS[1]) == [None, None]
    assert not here.service.asked
    assert here.missed() == {"cheaper": 2}
    always = StoreConfig(load_when="always")
    here.run.config = here.run.config.model_copy(update={"store": always})
    assert here.prepare(KEYS[0]) == ["store"]


def test_prefetch_request_holds_tower_inputs_and_salt(here: Stage, within: TimeLimits) -> None:
    here.service.answer = encoded("coalesced")
    assert here.prepare(KEYS[0], salt="s") == ["service_coalesced"]
    (asked,) = here.service.asked
    assert (asked.identity, asked.key, asked.cache_salt, asked.app) == (TOWER, KEYS[0], "s", "test")
    assert {name: tensor.shape for name, tensor in asked.inputs.items()} == {
        "pixel_values": (16, 6), "image_grid_thw": (1, 3),
    }  # fmt: skip
    assert asked.deadline_s <= 10
    within.check(10 - asked.deadline_s, 1)


def test_prefetch_of_repeated_image_asks_once(here: Stage) -> None:
    here.service.answer = encoded()
    assert here.prepare(KEYS[0], KEYS[1], KEYS[0]) == ["service_computed"] * 3
    assert len(here.service.asked) == 2


def test_prefetch_of_unkeyed_items_is_skipped(here: Stage) -> None:
    """Nor is what SGLang itself has named since."""
    here.service.answer = encoded()
    nameless, renamed, ours = item(1), item(2), item(3)
    placeholder_tokens.assign_key(renamed, KEYS[2])
    renamed.set_hash(7)
    placeholder_tokens.assign_key(ours, KEYS[3])
    asyncio.run(here.prefetcher.prepare([nameless, renamed, ours], lambda _: tower(), None))
    assert [source_of(one) for one in (nameless, renamed, ours)] == [None, None, "service_computed"]
    assert [asked.key for asked in here.service.asked] == [KEYS[3]]


def test_prefetch_with_encoder_down_is_miss_without_wait(here: Stage, within: TimeLimits) -> None:
    here.service.answer = lambda request: EncoderUnavailable("gone", reason="encoder_down")
    with within(8, "its deadline is 10 s"):
        assert here.prepare(KEYS[0], KEYS[1]) == [None, None]
    assert here.missed() == {"encoder_down": 2}
    # It may be back at any moment.
    here.service.answer = encoded()
    assert here.prepare(KEYS[2]) == ["service_computed"]


def test_prefetch_with_encoder_down_packs_no_inputs(here: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[Any] = []
    monkeypatch.setattr(embedding_prefetch, "_tower_inputs", lambda *args: packed.append(args))
    monkeypatch.setattr(here.service, "refusal", EncoderUnavailable("gone", reason="encoder_down"))
    assert here.prepare(KEYS[0]) == [None]
    assert here.missed() == {"encoder_down": 1}
    assert packed == []


def test_prefetch_after_overload_backs_off(here: Stage) -> None:
    here.service.answer = lambda request: EncoderRefused("full", reason="overloaded")
    assert here.prepare(KEYS[0]) == [None]
    here.service.answer = encoded()
    assert here.prepare(KEYS[1]) == [None]
    assert len(here.service.asked) == 1
    assert here.missed() == {"overloaded": 1, "encoder_backoff": 1}


def test_prefetch_of_request_that_has_waited_asks_no_encoder(here: Stage) -> None:
    here.service.answer = encoded()
    here.publish(KEYS[0])

    def waited() -> list[str | None]:
        embedding_prefetch.has_waited.set(True)
        return here.prepare(KEYS[0], KEYS[1])

    assert copy_context().run(waited) == ["store", None]
    assert here.missed() == {"encoder_timeout": 1}
    assert not here.service.asked
    assert here.prepare(KEYS[2]) == ["service_computed"], "the next request asks"


def test_prefetch_of_unserved_model_asks_no_encoder(here: Stage) -> None:
    assert here.prepare(KEYS[0], served=None) == [None]
    assert here.missed() == {"not_served": 1}
    assert not here.service.asked


def test_prefetch_with_store_down_asks_no_encoder(here: Stage) -> None:
    here.store.unavailable = True
    assert here.prepare(KEYS[0]) == [None]
    assert here.missed() == {"store_down": 1}
    assert not here.service.asked


def test_prefetch_error_that_nothing_foresaw_is_miss(here: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nothing foresaw this")

    monkeypatch.setattr(embedding_prefetch, "recall_and_wait", fails)
    assert here.prepare(KEYS[0]) == [None]
    assert here.missed() == {"error": 1}


def test_prefetch_from_slow_store_leaves_event_loop_free(here: Stage, within: TimeLimits) -> None:
    here.store.slow_s = 30
    turns = 0

    async def run() -> None:
        nonlocal turns
        one = item()
        placeholder_tokens.assign_key(one, KEYS[0])
        waiting = asyncio.create_task(here.prefetcher.prepare([one], lambda _: tower(), None))
        while not waiting.done():
            turns += 1
            await asyncio.sleep(0.005)

    with within(20):
        asyncio.run(run())
    assert turns > 5
    assert here.missed() == {"store_timeout": 1}


def test_prefetch_of_inline_reply_stores_it(here: Stage) -> None:
    tensor = WireTensor("float32", (4, 6), bytes(range(96)))
    here.service.answer = encoded("computed", tensor)
    assert here.prepare(KEYS[0]) == ["service_computed"]
    found = get_payload(here.store, KEYS[0], deadline_s=1)
    assert found is not None
    assert bytes(found[1]) == tensor.data
    here.store.full = True
    assert here.prepare(KEYS[1]) == [None]
    assert here.missed() == {"store_full": 1}


def test_prefetch_reply_for_other_key_is_miss(here: Stage) -> None:
    here.service.answer = lambda request: EncodeReply(
        id=1, key=KEYS[3], origin="computed", stored=True, tensor=None, service_time_s=0
    )
    assert here.prepare(KEYS[0]) == [None]
    assert here.prepare(KEYS[1]) == [None]
    assert here.missed() == {"encoder_bad_response": 1, "encoder_backoff": 1}, "as in vLLM's room"


@pytest.mark.parametrize(
    "tensor",
    [WireTensor("float32", (3, 6), bytes(72)), WireTensor("float32", (4, 6), bytes(95))],
    ids=["rows", "bytes"],
)
def test_prefetch_of_inline_reply_of_wrong_shape_stores_nothing(here: Stage, tensor: WireTensor) -> None:
    """Every engine of the host would find it under this key."""
    here.service.answer = encoded("computed", tensor)
    assert here.prepare(KEYS[0]) == [None]
    assert here.missed() == {"wrong_shape": 1}
    assert here.store.contains([KEYS[0]], deadline_s=1) == b"\x00"


def test_prefetch_of_remote_features_is_miss(here: Stage) -> None:
    one = item()
    one.feature = object()
    placeholder_tokens.assign_key(one, KEYS[0])
    asyncio.run(here.prefetcher.prepare([one], lambda _: tower(), None))
    assert here.missed() == {"no_inputs": 1}


def test_prefetch_cancelled_cancels_encode_request(here: Stage) -> None:
    async def run() -> None:
        one = item()
        placeholder_tokens.assign_key(one, KEYS[0])
        waiting = asyncio.create_task(here.prefetcher.prepare([one], lambda _: tower(), None))
        while not here.service.futures:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())
    assert here.service.futures[0].cancelled()


def test_prefetch_after_weight_update_is_skipped(here: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    here.publish(KEYS[0])
    monkeypatch.setattr(weights_guard, "has_replaced_weights", lambda: True)
    assert here.prepare(KEYS[0]) == [None]


@pytest.mark.parametrize("uid", [None, pytest.param(NOBODY, marks=needs_root)])
def test_prefetch_from_untrusted_socket_publishes_nothing(uid: int | None, store: FaultyStore) -> None:
    path = Path(tempfile.mkdtemp(prefix="cp-")) / "e.sock"
    # Another user's listener has the secret here, ours has another one: either is enough to be a stranger.
    secret = SECRET if uid is not None else b"o" * 32
    one, tally = item(), Tally()
    placeholder_tokens.assign_key(one, KEYS[0])
    with listener(path, uid=uid, secret=secret) as heard:
        prefetcher = EmbeddingPrefetcher(runtime(store, socket=path), tally)
        asyncio.run(prefetcher.prepare([one], lambda _: tower(), None))
        prefetcher.close()
    path.parent.rmdir()
    assert b"pixel_values" not in heard()
    assert store.contains([KEYS[0]], deadline_s=1) == b"\x00"
    assert source_of(one) is None
    ((labels, values),) = tally.drain()["cornplug_misses_total"]
    assert (labels[2], values[0]) == ("encoder_untrusted", 1)
