"""Encoder disaggregation, by SGLang's own classes: what its receivers read, who is believed, what an
outage costs."""

from __future__ import annotations

import asyncio
import math
import pkgutil
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.disaggregation.encoder.receiver import (
    EmbeddingData,
    MultiModalEmbeddingData,
    _aggregate_embedding_part,
)
from sglang.srt.managers.io_struct import EncoderDispatchErrorReq
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.utils.common import safe_pickle_loads

from cornplug.encoder_service.formats.engine_seal import SignedClaim, prove_salt
from cornplug.errors import CodecError, EncoderRefused
from cornplug.identity import embedding_key, media_item_lineage, placeholder_tokens
from cornplug.metrics import Tally
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.media import embedding_prefetch, epd, epd_fallback
from cornplug.sglang_hooks.media import placeholder_tokens as tokens_module
from devkit.processes import wait_until

from ..hooked import hook_of

create_receiver = hook_of(epd, "MMReceiverBase.__init__")
part_arrives = hook_of(epd, "_aggregate_embedding_part")
prepare_buffer = hook_of(epd, "WaitingZmqRequest._prepare_embedding_buffer")
finish_assemble = hook_of(epd, "WaitingMMRequestBase._finish_assemble")
send_one_request = hook_of(epd, "TokenizerManager._send_one_request")
extract_url_data = hook_of(epd, "MMReceiverBase._extract_url_data")
dispatch_error = hook_of(epd_fallback, "TokenizerManager._schedule_encoder_dispatch_error")
reject_missing = hook_of(epd_fallback, "_reject_missing_dispatched_encoder_embedding")
encode = hook_of(epd_fallback, "MMReceiverHTTP.encode")
send_encode_request = hook_of(epd_fallback, "MMReceiverBase.send_encode_request")
recv_mm_data = hook_of(epd_fallback, "MMReceiverBase.recv_mm_data")
process_waiting = hook_of(epd_fallback, "MMReceiverBase._process_waiting_requests")
registration_done = hook_of(epd_fallback, "WaitingZmqRequest._on_registration_done")
create_req = hook_of(epd_fallback, "MMReceiverBase.create_req")

SECRET, MODEL = b"s" * 32, b"i" * 32
GOLDEN = Path(__file__).parents[2] / "golden" / "sglang_embedding_header.hex"
A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


@pytest.fixture(autouse=True)
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    """A process of a server that shares, and that knows its model and has a tower."""
    tally = Tally()
    monkeypatch.setattr(activation, "is_on", lambda: True)
    monkeypatch.setattr(activation, "runtime", lambda: SimpleNamespace(secret=SECRET, app="x"))
    monkeypatch.setattr(activation, "tally", lambda: tally)
    identity = SimpleNamespace(served_identity=MODEL)
    monkeypatch.setattr(epd, "engine_model", lambda: SimpleNamespace(tower_identity=lambda: identity))
    create_receiver(None, SimpleNamespace(tp_group=None))
    falls_back(monkeypatch)
    return tally


def falls_back(monkeypatch: pytest.MonkeyPatch, *, tower: bool = True, answer_s: float = math.inf) -> Any:
    """State of a server that can encode images itself, or cannot."""
    state = epd_fallback._FallbackState(tower, answer_s)
    monkeypatch.setattr(epd_fallback, "_state", state)
    return state


def misses(tally: Tally) -> list[str]:
    return [labels[2] for labels, _ in tally.drain().get("cornplug_misses_total", [])]


def part(media: list[bytes], *, index: int = 0, parts: int = 1, model: bytes = MODEL, **changes: Any) -> Any:
    """An embedding as it is received: a row of width 4 for each image, in bfloat16."""
    rows = torch.full((len(media), 4), float(index + 1), dtype=torch.bfloat16)
    said = SignedClaim.sign(
        changes.pop("secret", SECRET),
        identity=model,
        media=media,
        dtype="bfloat16",
        shape=(len(media), 4),
        grid=[[1, 2, 2]] * len(media),
        payload=rows.view(torch.uint8).numpy().tobytes(),
    )
    grid = changes.pop("grid", [[1, 2, 2]] * len(media))
    fields = {**said.to_fields(), **changes}
    return EmbeddingData("r", parts, index, grid, Modality.IMAGE, rows, list(rows.shape), **fields)


def test_sglang_reads_golden_embedding_header() -> None:
    data = safe_pickle_loads(bytes.fromhex(GOLDEN.read_text()))
    assert isinstance(data, EmbeddingData)
    assert (data.req_id, data.num_parts, data.part_idx) == ("0a1b_local_part_1", 2, 1)
    assert (data.modality, data.dtype, data.shape) == (Modality.IMAGE, torch.bfloat16, [3, 4])
    assert (data.error_msg, data.error_code, data.send_time) == (None, None, None)
    said = SignedClaim.from_fields(vars(data))
    assert said is not None
    assert said.media == (b"m" * 32, b"n" * 32)
    of = {"shape": (3, 4), "grid": data.get_grid(), "payload": bytes(range(24))}
    assert said.is_valid(SECRET, dtype="bfloat16", **of)
    whole = _aggregate_embedding_part(None, data, "qwen2_vl")
    assert whole.get_mm_extra_meta()["img_grid_thw"].tolist() == [[1, 2, 2], [1, 4, 400]]
    # The only field of SGLang's own that is left out is an address in its encoder's memory.
    assert set(vars(EmbeddingData("r", 1, 0, None, Modality.IMAGE))) - set(vars(data)) == {"_mr_ptr"}


def test_verify_claims_needs_secret_digests_and_model() -> None:
    assert epd.verify_claims(part([A, B]), MODEL, SECRET) == (A, B)
    for data, reason in (
        (part([A], secret=b"t" * 32), "statement"),
        (part([A], cornplug_media=B.hex()), "statement"),
        (part([A], cornplug_proof="00"), "statement"),
        (part([A], grid=[[1, 4, 1]]), "statement"),
        (part([A], grid=[["1", 4, 1]]), "statement"),
        (part([A], grid=None), "statement"),
        (EmbeddingData("r", 1, 0, [[1, 2, 2]], Modality.IMAGE, torch.zeros(1, 4)), "no_statement"),
    ):
        with pytest.raises(CodecError) as caught:
            epd.verify_claims(data, MODEL, SECRET)
        assert caught.value.reason == reason
    changed = part([A])
    changed.embedding[0, 0] = 7
    with pytest.raises(CodecError):
        epd.verify_claims(changed, MODEL, SECRET)
    with pytest.raises(CodecError, match="not identified"):
        epd.verify_claims(part([A]), None, SECRET)
    with pytest.raises(EncoderRefused, match="--model-path"):
        epd.verify_claims(part([A], model=b"j" * 32), MODEL, SECRET)


def test_epd_parts_in_any_order_key_images_in_order() -> None:
    whole = None
    for data in (part([C], index=1, parts=2), part([A, B], index=0, parts=2)):
        whole = part_arrives(_aggregate_embedding_part, whole, data, "qwen2_vl")
    assert isinstance(whole, MultiModalEmbeddingData)
    assert whole.ready
    items = [
        MultimodalDataItem(modality=Modality.IMAGE, offsets=[(i, i)], precomputed_embeddings=torch.ones(1, 4))
        for i in range(3)
    ]
    video = MultimodalDataItem(modality=Modality.VIDEO)
    request = SimpleNamespace(
        mm_inputs=SimpleNamespace(mm_items=[*items, video]), cache_salt="t", extra_key=None
    )
    waiting = SimpleNamespace(recv_req=request, recv_embedding_data=whole)
    assert prepare_buffer(lambda waiting: True, waiting)
    finish_assemble(None, waiting, None)
    keys = [embedding_key(SECRET, MODEL, media, "t") for media in (A, B, C)]
    assert [tokens_module.key_of(item) for item in items] == keys
    assert items[0].pad_values == placeholder_tokens(media_item_lineage(keys[0], 1))
    assert video.identity is None


def test_epd_part_without_claim_leaves_all_unkeyed(tally: Tally) -> None:
    silent = EmbeddingData("r", 2, 1, [[1, 2, 2]], Modality.IMAGE, torch.zeros(1, 4))
    whole = part_arrives(_aggregate_embedding_part, None, part([A], parts=2), None)
    whole = part_arrives(_aggregate_embedding_part, whole, silent, None)
    items = [
        MultimodalDataItem(modality=Modality.IMAGE, offsets=[(i, i)], precomputed_embeddings=torch.ones(1, 4))
        for i in range(2)
    ]
    request = SimpleNamespace(mm_inputs=SimpleNamespace(mm_items=items), cache_salt=None, extra_key=None)
    waiting = SimpleNamespace(recv_req=request, recv_embedding_data=whole)
    assert prepare_buffer(lambda waiting: True, waiting)
    finish_assemble(None, waiting, None)
    assert [tokens_module.key_of(item) for item in items] == [None, None]
    assert misses(tally) == ["no_statement"]
    assert epd.keys_of(items[:1], {0: (A, B)}, None) is None, "two digests for one image"


def test_epd_embedding_of_other_model_ends_request() -> None:
    whole = part_arrives(_aggregate_embedding_part, None, part([A], model=b"j" * 32), None)
    with pytest.raises(EncoderRefused):
        prepare_buffer(lambda waiting: True, SimpleNamespace(recv_embedding_data=whole))


def test_epd_large_rows_are_hashed_on_other_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step goes on meanwhile; the request waits as for a part that is on its way."""
    go, seen = threading.Event(), []

    def verified(data: Any, identity: Any, secret: Any) -> Any:
        seen.append(threading.current_thread())
        assert go.wait(20)
        return (A,)

    monkeypatch.setattr(epd, "verify_claims", verified)
    data = part([A])
    data.embedding = torch.zeros(1 << 10, 1 << 9)
    whole = part_arrives(_aggregate_embedding_part, None, data, "qwen2_vl")
    waiting = SimpleNamespace(recv_embedding_data=whole)
    assert not prepare_buffer(lambda waiting: True, waiting)
    go.set()
    wait_until(lambda: prepare_buffer(lambda waiting: True, waiting), deadline_s=60, what="the digest")
    assert threading.current_thread() not in seen


def test_epd_sent_items_keep_verified_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other hooks and a client's hashes did to an item in between gives way."""
    item = MultimodalDataItem(
        modality=Modality.IMAGE, offsets=[(0, 0)], precomputed_embeddings=torch.ones(1, 4)
    )

    async def original(receiver: Any, request_obj: Any, **kwargs: Any) -> Any:
        async def task() -> None:
            part_arrives(_aggregate_embedding_part, None, part([A]), None)

        await asyncio.create_task(task())
        return SimpleNamespace(mm_items=[item])

    request = SimpleNamespace(cache_salt=None, extra_key=None)
    mm_inputs = asyncio.run(epd.receive_with_keys(original, None, request_obj=request))
    item.set_hash(5)
    send_one_request(None, SimpleNamespace(mm_inputs=mm_inputs))
    assert tokens_module.key_of(item) == embedding_key(SECRET, MODEL, A, None)
    entries = [{"modality": Modality.IMAGE, "url": "x"}, {"modality": Modality.AUDIO, "url": "y"}]
    extract_url_data(entries, None, SimpleNamespace(cache_salt="t", extra_key=None))
    assert [entry.get("cornplug_salt") for entry in entries] == ["t", None]
    assert [entry.get("cornplug_salt_proof") for entry in entries] == [prove_salt(SECRET, "t"), None]


class Manager:
    """What SGLang's TokenizerManager does with a request, as a list of what was done."""

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.fails = False
        self.obj = SimpleNamespace(rid="r", need_wait_for_mm_inputs=True)
        self.rid_to_state = {"r": SimpleNamespace(obj=self.obj, finished=False)}
        self.event_loop: asyncio.AbstractEventLoop | None = None

    async def _tokenize_one_request(self, obj: Any) -> str:
        if self.fails:
            raise ValueError("an unreadable image")
        assert obj.need_wait_for_mm_inputs is False
        return "tokenized"

    async def _send_one_request(self, tokenized: str) -> None:
        self.done.append(tokenized)

    def _forward_encoder_dispatch_error(self, error: Any) -> None:
        self.done.append(error)


ERROR = EncoderDispatchErrorReq(rid="r", error_msg="refused", error_code=502)


@pytest.mark.parametrize(("fails", "done"), [(False, ["tokenized"]), (True, [ERROR])])
def test_epd_fallback_failed_dispatch_encodes_or_answers(fails: bool, done: list[Any], tally: Tally) -> None:
    async def scenario() -> None:
        manager = Manager()
        manager.fails = fails
        manager.event_loop = asyncio.get_running_loop()
        await asyncio.to_thread(dispatch_error, None, manager, ERROR)
        await asyncio.sleep(0.05)
        assert manager.done == done
        gone = Manager()
        gone.rid_to_state.clear()
        gone.event_loop = manager.event_loop
        await asyncio.to_thread(dispatch_error, None, gone, ERROR)
        await asyncio.sleep(0.05)
        assert gone.done == []

    asyncio.run(scenario())
    assert misses(tally) == ["encoder_error"]


@pytest.mark.parametrize(("answer_s", "waits_again"), [(0.0, True), (0.2, False)])
def test_epd_fallback_request_waits_for_one_deadline(
    answer_s: float, waits_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = falls_back(monkeypatch, answer_s=0.1)
    waited: list[bool] = []

    class Encoding(Manager):
        async def _tokenize_one_request(self, obj: Any) -> str:
            waited.append(embedding_prefetch.has_waited.get())
            return "tokenized"

    async def late(receiver: Any) -> Any:
        await asyncio.sleep(answer_s)
        return ERROR

    async def scenario() -> None:
        manager = Encoding()
        manager.event_loop = asyncio.get_running_loop()
        error = await encode(late, None)
        await asyncio.to_thread(dispatch_error, None, manager, error)
        await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert waited == [not waits_again]
    assert not here.late_ids


def test_epd_fallback_without_tower_keeps_sglang_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    falls_back(monkeypatch, tower=False)
    seen: list[Any] = []
    dispatch_error(lambda manager, error: seen.append(error), None, ERROR)
    request = SimpleNamespace(need_wait_for_mm_inputs=True)
    reject_missing(lambda *args: seen.append(args), request, None)
    assert seen == [ERROR, (request, None)]


def test_epd_fallback_after_outage_skips_dispatch() -> None:
    async def failing(receiver: Any) -> Any:
        return ERROR

    async def working(receiver: Any) -> Any:
        return None

    def original(receiver: Any, obj: Any) -> str:
        return "dispatched"

    obj = SimpleNamespace(need_wait_for_mm_inputs=True)
    assert send_encode_request(original, None, obj) == "dispatched"
    refused = EncoderDispatchErrorReq(rid="r", error_msg="no image", error_code=422)

    async def refusing(receiver: Any) -> Any:
        return refused

    asyncio.run(encode(refusing, None))
    assert send_encode_request(original, None, obj) == "dispatched", "a bad image is no outage"
    asyncio.run(encode(failing, None))
    assert send_encode_request(original, None, obj) is None
    assert obj.need_wait_for_mm_inputs is False
    asyncio.run(encode(working, None))
    assert send_encode_request(original, None, obj) == "dispatched"


def test_epd_fallback_silent_encoder_is_outage() -> None:
    async def silence(receiver: Any, request_obj: Any) -> None:
        asked.append(1)
        await asyncio.sleep(0.1)

    asked: list[int] = []
    receiver = SimpleNamespace(recv_timeout=0.05)
    request = SimpleNamespace(cache_salt=None, extra_key=None)
    for _ in range(20):
        assert asyncio.run(recv_mm_data(silence, receiver, request_obj=request)) is None
    assert 1 <= len(asked) <= 10, "each waited for the encoder"


def test_epd_fallback_request_replaces_waiting_one() -> None:
    freed: list[str] = []

    def waiting(rid: str) -> Any:
        return SimpleNamespace(
            rid=rid, release_resources=lambda: freed.append(rid), close_recv_socket=lambda: None
        )

    waits = {rid: waiting(rid) for rid in ("r", "s")}
    receiver = SimpleNamespace(waiting_by_rid=waits, waiting_list=list(waits.values()))
    again = SimpleNamespace(rid="r", need_wait_for_mm_inputs=False)
    others = [
        SimpleNamespace(rid="s", need_wait_for_mm_inputs=True),
        SimpleNamespace(rid=["s", "r"], need_wait_for_mm_inputs=False),
        SimpleNamespace(rid="u", need_wait_for_mm_inputs=False),
        ERROR,
    ]
    process_waiting(receiver, [*others, again])
    assert freed == ["r"]
    assert [w.rid for w in receiver.waiting_list] == ["s"]
    assert set(receiver.waiting_by_rid) == {"s"}


def test_epd_fallback_failed_registration_awaits_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    future: Future[None] = Future()
    future.set_exception(ConnectionError("refused"))
    for tower, expected in ((True, 0), (False, 1)):
        falls_back(monkeypatch, tower=tower)
        registration_done(lambda waiting, done: seen.append(done), None, future)
        assert len(seen) == expected


def test_epd_fallback_error_gets_empty_prompt() -> None:
    request = SimpleNamespace(input_ids=None)
    create_req(None, request)
    assert len(request.input_ids) == 0
    kept = SimpleNamespace(input_ids=[1, 2])
    create_req(None, kept)
    assert kept.input_ids == [1, 2]


def test_epd_hook_targets_exist_and_are_distinct() -> None:
    for hook in (*epd.HOOKS, *epd_fallback.HOOKS):
        assert callable(pkgutil.resolve_name(hook.target)), hook.target
    around = [hook.target for hook in (*epd.HOOKS, *epd_fallback.HOOKS) if hook.kind == "around"]
    assert len(around) == len(set(around)), "SGLang warns of two around one function"
