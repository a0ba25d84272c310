"""Embeddings in requests, by vLLM's own loading, parsing and naming: by handle, by value, or not at all."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from time_limits import TimeLimits
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.models.qwen2_vl import Qwen2VLMultiModalDataParser
from vllm.multimodal.media.connector import MediaConnector
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing.inputs import ProcessorInputs

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.codec import PayloadKind
from cornplug.config import EMBEDDINGS_BY_VALUE, Config
from cornplug.encoder_service.client.embedding_ref import EmbeddingRef
from cornplug.encoder_service.formats.engine_seal import EmbeddingHandle
from cornplug.engine_common import engine_state
from cornplug.identity import embedding_key
from cornplug.store.client import open_store
from cornplug.store.memory import MemoryStore
from cornplug.store.payload import NewPayload, put_payload
from cornplug.vllm_connector import compat, connector_config
from cornplug.vllm_connector.media import embedding_handles, mm_identifiers
from cornplug.vllm_connector.media.embedding_handles import ReceivedHandles
from cornplug.vllm_connector.media.mm_identifiers import MmIdentifiers, key_of
from cornplug.vllm_connector.model import weight_updates

from ..wrapped import wrapper_of
from .test_mm_identifiers import SECRET, config, llava, sample_image  # noqa: F401

get_mm_hashes = wrapper_of(mm_identifiers, "BaseMultiModalProcessor._get_mm_hashes")
process_inputs = wrapper_of(mm_identifiers, "InputProcessor.process_inputs")
rpc_of_api = wrapper_of(weight_updates, "AsyncLLM.collective_rpc")

MEDIA = b"m" * 32
GRID = (1, 4, 6)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(capacity_bytes=1 << 20)


Make = Callable[..., MmIdentifiers]


@pytest.fixture
def make(
    llava: Path,  # noqa: F811
    tmp_path: Path,
    store: MemoryStore,
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    """The names that an API process gives, with our seams in vLLM for the length of the test."""
    for module, target, wrapper in mm_identifiers.WRAPS:
        if target == "ImageEmbeddingMediaIO.load_base64":
            from vllm.multimodal.media.image import ImageEmbeddingMediaIO

            monkeypatch.setattr(ImageEmbeddingMediaIO, "load_base64", ImageEmbeddingMediaIO.load_base64)
            compat.wrap(module, target, wrapper)

    def make(**fields: Any) -> MmIdentifiers:
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        secret.write_bytes(SECRET)
        extra = {"store.secret_file": str(secret), **fields.pop("extra", {})}
        made = MmIdentifiers(config(llava, **fields), extra)
        monkeypatch.setattr(embedding_handles, "open_store", lambda *_, **__: store.connect())
        monkeypatch.setattr(mm_identifiers, "_active", made)
        return made

    return make


def identity_of(path: Path) -> bytes:
    return Checkpoint.open(path).identity("float32").identity


def kept(store: MemoryStore, identity: bytes, *, salt: str | None = None, **changes: Any) -> EmbeddingRef:
    """What the service answers: rows in the store under the key, and a handle."""
    rows = np.random.default_rng(1).standard_normal((6, 64)).astype("<f4")
    key = embedding_key(SECRET, identity, MEDIA, salt)
    put_payload(
        store.connect(),
        NewPayload(rows.tobytes(), PayloadKind.EMBEDDING, key=key, dtype="float32", shape=(6, 64)),
        app="t",
        deadline_s=1,
    )
    fields: dict[str, Any] = {
        "family": "llava",
        "modality": "image",
        "identity": identity,
        "media": MEDIA,
        "key": key,
        "dtype": "float32",
        "grid": (),
        "expires": time.time() + 60,
    }
    secret = changes.pop("secret", SECRET)
    handle = EmbeddingHandle(**{**fields, **changes}).to_signed_text(secret)
    return EmbeddingRef.from_response(
        key=key,
        shape=(6, 64),
        dtype="float32",
        origin="computed",
        service_time_s=0,
        data=rows.tobytes(),
        handle=handle,
    )


def loaded(part: dict[str, Any]) -> Any:
    """A content part's tensors, by vLLM's loader, both ways it is called."""
    embeds = part["image_embeds"]
    connector = MediaConnector()
    if isinstance(embeds, str):
        found = connector.fetch_image_embedding(embeds)
        assert torch.equal(found, asyncio.run(connector.fetch_image_embedding_async(embeds)))
        return found
    return {
        name: connector.fetch_image_embedding(value) if isinstance(value, str) else torch.tensor([value])
        for name, value in embeds.items()
    }


def names(data: Any, **kwargs: Any) -> list[str]:
    """What items are called, by vLLM's parser for LLaVA (a tensor) or Qwen2-VL (a dictionary)."""
    if isinstance(data, dict):
        parser: Any = Qwen2VLMultiModalDataParser(
            2, expected_hidden_size=64, allow_missing_mm_embeddings=True
        )
    else:
        parser = MultiModalDataParser(expected_hidden_size=64)
        data = data.unsqueeze(0) if isinstance(data, torch.Tensor) else data
    inputs = ProcessorInputs([1], parser.parse_mm_data({"image": data}), None, hf_processor_mm_kwargs=kwargs)
    found = get_mm_hashes(lambda this, inputs: inputs.get_mm_hashes("model", "blake3"), None, inputs)
    return found["image"]


def final(mm_hash: str, salt: str | None = None, identifier: str | None = None) -> str:
    feature = SimpleNamespace(mm_hash=mm_hash, identifier=identifier or mm_hash)
    request = SimpleNamespace(mm_features=[feature], cache_salt=salt)
    process_inputs(lambda this, request: request, None, request)
    return feature.identifier


@pytest.mark.parametrize("salt", [None, "tenant"])
def test_embedding_handle_loaded_has_embedding_key_of_image(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
    salt: str | None,
) -> None:
    make()
    ref = kept(store, identity_of(llava), salt=salt)
    rows = loaded(ref.to_vllm_content_part())
    np.testing.assert_array_equal(rows.numpy(), ref.numpy())
    [name] = names(rows)
    # vLLM's processor cache must not take it for the image: its inputs are others.
    assert key_of(name) is None
    assert key_of(final(name, salt)) == ref.key
    assert names(loaded(kept(store, identity_of(llava), salt=salt).to_vllm_content_part())) == [name]


def test_embedding_handle_with_another_grid_is_refused(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
) -> None:
    make()
    ref = kept(store, identity_of(llava), family="qwen2_vl", grid=GRID)
    part = ref.to_vllm_content_part()
    [name] = names(loaded(part))
    assert key_of(final(name)) == ref.key
    part["image_embeds"]["image_grid_thw"] = [1, 6, 4]
    with pytest.raises(VLLMValidationError, match="only by handle"):
        names(loaded(part))


def test_embedding_handle_of_another_salt_is_refused(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
) -> None:
    make()
    [name] = names(loaded(kept(store, identity_of(llava), salt="a").to_vllm_content_part()))
    for salt in (None, "", "b"):
        with pytest.raises(VLLMValidationError, match="salt"):
            final(name, salt)


def test_embedding_handle_invalid_or_evicted_error_names_cause(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
) -> None:
    here = make()
    right = identity_of(llava)
    wrong = {
        "not signed": kept(store, right, secret=b"x" * 32),
        "expired": kept(store, right, expires=time.time() - 1),
        "another model": kept(store, b"i" * 32),
        "from another model, dtype": kept(store, right, dtype="bfloat16"),
        "no longer": kept(store, right, key=b"k" * 32),
    }
    for message, ref in wrong.items():
        with pytest.raises(VLLMValidationError, match=message):
            loaded(ref.to_vllm_content_part())
    with pytest.raises(VLLMValidationError, match="not an embedding handle"):
        here.handles.load("cornplug1.xyz")
    store.connect().delete([kept(store, right).key], deadline_s=1)
    with pytest.raises(VLLMValidationError, match="no longer"):
        loaded({"image_embeds": kept_handle_only(right)})
    # As vLLM's API process learns it.
    config = SimpleNamespace(kv_transfer_config=None, ec_transfer_config=None)
    rpc_of_api(lambda *args: None, SimpleNamespace(vllm_config=config), "list_loras")
    assert loaded(kept(store, right).to_vllm_content_part()) is not None
    rpc_of_api(lambda *args: None, SimpleNamespace(vllm_config=config), "update_weights")
    with pytest.raises(VLLMValidationError, match="another model"):
        loaded(kept(store, right).to_vllm_content_part())


def kept_handle_only(identity: bytes) -> str:
    handle = EmbeddingHandle(
        family="llava",
        modality="image",
        identity=identity,
        media=b"n" * 32,
        key=b"n" * 32,
        dtype="float32",
        grid=(),
        expires=time.time() + 60,
    )
    return handle.to_signed_text(SECRET)


def test_embedding_handle_with_store_down_fails_within_deadline(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
    within: TimeLimits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make()
    ref = kept(store, identity_of(llava))
    monkeypatch.setattr(embedding_handles, "open_store", open_store)  # nobody serves this test's socket
    with within(15), pytest.raises(VLLMValidationError):
        loaded(ref.to_vllm_content_part())


def test_embedding_by_value_without_flag_is_refused(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
) -> None:
    """vLLM turns --enable-mm-embeds on for any connector that loads embeddings."""
    make()
    part = kept(store, identity_of(llava)).to_vllm_content_part(by_value=True)
    rows = loaded(part)
    with pytest.raises(VLLMValidationError, match="--enable-mm-embeds"):
        names(rows)
    make(extra={EMBEDDINGS_BY_VALUE: True})
    [name] = names(rows)
    assert key_of(final(name)) is None, "nobody says what it is of"


def test_connector_config_enable_mm_embeds_reaches_extra_config() -> None:
    def config(asked: bool) -> dict[str, Any]:
        made = SimpleNamespace(
            kv_transfer_config=SimpleNamespace(
                kv_connector="CornplugConnector",
                kv_connector_extra_config={},
                kv_load_failure_policy="recompute",
            ),
            ec_transfer_config=SimpleNamespace(
                ec_connector="CornplugECConnector", ec_role="ec_both", ec_connector_extra_config={}
            ),
            model_config=SimpleNamespace(is_multimodal_model=True, is_encoder_decoder=False),
            attention_config=SimpleNamespace(backend=None),
        )
        given = SimpleNamespace(
            kv_transfer_config=made.kv_transfer_config,
            ec_transfer_config=made.ec_transfer_config,
            enable_mm_embeds=asked,
            mm_encoder_only=False,
            kv_offloading_size=None,
        )
        connector_config.create_engine_config(lambda args: made, given)
        assert made.kv_transfer_config.kv_connector_extra_config == (
            made.ec_transfer_config.ec_connector_extra_config
        )
        return made.ec_transfer_config.ec_connector_extra_config

    for asked in (True, False):
        assert config(asked).get(EMBEDDINGS_BY_VALUE, False) is asked


@pytest.mark.parametrize("by_value", [False, True])
def test_embedding_missing_from_request_is_refused(make: Make, by_value: bool) -> None:
    """vLLM trusts that a connector like ours has it; its worker dies where it has not."""
    make(extra={EMBEDDINGS_BY_VALUE: by_value})
    with pytest.raises(VLLMValidationError, match="missing"):
        names({"image_grid_thw": torch.tensor([GRID])})


def test_embedding_missing_beside_other_ec_connector_is_accepted(make: Make) -> None:
    kv = SimpleNamespace(kv_connector="CornplugConnector", kv_connector_extra_config={})
    make(ec="Other", kv=kv)
    [name] = names({"image_grid_thw": torch.tensor([GRID])})
    assert key_of(name) is None


def test_embedding_handle_forged_rows_get_no_key(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
) -> None:
    make(extra={EMBEDDINGS_BY_VALUE: True})
    ref = kept(store, identity_of(llava))
    rows = loaded(ref.to_vllm_content_part())
    [name] = names(rows)
    assert names(rows.clone()) == [name], "equal bytes are the same embedding, whoever sends them"
    forged = rows.clone()
    forged[0, 0] += 1
    assert names(forged) != [name]
    assert key_of(final(names(forged)[0])) is None
    assert final(f"foreign-{name}") == f"foreign-{name}"


def test_embedding_handle_name_as_uuid_gets_no_key(make: Make) -> None:
    made = make()
    claimed = f"cpv1-{MEDIA.hex()}-{bytes(32).hex()}"
    assert mm_identifiers._foreign_name(claimed) == f"foreign-{claimed}"
    assert key_of(final(f"foreign-{claimed}")) is None
    with pytest.raises(VLLMValidationError):
        made.create_identifier(claimed, None)


def test_embedding_handle_with_processor_args_or_lora_is_refused(
    make: Make,
    llava: Path,  # noqa: F811
    store: MemoryStore,
) -> None:
    make()
    rows = loaded(kept(store, identity_of(llava)).to_vllm_content_part())
    with pytest.raises(VLLMValidationError, match="size"):
        names(rows, size=28)
    [name] = names(rows)
    with pytest.raises(VLLMValidationError, match="adapter"):
        final(name, identifier=f"7:{name}")


def test_embedding_handle_in_stock_vllm_is_value_error() -> None:
    """A stock engine's answer to one: an error, as to any bytes that are no tensor."""
    text = msgspec.structs.replace(EmbeddingHandle.parse(kept_handle_only(b"i" * 32))).to_signed_text(SECRET)
    with pytest.raises(ValueError, match=r"base64|character|Invalid|Non"):
        MediaConnector().fetch_image_embedding(text)


def test_vllm_npy_embedding_loads_as_tensor() -> None:
    out = io.BytesIO()
    np.save(out, np.ones((2, 3), "<f2"))
    found = MediaConnector().fetch_image_embedding(base64.b64encode(out.getvalue()).decode())
    assert torch.equal(found, torch.ones(2, 3, dtype=torch.float16))


def test_mm_identifiers_image_beside_handles_gets_key(make: Make) -> None:
    make()
    [name] = names([sample_image(1)])
    assert key_of(name) is not None


def test_received_handles_after_weights_replaced_are_refused(tmp_path: Path) -> None:
    taken = ReceivedHandles(Config(), bytes(32), lambda: bytes(32), dtype="float32")
    name = "cpv1-" + "11" * 32 + "-" + "22" * 32
    with pytest.raises(VLLMValidationError, match="salt differs"):
        taken.verified_key(name, None)
    engine_state.current().mark_weights_unknown()
    with pytest.raises(VLLMValidationError, match="weights were replaced"):
        taken.verified_key(name, None)
