from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import (
    Modality,
    MultimodalDataItem,
    MultimodalInputFormat,
    MultimodalProcessorOutput,
)

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.formats.image import digest_image
from cornplug.engine_common.model_identity import EngineModel, TowerIdentity
from cornplug.errors import CheckpointError
from cornplug.identity import embedding_key
from cornplug.sglang_hooks import activation, compat
from cornplug.sglang_hooks.media import media_digests, mm_identifiers
from cornplug.sglang_hooks.media.media_digests import OwnTower, inputs_digest, own_tower
from cornplug.sglang_hooks.media.mm_identifiers import MediaIdentifiers, Towers
from cornplug.sglang_hooks.media.placeholder_tokens import key_of
from cornplug.store.memory import MemoryStore
from devkit import checkpoints

from ..media_rig import SECRET, TOWER, runtime, sample_image

COMPARED = TowerIdentity(TOWER, TOWER)
OWN = TowerIdentity(b"o" * 32, None)

SETTINGS = SimpleNamespace(
    attention_backend="torch_native",
    device="cpu",
    mm_attention_backend="sdpa",
    prefill_attention_backend=None,
    tp_size=1,
)


def item(feature: Any, modality: Modality = Modality.IMAGE, **data: Any) -> MultimodalDataItem:
    return MultimodalDataItem(
        modality=modality, offsets=[(0, 3)], feature=feature, model_specific_data=dict(data)
    )


PIXELS = torch.arange(24, dtype=torch.float32).view(4, 6)


@pytest.mark.parametrize(
    "other",
    [
        item(PIXELS + 1),
        item(PIXELS.view(6, 4)),
        item(PIXELS.half()),
        item(PIXELS.numpy()),
        item(PIXELS, Modality.VIDEO),
        item(PIXELS, grid=torch.tensor([1, 2, 3])),
        item(PIXELS, grid=[1, 2, 3]),
        item(PIXELS, grid=(1, 2, 4)),
        item(PIXELS, sizes=[(7, 5)]),
        item(PIXELS, seconds=1.0),
        item(PIXELS, seconds=1),
        item(PIXELS, seconds="1"),
        item(PIXELS, flag=True),
        item(PIXELS, flag=None),
        item(PIXELS, named={"a": 1}),
        item(PIXELS, named={"b": 1}),
    ],
)
def test_inputs_digest_tells_every_other_input_apart(other: MultimodalDataItem) -> None:
    found = inputs_digest(other)
    assert found is not None
    assert len(found) == 32
    assert found != inputs_digest(item(PIXELS))


def test_inputs_digest_ignores_order_strides_and_own_fields() -> None:
    one = item(PIXELS, a=1, b=[2.0])
    other = item(PIXELS.mT.contiguous().mT, b=[2.0], a=1, cornplug_key=b"k" * 32, cornplug_source="store")
    assert inputs_digest(one) == inputs_digest(other)


@pytest.mark.parametrize(
    "unknown",
    [
        item(None),
        item(SimpleNamespace(handle=7)),
        item(PIXELS, more=object()),
        item(np.array([object()])),
        item(PIXELS.to_sparse()),
    ],
)
def test_inputs_digest_of_unknown_values_is_none(unknown: MultimodalDataItem) -> None:
    assert inputs_digest(unknown) is None


def test_inputs_digest_of_client_tensors_is_none() -> None:
    made = item(PIXELS)
    made.format = MultimodalInputFormat.PROCESSOR_OUTPUT
    assert inputs_digest(made) is None


def test_inputs_digest_is_the_same_in_every_process() -> None:
    """The seed of Python's hashes differs in each run of the tests."""
    made = item(PIXELS, grid=torch.tensor([[1, 2, 3]]), named={"a": 1, "b": 2})
    digest = inputs_digest(made)
    assert digest is not None
    assert digest.hex() == "52ef67c7ec0c1d12bd899fe5e6b0d0abaef2309730a9e804827a254c35b6a6bb"


def model(folder: Path, **fields: Any) -> EngineModel:
    return EngineModel(
        checkpoint=Checkpoint.open(str(folder)),
        dtype=fields.pop("dtype", "float32"),
        max_model_len=64,
        engine="sglang",
        validated_families=frozenset(),
        **fields,
    )


def shared(monkeypatch: pytest.MonkeyPatch, own: Mapping[str, set[str]]) -> None:
    """Let SGLang's servers share these families among themselves: modality -> families."""

    def families(_dtype: str, kind: str) -> frozenset[str]:
        return frozenset(own.get(kind.removeprefix("own "), ()))

    monkeypatch.setattr(media_digests, "validated_families", families)


def test_own_tower_of_another_checkpoint_or_setting_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared(monkeypatch, {"image": {"gemma3"}, "audio": {"qwen2_audio"}})
    folder = checkpoints.gemma3(tmp_path / "a")
    twin, tuned = checkpoints.gemma3(tmp_path / "b"), checkpoints.gemma3(tmp_path / "c", llm_seed=2)

    def identity(one: EngineModel, settings: Any = SETTINGS) -> bytes:
        found = own_tower(one, settings, generic=False)
        assert found is not None
        assert found.modalities == {"image"}
        assert found.tower.served_identity is None
        return found.tower.identity

    first = identity(model(folder))
    assert identity(model(twin)) == first
    others = [
        identity(model(tuned)),
        identity(model(folder, dtype="bfloat16")),
        identity(model(folder, overrides={"x": 1})),
        identity(model(folder), SimpleNamespace(**{**vars(SETTINGS), "attention_backend": "triton"})),
    ]
    monkeypatch.setattr(media_digests, "version", lambda package: "0.0.1")
    others.append(identity(model(folder)))
    config = json.loads((twin / "config.json").read_text())
    (twin / "config.json").write_text(json.dumps({**config, "image_token_index": 3}))
    others.append(identity(model(twin)))
    assert len({first, *others}) == 1 + len(others)


def test_own_tower_of_family_without_a_test_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared(monkeypatch, {"image": {"gemma3"}})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nobody_knows"}))
    assert own_tower(model(tmp_path), SETTINGS, generic=False) is None


def test_own_tower_of_the_generic_backend_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared(monkeypatch, {"image": {"gemma3"}})
    assert own_tower(model(checkpoints.gemma3(tmp_path)), SETTINGS, generic=True) is None


def test_own_tower_with_parts_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared(monkeypatch, {"audio": {"ultravox"}})
    folder = checkpoints.ultravox(tmp_path / "model", base=tmp_path / "whisper")
    with pytest.raises(CheckpointError, match="another checkpoint"):
        own_tower(model(folder), SETTINGS, generic=False)


# -- keys ------------------------------------------------------------------------------------


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> None:
    here = runtime(MemoryStore(capacity_bytes=1 << 20).connect())
    monkeypatch.setattr(activation, "runtime", lambda: here)


def keyed(items: list[Any], *modalities: str, images: TowerIdentity | None = None, **asked: Any) -> list[Any]:
    """The items that get a key, of towers whose own is that of these modalities."""
    towers = Towers(images, OwnTower(OWN, frozenset(modalities)))
    asyncio.run(media_digests.compute_digests(items, towers.own_modalities))
    request = GenerateReqInput(text="x", image_data=["a"], **asked)
    return mm_identifiers.assign_keys(MultimodalProcessorOutput(mm_items=items), towers, request)


def own_key(one: MultimodalDataItem) -> bytes:
    media = inputs_digest(one)
    assert media is not None
    return embedding_key(SECRET, OWN.identity, media, None)


def image() -> MultimodalDataItem:
    """With the digest of its pixels."""
    made = item(PIXELS)
    media_digests.set_digest(made, digest_image(sample_image(1)))
    return made


@pytest.mark.usefixtures("on")
def test_mm_identifiers_own_tower_key_is_of_its_inputs() -> None:
    sound, clip, picture = item(PIXELS, Modality.AUDIO), item(PIXELS, Modality.VIDEO), image()
    expected = own_key(sound)
    assert keyed([sound, clip, picture], "audio") == [sound]
    assert key_of(sound) == expected
    assert clip.identity is None
    assert picture.identity is None


@pytest.mark.usefixtures("on")
def test_mm_identifiers_compared_tower_of_images_goes_before_own() -> None:
    picture, clip = image(), item(PIXELS, Modality.VIDEO)
    expected = own_key(clip)
    assert keyed([picture, clip], "image", "video", images=COMPARED) == [picture, clip]
    assert key_of(picture) == embedding_key(SECRET, TOWER, digest_image(sample_image(1)), None)
    assert key_of(clip) == expected


@pytest.mark.usefixtures("on")
def test_mm_identifiers_own_tower_ignores_processor_args() -> None:
    """Their effect is in what enters the tower."""
    one = image()
    expected = own_key(one)
    assert keyed([one], "image", mm_processor_kwargs={"x": float("nan")}) == [one]
    assert key_of(one) == expected


def identified() -> Towers:
    """Towers of a tokenizer process, once they are read."""
    return asyncio.run(MediaIdentifiers(None).towers())[1]


@pytest.mark.parametrize("compared", [False, True])
def test_mm_identifiers_own_tower_stands_in_for_one_not_compared(
    monkeypatch: pytest.MonkeyPatch, compared: bool
) -> None:
    own = OwnTower(OWN, frozenset({"image"}))

    def identify(processor: Any) -> TowerIdentity:
        if compared:
            return COMPARED
        raise CheckpointError("no test compares", reason="unproven_family")

    monkeypatch.setattr(mm_identifiers, "_tower_identity", identify)
    monkeypatch.setattr(mm_identifiers, "_own_tower", lambda: own)
    found = identified()
    assert found == Towers(COMPARED if compared else None, own)
    assert found.own_modalities == (frozenset() if compared else {"image"})
    if not compared:
        monkeypatch.setattr(mm_identifiers, "_own_tower", lambda: None)
        with mock.patch.object(compat.logger, "warning") as warning:
            assert identified() == Towers()
        assert "no test compares" in str(warning.call_args)


@pytest.mark.parametrize("compared", [False, True])
def test_mm_identifiers_own_tower_that_fails_leaves_compared_images(
    monkeypatch: pytest.MonkeyPatch, compared: bool
) -> None:
    def fail(*_: Any) -> Any:
        raise CheckpointError("a part lies elsewhere", reason="unknown_family")

    monkeypatch.setattr(mm_identifiers, "_own_tower", fail)
    monkeypatch.setattr(mm_identifiers, "_tower_identity", lambda _: COMPARED if compared else fail())
    if compared:
        assert identified() == Towers(COMPARED)
    else:
        with mock.patch.object(compat.logger, "warning") as warning:
            assert identified() == Towers()
        assert "elsewhere" in str(warning.call_args)
