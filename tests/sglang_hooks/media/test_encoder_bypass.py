from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from collaborators import recorded
from sglang.srt.layers import dp_attention
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import Modality
from time_limits import TimeLimits

from cornplug.codec import PayloadKind
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.embeddings import EmbeddingPublisher
from cornplug.engine_common.stored_rows import RowCopies
from cornplug.metrics import Tally
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.media import encoder_bypass, placeholder_tokens
from cornplug.sglang_hooks.media.encoder_bypass import EmbeddingSource, EncoderBypass
from cornplug.store.base import Store
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, put_payload
from cornplug.testing import FaultyStore

from ..hooked import hook_of
from ..media_rig import item, runtime

prefill_embedding = hook_of(encoder_bypass, "mm_schedule._get_chunked_prefill_embedding")

WIDTH = 8
CPU = torch.device("cpu")


class Model:
    """A tower whose rows say which image they are of."""

    use_deepstack: Any = None
    deepstack_visual_indexes: Sequence[int] = ()

    def __init__(self) -> None:
        self.ran: list[list[float]] = []
        self.as_list = False

    def get_image_feature(self, items: list[Any]) -> Any:
        self.ran.append([float(i.feature[0, 0]) for i in items])
        made = [value(float(i.feature[0, 0]), encoder_bypass.rows_of(i)) for i in items]
        return made if self.as_list else torch.cat(made)


def value(seed: float, rows: int = 4) -> torch.Tensor:
    return torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + 1000 * seed


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(capacity_bytes=1 << 20)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    monkeypatch.setattr(dp_attention, "get_dp_tp_group", lambda: group)


class Encoding(EncoderBypass):
    """A bypass whose parts a test knows."""

    source: EmbeddingSource
    tally: Tally
    publisher: EmbeddingPublisher


@pytest.fixture
def engine(store: MemoryStore) -> Iterator[Callable[..., Encoding]]:
    made: list[EmbeddingSource] = []

    def make(connection: Store | None = None, *, first: bool = True, model: Model | None = None) -> Encoding:
        tally = Tally()
        with recorded(encoder_bypass, "EmbeddingPublisher") as publishers:
            here = EmbeddingSource(
                runtime(connection or store.connect()),
                tally,
                device=CPU,
                dtype="float32",
                width=WIDTH,
                is_first_rank=first,
            )
        made.append(here)
        encoding = Encoding((model or Model()).get_image_feature, here, CPU)
        encoding.source, encoding.tally, encoding.publisher = here, tally, publishers[0]
        return encoding

    yield make
    for here in made:
        here.close()


def sample_image(seed: int, source: str | None = "store", rows: int = 4) -> Any:
    one = item(seed, rows=rows)
    placeholder_tokens.assign_key(one, bytes([seed]) * 32)
    if source is not None:
        one.model_specific_data["cornplug_source"] = source
    return one


def published(encoding: Encoding) -> list[tuple[Any, ...]]:
    """What was counted, once the publisher has nothing to do."""
    encoding.publisher.flush(60)
    counted = encoding.tally.drain()
    return sorted(
        (name.removeprefix("cornplug_").removesuffix("_total"), *labels[1:], values[0])
        for name, rows in counted.items()
        for labels, values in rows
    )


def put(store: Store, seed: int, tensor: torch.Tensor) -> None:
    put_payload(
        store,
        NewPayload(
            memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy()),
            PayloadKind.EMBEDDING,
            key=bytes([seed]) * 32,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
        ),
        app="other",
        deadline_s=1,
    )


def same(found: Sequence[torch.Tensor], *wanted: torch.Tensor) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


def test_encoder_bypass_computed_embedding_loads_in_next(engine: Callable[..., Encoding]) -> None:
    first, second = engine(), engine()
    assert same(first([sample_image(1, None), sample_image(2, None, 3)]), value(1), value(2, 3))
    assert ("saves", "embedding", "stored", 2) in published(first)
    assert same(second([sample_image(2, "service_computed", 3), sample_image(1)]), value(2, 3), value(1))
    assert published(second) == [
        ("bytes", "embedding", "load", 7 * WIDTH * 4),
        ("hits", "embedding", "service_computed", 1),
        ("hits", "embedding", "store", 1),
        ("saved_tower_passes", 2),
    ]


@pytest.mark.parametrize("as_list", [False, True])
def test_encoder_bypass_encodes_only_missing_items_in_order(
    engine: Callable[..., Encoding], store: MemoryStore, as_list: bool
) -> None:
    model = Model()
    model.as_list = as_list
    put(store.connect(), 2, value(2))
    unnamed = item(9)
    encoding = engine(model=model)
    found = encoding([sample_image(1, None), sample_image(2), unnamed, sample_image(3, None)])
    assert same(found, value(1), value(2), value(9), value(3))
    assert ("saves", "embedding", "stored", 2) in published(encoding)
    assert model.ran == [[1, 9, 3]]
    assert store.connect().contains([bytes([i]) * 32 for i in (1, 2, 3, 9)], deadline_s=1) == b"\1\1\1\0"


def test_encoder_bypass_notes_tower_and_fetch_costs(
    engine: Callable[..., Encoding],
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
    within: TimeLimits,
) -> None:
    """The tokenizer process, which asks, never sees the tower."""
    told = engine_state.current()
    encoding = engine()
    put(store.connect(), 1, value(1))
    encoding([sample_image(1)])
    assert told.encode_row_s() is None, "the tower has not run"
    encoding([sample_image(2, None)])
    row_s = told.encode_row_s()
    assert row_s is not None
    assert row_s > 0
    within.check(row_s, 0.1)
    quick = RowCopies.read

    def read(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return quick(*args, **kwargs)

    monkeypatch.setattr(RowCopies, "read", read)
    for _ in range(8):
        encoding([sample_image(1)])
    encoding([sample_image(3, None)])
    assert not told.is_fetch_faster()


def test_encoder_bypass_other_ranks_note_no_costs(engine: Callable[..., Encoding]) -> None:
    engine(first=False)([sample_image(2, None)])
    assert engine_state.current().encode_row_s() is None


def test_encoder_bypass_unkeyed_batch_is_left_to_engine(engine: Callable[..., Encoding]) -> None:
    encoding = engine()
    assert torch.equal(encoding([item(1), item(2)]), torch.cat([value(1), value(2)]))
    assert published(encoding) == []


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (None, "evicted"),
        (value(5, 3), "wrong_shape"),
        (value(5)[:, :4], "wrong_shape"),
        (value(5).to(torch.bfloat16), "wrong_shape"),
    ],
)
def test_encoder_bypass_unfit_entry_is_miss_and_computed(
    engine: Callable[..., Encoding], store: MemoryStore, tensor: torch.Tensor | None, reason: str
) -> None:
    if tensor is not None:
        put(store.connect(), 5, tensor)
    encoding = engine()
    assert same(encoding([sample_image(5)]), value(5))
    assert ("misses", "embedding", reason, 1) in published(encoding)


def test_encoder_bypass_entry_shorter_than_header_is_miss(
    engine: Callable[..., Encoding], store: MemoryStore
) -> None:
    """Whole and of the right key: whoever wrote it was wrong."""
    put_payload(
        store.connect(),
        NewPayload(bytes(8), PayloadKind.EMBEDDING, key=bytes([5]) * 32, dtype="float32", shape=(4, WIDTH)),
        app="other",
        deadline_s=1,
    )
    encoding = engine()
    assert same(encoding([sample_image(5)]), value(5))
    assert ("misses", "embedding", "wrong_shape", 1) in published(encoding)


def test_encoder_bypass_corrupt_entry_is_miss(engine: Callable[..., Encoding], store: MemoryStore) -> None:
    put(store.connect(), 5, value(5))
    faulty = FaultyStore(store.connect())
    faulty.corrupt_reads = True
    encoding = engine(faulty)
    assert same(encoding([sample_image(5)]), value(5))
    assert ("misses", "embedding", "corrupt", 1) in published(encoding)


def test_encoder_bypass_store_down_is_miss(engine: Callable[..., Encoding], store: MemoryStore) -> None:
    faulty = FaultyStore(store.connect())
    faulty.unavailable = True
    encoding = engine(faulty)
    assert same(encoding([sample_image(5)]), value(5))
    counted = published(encoding)
    assert ("misses", "embedding", "store_down", 1) in counted
    assert ("saves", "embedding", "store_down", 1) in counted


def fails(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("nothing foresaw this")


def test_encoder_bypass_error_in_a_load_is_miss(
    engine: Callable[..., Encoding], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store.connect(), 5, value(5))
    monkeypatch.setattr(RowCopies, "read", fails)
    encoding = engine()
    assert same(encoding([sample_image(5)]), value(5))
    assert ("misses", "embedding", "error", 1) in published(encoding)


def test_encoder_bypass_error_in_an_offer_is_miss(
    engine: Callable[..., Encoding], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = engine()
    monkeypatch.setattr(encoding.publisher, "enqueue", fails)
    assert same(encoding([sample_image(5)]), value(5))
    assert ("misses", "embedding", "error", 1) in published(encoding)


def test_encoder_bypass_earlier_miss_is_not_counted_again(engine: Callable[..., Encoding]) -> None:
    encoding = engine()
    encoding([sample_image(5, None)])
    assert not [row for row in published(encoding) if row[0] == "misses"]


def test_encoder_bypass_indivisible_output_is_not_published(
    engine: Callable[..., Encoding], store: MemoryStore
) -> None:
    class Pruning(Model):
        def get_image_feature(self, items: list[Any]) -> Any:
            return super().get_image_feature(items)[:-1]

    model = Pruning()
    put(store.connect(), 2, value(2))
    found = engine(model=model)([sample_image(1, None), sample_image(2)])
    assert torch.equal(found, torch.cat([value(1), value(2)])[:-1])
    assert model.ran == [[1], [1, 2]]
    assert store.connect().contains([b"\1" * 32], deadline_s=1) == b"\0"


def test_encoder_bypass_replaced_weights_end_sharing(
    engine: Callable[..., Encoding], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store.connect(), 2, value(77))
    monkeypatch.setattr(weights_guard, "has_replaced_weights", lambda: True)
    assert same(engine()([sample_image(1, None), sample_image(2)]), value(1), value(2))
    assert store.connect().contains([b"\1" * 32], deadline_s=1) == b"\0"


def test_encoder_bypass_keys_of_replaced_tower_are_neither_taken_nor_published(
    engine: Callable[..., Encoding], store: MemoryStore
) -> None:
    """The weights were replaced while these images were on their way."""
    put(store.connect(), 2, value(77))
    late, here = [sample_image(1, None), sample_image(2)], engine()
    state = engine_state.current()
    state.end_update(state.begin_update(), "/new", 0)
    assert same(here(late), value(1), value(2))
    assert store.connect().contains([b"\1" * 32], deadline_s=1) == b"\0"
    one = sample_image(3)
    placeholder_tokens.assign_key(one, b"\2" * 32, epoch=2)
    assert same(here([one]), value(77))


def test_encoder_bypass_deepstack_needs_rows_of_all_levels(
    engine: Callable[..., Encoding], store: MemoryStore
) -> None:
    model = Model()
    model.use_deepstack = {Modality.IMAGE: True}
    model.deepstack_visual_indexes = [1, 3]
    wide = torch.cat([value(2), value(3), value(4)], dim=1)
    put(store.connect(), 2, wide)
    assert same(engine(model=model)([sample_image(2)]), wide)
    assert model.ran == []
    put(store.connect(), 5, value(5))
    assert same(engine(model=model)([sample_image(5)]), value(5))
    assert model.ran == [[5]]


def ranks(monkeypatch: pytest.MonkeyPatch, others: Callable[[torch.Tensor], None]) -> None:
    group = SimpleNamespace(world_size=2, rank_in_group=1, cpu_group="cpu")
    monkeypatch.setattr(dp_attention, "get_dp_tp_group", lambda: group)

    def reduce(mask: torch.Tensor, op: Any, group: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        assert group == "cpu"
        others(mask)

    monkeypatch.setattr(torch.distributed, "all_reduce", reduce)


def test_encoder_bypass_ranks_take_common_embeddings(
    engine: Callable[..., Encoding], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in (1, 2):
        put(store.connect(), seed, value(seed))
    masks = []

    def other(mask: torch.Tensor) -> None:
        masks.append(mask.tolist())
        mask[0] = 0

    ranks(monkeypatch, other)
    model = Model()
    encoding = engine(model=model, first=False)
    assert same(
        encoding([sample_image(1), sample_image(2), sample_image(3, None)]), value(1), value(2), value(3)
    )
    assert masks == [[1, 1, 0]]
    assert model.ran == [[1, 3]]
    # Neither counts nor publishes: the first rank does.
    assert published(encoding) == []


def test_encoder_bypass_rank_without_store_still_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = []
    ranks(monkeypatch, lambda mask: masks.append(mask.tolist()))
    model = Model()
    encoding = EncoderBypass(model.get_image_feature, None, CPU)
    assert same(encoding([sample_image(1)]), value(1))
    assert encoding([item(2)]) is not None  # No names: nobody waits for anybody.
    assert masks == [[0]]


def test_encoder_bypass_in_chunked_prefill_asks_store_once(
    engine: Callable[..., Encoding], store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests share an image; chunks; SGLang's cache is asked before the store."""
    mm_schedule.init_mm_embedding_cache(1 << 20)
    model, encoding = Model(), engine()
    put(store.connect(), 1, value(1))
    monkeypatch.setattr(activation, "is_on", lambda: True)
    monkeypatch.setattr(activation, "config", lambda: runtime(store.connect()).config)
    monkeypatch.setattr(encoder_bypass, "_embedding_source", lambda: encoding.source)
    one, two, again = sample_image(1), sample_image(2, None), sample_image(1)
    two.offsets, again.offsets = [(6, 9)], [(2, 5)]

    def prefill(prefix: list[int], extend: list[int]) -> torch.Tensor:
        offsets = [[(0, 3), (6, 9)], [(2, 5)]]
        made, _ = prefill_embedding(
            mm_schedule._get_chunked_prefill_embedding,
            model.get_image_feature,
            [one, two, again],
            [0, 2, 3],
            prefix,
            extend,
            offsets,
            torch.zeros(4, dtype=torch.int64),
        )
        return made

    assert torch.equal(prefill([0, 0], [5, 6]), torch.cat([value(1), value(1)]))
    assert model.ran == []
    assert torch.equal(prefill([2, 4], [6, 2]), torch.cat([value(1)[2:], value(2)[:2], value(1)[2:]]))
    assert model.ran == [[2]]
    store_calls = encoding.tally.drain()["cornplug_hits_total"]
    assert [values for _, values in store_calls] == [[1]]
