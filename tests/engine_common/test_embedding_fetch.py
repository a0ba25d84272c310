"""One policy for both engines: when the encoder service is asked, and which of its replies are believed."""

from __future__ import annotations

from typing import Any

import pytest

from cornplug.encoder_service.formats.messages import EncodeReply, WireTensor
from cornplug.engine_common.embeddings import EncoderRequestPolicy, ExpectedEmbedding
from cornplug.engine_common.model_identity import TowerIdentity
from cornplug.errors import (
    CodecError,
    CornplugError,
    EncoderError,
    EncoderRefused,
    EncoderUnavailable,
    StoreError,
)

KEY = b"k" * 32
SERVED = b"s" * 32
TOWER = TowerIdentity(b"i" * 32, SERVED)
EXPECTED = ExpectedEmbedding(KEY, rows=4, width=6, dtype="float32")
DOWN = EncoderUnavailable("gone", reason="encoder_down")


def reply(key: bytes = KEY, tensor: WireTensor | None = None) -> EncodeReply:
    return EncodeReply(
        id=1, key=key, origin="coalesced", stored=tensor is None, tensor=tensor, service_time_s=0.1
    )


def asked(policy: EncoderRequestPolicy, now: float = 0.0, **other: Any) -> bytes | str:
    """The identity to ask for, or the reason why not."""
    facts: dict[str, Any] = {"tower": TOWER, "identified": True, "refusal": None, **other}
    try:
        return policy.identity_for_request(facts.pop("tower"), now=now, **facts)
    except EncoderError as e:
        return e.reason


@pytest.mark.parametrize(
    ("facts", "answer"),
    [
        ({}, SERVED),
        ({"tower": None, "identified": False}, "identifying"),
        ({"tower": None}, "not_served"),
        ({"tower": TowerIdentity(b"i" * 32, None)}, "not_served"),
        ({"refusal": DOWN}, "encoder_down"),
    ],
)
def test_encoder_request_policy_asks_only_service_that_can_answer(
    facts: dict[str, Any], answer: bytes | str
) -> None:
    assert asked(EncoderRequestPolicy(), **facts) == answer


def test_encoder_request_policy_failure_of_service_starts_backoff() -> None:
    policy = EncoderRequestPolicy()
    assert policy.record_failure(EncoderRefused("full", reason="overloaded"), 10.0) == "overloaded"
    assert asked(policy, 10.4) == "encoder_backoff"
    assert asked(policy, 10.4, refusal=DOWN) == "encoder_down", "what is known of now comes first"
    assert asked(policy, 10.6) == SERVED


def test_encoder_request_policy_late_reply_starts_backoff() -> None:
    policy = EncoderRequestPolicy()
    assert policy.record_timeout(10.0) == "encoder_timeout"
    assert asked(policy, 10.4) == "encoder_backoff"


@pytest.mark.parametrize(
    "error",
    [DOWN, EncoderRefused("", reason="no_inputs"), EncoderRefused("", reason="bad_input"),
     StoreError("", reason="store_down"), CodecError("", reason="wrong_shape")],
    ids=lambda error: error.reason,
)  # fmt: skip
def test_encoder_request_policy_other_failure_starts_no_backoff(error: CornplugError) -> None:
    policy = EncoderRequestPolicy()
    assert policy.record_failure(error, 10.0) == error.reason
    assert asked(policy, 10.0) == SERVED


@pytest.mark.parametrize("tensor", [None, WireTensor("float32", (4, 6), bytes(96))], ids=["stored", "inline"])
def test_encoder_request_policy_valid_reply_names_source_and_ends_backoff(tensor: WireTensor | None) -> None:
    policy = EncoderRequestPolicy()
    policy.record_timeout(10.0)
    assert policy.check_reply(reply(tensor=tensor), EXPECTED) == "service_coalesced"
    assert asked(policy, 10.1) == SERVED


def test_encoder_request_policy_reply_for_other_key_is_services_failure() -> None:
    policy = EncoderRequestPolicy()
    with pytest.raises(EncoderUnavailable) as raised:
        policy.check_reply(reply(key=b"o" * 32), EXPECTED)
    assert policy.record_failure(raised.value, 10.0) == "encoder_bad_response"
    assert asked(policy, 10.1) == "encoder_backoff"


def test_encoder_request_policy_inline_reply_of_wrong_shape_is_refused() -> None:
    with pytest.raises(CodecError) as raised:
        EncoderRequestPolicy().check_reply(reply(tensor=WireTensor("float32", (4, 5), bytes(80))), EXPECTED)
    assert raised.value.reason == "wrong_shape"


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("float16", (4, 6), 48),
        ("float32", (3, 6), 72),
        ("float32", (4, 5), 80),
        ("float32", (4, 6), 95),
        ("float32", (24,), 96),
        ("float32", (1, 4, 6), 96),
        ("float32", (), 96),
        ("int8", (4, 6), 24),
    ],
)
def test_expected_embedding_other_form_is_wrong_shape(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(CodecError) as raised:
        EXPECTED.check(dtype, shape, size)
    assert raised.value.reason == "wrong_shape"


def test_expected_embedding_of_unknown_width_and_dtype_checks_rows_and_bytes() -> None:
    loose = ExpectedEmbedding(KEY, rows=4)
    loose.check("bfloat16", (4, 10), 80)
    for dtype, shape, size in (("bfloat16", (3, 10), 60), ("bfloat16", (4, 10), 79), ("float32", (), 0)):
        with pytest.raises(CodecError):
            loose.check(dtype, shape, size)
