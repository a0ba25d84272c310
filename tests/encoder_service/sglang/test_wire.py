"""SGLang's encoder protocol: requests read strictly, one pickle written byte for byte."""

from __future__ import annotations

import json
import pickletools
from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.encoder_service import sglang_delivery
from cornplug.encoder_service.formats.engine_seal import SignedClaim
from cornplug.errors import CodecError, EncoderRefused

SECRET = b"s" * 32
GOLDEN = Path(__file__).parents[2] / "golden" / "sglang_embedding_header.hex"
PAYLOAD = bytes(range(24))
ASK: dict[str, Any] = {
    "encoder_idx": 0,
    "encoder_url": "http://e:1",
    "mm_items": ["data:image/png;base64,AA=="],
    "num_parts": 2,
    "part_idx": 1,
    "req_id": "0a1b_local_part_1",
    "modality": "IMAGE",
    "prefill_host": "127.0.0.1",
    "embedding_port": 5555,
    "time_stats_json": None,
}


GRID = [[1, 2, 2], [1, 4, 400]]


def statement() -> SignedClaim:
    return SignedClaim.sign(
        SECRET,
        identity=b"i" * 32,
        media=[b"m" * 32, b"n" * 32],
        dtype="bfloat16",
        shape=(3, 4),
        grid=GRID,
        payload=PAYLOAD,
    )


def header() -> bytes:
    part = sglang_delivery.parse_encode_part(json.dumps(ASK).encode())
    return sglang_delivery.pickle_header(part, dtype="bfloat16", shape=(3, 4), grid=GRID, claim=statement())


def test_wire_requests_of_sglang_are_read() -> None:
    part = sglang_delivery.parse_encode_part(json.dumps(ASK).encode())
    assert (part.req_id, part.prefill_host, part.embedding_port) == ("0a1b_local_part_1", "127.0.0.1", 5555)
    assert sglang_delivery.items_of(part) == [sglang_delivery.MediaItem(url="data:image/png;base64,AA==")]
    waits = {**ASK, "embedding_port": None, "mm_items": [{"url": "AA==", "detail": "high"}]}
    assert (
        sglang_delivery.items_of(sglang_delivery.parse_encode_part(json.dumps(waits).encode()))[0].detail
        == "high"
    )
    ask = {"req_id": "r", "receive_count": 2, "receive_url": "[::1]:77", "modality": "IMAGE"}
    receiver, address = sglang_delivery.parse_registration(json.dumps(ask).encode())
    assert (receiver.receive_count, address) == (2, ("::1", 77))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"modality": "VIDEO"}, "VIDEO"),
        ({"modality": "SMELL"}, "modality"),
        ({"mm_items": []}, "mm_items"),
        ({"mm_items": ["a"] * 300}, "mm_items"),
        ({"mm_items": [3]}, "mm_items"),
        ({"mm_items": [{"url": "x", "max_dynamic_patch": 3}]}, "max_dynamic_patch"),
        ({"mm_items": [{"detail": "low"}]}, "url"),
        ({"part_idx": 2}, "part_idx"),
        ({"part_idx": -1}, "part_idx"),
        ({"num_parts": 0}, "num_parts"),
        ({"num_parts": "2"}, "num_parts"),
        ({"req_id": ""}, "req_id"),
        ({"req_id": "r" * 300}, "req_id"),
        ({"req_id": None}, "req_id"),
        ({"embedding_port": 70000}, "embedding_port"),
        ({"prefill_host": None}, "prefill_host"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_wire_invalid_field_is_refused_by_name(change: dict[str, Any], says: str) -> None:
    with expect_error(EncoderRefused, reason="bad_input", match=says):
        sglang_delivery.parse_encode_part(json.dumps({**ASK, **change}).encode())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\x80\x04N.", b'"x"', b"\xff" * 9])
def test_wire_invalid_json_is_refused(body: bytes) -> None:
    for read in (sglang_delivery.parse_encode_part, sglang_delivery.parse_registration):
        with pytest.raises(EncoderRefused):
            read(body)


@pytest.mark.parametrize("url", ["host", ":5", "h:", "h:0", "h:65536", "h:five", "h:٣", "h:-1"])
def test_wire_receiver_without_port_is_refused(url: str) -> None:
    with pytest.raises(EncoderRefused):
        sglang_delivery.parse_registration(
            json.dumps({"req_id": "r", "receive_count": 1, "receive_url": url}).encode()
        )


def test_wire_header_equals_golden() -> None:
    """The bytes that `tests/sglang_hooks/media/test_epd.py` has SGLang itself read."""
    assert header().hex() == GOLDEN.read_text().strip()


def test_wire_header_names_three_globals_only() -> None:
    names, calls = [], []
    for opcode, argument, _ in pickletools.genops(header()):
        if opcode.name == "GLOBAL":
            names.append(argument)
        elif opcode.name in ("REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD", "STACK_GLOBAL"):
            calls.append(opcode.name)
    assert names == [
        "sglang.srt.disaggregation.encoder.receiver EmbeddingData",
        "sglang.srt.multimodal.modality Modality",
        "torch bfloat16",
    ]
    assert calls == ["NEWOBJ", "REDUCE", "BUILD"]


def test_wire_hostile_request_id_stays_text() -> None:
    """Text is length-prefixed: what looks like opcodes in it stays text."""
    hostile = {**ASK, "req_id": "cos\nsystem\n(X\x01\x00\x00\x00aR."}
    part = sglang_delivery.parse_encode_part(json.dumps(hostile).encode())
    data = sglang_delivery.pickle_header(
        part, dtype="float32", shape=(1, 1), grid=[[1, 2, 2]], claim=statement()
    )
    names = [argument for opcode, argument, _ in pickletools.genops(data) if opcode.name == "GLOBAL"]
    assert len(names) == 3
    assert not any("system" in name for name in names)
    with pytest.raises(ValueError, match="dtype"):
        sglang_delivery.pickle_header(
            part, dtype="float32\nos\nsystem", shape=(1, 1), grid=[], claim=statement()
        )


def test_signed_claim_other_bytes_are_refused() -> None:
    said = statement()
    read = SignedClaim.from_fields(dict(said.to_fields()))
    assert read == said
    of: dict[str, Any] = {"dtype": "bfloat16", "shape": (3, 4), "grid": GRID, "payload": PAYLOAD}
    assert read.is_valid(SECRET, **of)
    assert not read.is_valid(b"t" * 32, **of)
    for changed in (
        {"dtype": "float16"},
        {"shape": (4, 3)},
        {"payload": PAYLOAD[::-1]},
        {"grid": [[1, 2, 2], [1, 400, 4]]},
        {"grid": [[1, 2, 2, 1], [4, 400]]},
    ):
        assert not read.is_valid(SECRET, **{**of, **changed})
    swapped = SignedClaim(identity=said.identity, media=said.media[::-1], proof=said.proof)
    assert not swapped.is_valid(SECRET, **of)
    other = SignedClaim(identity=b"j" * 32, media=said.media, proof=said.proof)
    assert not other.is_valid(SECRET, **of)


@pytest.mark.parametrize(
    "fields",
    [
        {"cornplug_identity": "00" * 32},
        {"cornplug_identity": "00" * 32, "cornplug_media": "", "cornplug_proof": "00" * 32},
        {"cornplug_identity": "zz" * 32, "cornplug_media": "00" * 32, "cornplug_proof": "00" * 32},
        {"cornplug_identity": "00" * 31, "cornplug_media": "00" * 32, "cornplug_proof": "00" * 32},
        {"cornplug_identity": b"00" * 32, "cornplug_media": "00" * 32, "cornplug_proof": "00" * 32},
    ],
)
def test_signed_claim_absent_is_none_broken_raises(fields: dict[str, object]) -> None:
    assert SignedClaim.from_fields({"req_id": "r"}) is None
    with pytest.raises(CodecError):
        SignedClaim.from_fields(fields)
