"""Handles: what the service signs, what nobody can change, and the request parts made of them."""

from __future__ import annotations

import base64
import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from expected_errors import expect_error
from hypothesis import given
from hypothesis import strategies as st

from cornplug import identity
from cornplug.config import Config
from cornplug.encoder_service.client.sync_client import EmbeddingRef, EncoderClient
from cornplug.encoder_service.formats.engine_seal import HANDLE_PREFIX, EmbeddingHandle
from cornplug.encoder_service.formats.image import digest_image
from cornplug.encoder_service.http.app import create_app
from cornplug.errors import CodecError, EncoderRefused
from cornplug.store.memory import MemoryStore

from ..conftest import SECRET, MakeEncoder, sample_image

HANDLE = EmbeddingHandle(
    family="qwen2_vl",
    modality="image",
    identity=bytes(32),
    media=bytes([1]) * 32,
    key=bytes([2]) * 32,
    dtype="float32",
    grid=(1, 4, 6),
    expires=2000.0,
)
TEXT = HANDLE.to_signed_text(SECRET)


def reason(text: str, secret: bytes = SECRET, now: float = 1000.0) -> str:
    with pytest.raises(CodecError) as e:
        EmbeddingHandle.verify(text, secret, now=now)
    return e.value.reason


def test_embedding_handle_signed_text_is_read_and_valid() -> None:
    assert EmbeddingHandle.parse(TEXT) == EmbeddingHandle.verify(TEXT, SECRET, now=1999.0) == HANDLE
    assert len(TEXT) < 1000
    assert TEXT.isascii()
    assert not set(TEXT) & set(' ",;=/+\r\n')


def test_embedding_handle_other_secret_or_expired_is_refused() -> None:
    assert reason(TEXT, b"t" * 32) == "handle_signature"
    assert reason(TEXT, now=2000.0) == "handle_expired"
    assert reason(replace_claims(TEXT, {"expires": 9e9})) == "handle_signature"


def replace_claims(text: str, changes: dict[str, Any]) -> str:
    """A handle with other claims under the old proof."""
    _, claims, proof = text.split(".")
    said = msgspec.json.decode(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))
    forged = base64.urlsafe_b64encode(msgspec.json.encode({**said, **changes})).rstrip(b"=").decode()
    return f"{HANDLE_PREFIX}{forged}.{proof}"


@pytest.mark.parametrize(
    "changes",
    [
        {"identity": base64.b64encode(b"i" * 32).decode()},
        {"media": base64.b64encode(b"m" * 32).decode()},
        {"key": base64.b64encode(b"k" * 32).decode()},
        {"grid": [1, 6, 4]},
        {"dtype": "bfloat16"},
    ],
)
def test_embedding_handle_changed_claim_is_refused(changes: dict[str, Any]) -> None:
    assert reason(replace_claims(TEXT, changes)) == "handle_signature"


@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii"))
def test_embedding_handle_changed_character_is_refused(at: int, other: str) -> None:
    changed = TEXT[:at] + other + TEXT[at + 1 :]
    try:
        found = EmbeddingHandle.verify(changed, SECRET, now=1000.0)
    except CodecError:
        return
    # The last character of base64 has bits that say nothing.
    assert found == HANDLE


@given(st.text(max_size=200).map(lambda text: HANDLE_PREFIX + text) | st.text(max_size=50))
def test_embedding_handle_other_text_is_malformed(text: str) -> None:
    assert reason(text) in ("handle_malformed", "handle_signature")


def test_embedding_handle_short_digest_is_malformed() -> None:
    assert reason(msgspec.structs.replace(HANDLE, key=b"short").to_signed_text(SECRET)) == "handle_malformed"


# -- the service's ---------------------------------------------------------------------------------


@pytest.fixture
def client(make_encoder: MakeEncoder, config: Config) -> Any:
    app = create_app(make_encoder(), config.encoder, secret=SECRET)
    with EncoderClient("http://e", transport=httpx.ASGITransport(app)) as client:
        yield client


def test_embedding_handle_of_service_names_model_and_media(
    client: EncoderClient, llava_pair: tuple[Path, Path], qwen: Path
) -> None:
    for model in (llava_pair[0], qwen):
        ref = client.encode(sample_image(1), model=str(model), cache_salt="tenant")
        assert ref.handle is not None
        said = EmbeddingHandle.verify(ref.handle, SECRET, now=time.time())
        served = next(row for row in client.models() if row["name"] == str(model))
        assert (said.family, said.identity.hex()) == (served["family"], served["identity"])
        assert said.media == digest_image(sample_image(1))
        assert said.key == ref.key
        assert said.key == identity.embedding_key(SECRET, said.identity, said.media, "tenant")
        assert said.dtype == ref.dtype
        if model == qwen:
            assert said.grid[0] == 1
            assert said.grid[1] * said.grid[2] == 4 * ref.shape[0]
        else:
            assert said.grid == ()


def test_embedding_handle_comes_with_stored_embedding(
    make_encoder: MakeEncoder, config: Config, qwen: Path, memory_store: MemoryStore
) -> None:
    app = create_app(make_encoder(memory_store.connect()), config.encoder, secret=SECRET)
    mine = memory_store.connect()
    with EncoderClient("http://e", transport=httpx.ASGITransport(app), store=mine) as client:
        ref = client.encode(sample_image(1), model=str(qwen))
    assert ref.in_store
    assert ref.handle is not None
    assert EmbeddingHandle.parse(ref.handle).key == ref.key


# -- request parts ---------------------------------------------------------------------------------


def ref_of(handle: EmbeddingHandle | None, dtype: str = "float32") -> EmbeddingRef:
    rows = np.arange(6 * 8, dtype="<u2" if dtype == "bfloat16" else dtype)
    text = None if handle is None else handle.to_signed_text(SECRET)
    return EmbeddingRef.from_response(
        key=HANDLE.key,
        shape=(6, 8),
        dtype=dtype,
        origin="computed",
        service_time_s=0.0,
        data=rows.tobytes(),
        handle=text,
    )


def test_vllm_part_by_handle_holds_text_and_grid() -> None:
    part = ref_of(HANDLE).to_vllm_content_part()
    assert part == {
        "type": "image_embeds",
        "image_embeds": {"image_embeds": TEXT, "image_grid_thw": [1, 4, 6]},
    }
    llava = msgspec.structs.replace(HANDLE, family="llava", grid=())
    assert ref_of(llava).to_vllm_content_part() == {
        "type": "image_embeds",
        "image_embeds": llava.to_signed_text(SECRET),
    }


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_vllm_part_by_value_holds_exact_rows(dtype: str) -> None:
    ref = ref_of(msgspec.structs.replace(HANDLE, family="llava", grid=(), dtype=dtype), dtype)
    data = ref.to_vllm_content_part(by_value=True)["image_embeds"]
    assert isinstance(data, str)
    np.testing.assert_array_equal(np.load(io.BytesIO(base64.b64decode(data))), ref.numpy())


@pytest.mark.parametrize(
    ("family", "modality"), [("qwen3_vl", "image"), ("gemma3", "image"), ("qwen2_vl", "video")]
)
def test_vllm_part_unsupported_family_is_refused(family: str, modality: Any) -> None:
    ref = ref_of(msgspec.structs.replace(HANDLE, family=family, modality=modality))
    with expect_error(EncoderRefused, reason="unsupported", match=family) as e:
        ref.to_vllm_content_part()
    assert modality in str(e.value)


def test_vllm_part_without_handle_is_refused() -> None:
    with pytest.raises(EncoderRefused) as e:
        replace(ref_of(HANDLE), handle=None).to_vllm_content_part(by_value=True)
    assert e.value.reason == "no_handle"
