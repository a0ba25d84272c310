"""Names of videos in vLLM: by frames, metadata, model and settings; of families that share videos only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.parse import MultiModalDataParser, MultiModalUUIDItems
from vllm.multimodal.processing.inputs import ProcessorInputs

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common.model_identity import EngineModel
from cornplug.vllm_connector.media import mm_identifiers
from cornplug.vllm_connector.media.mm_identifiers import MmIdentifiers, key_of
from cornplug.vllm_connector.media.video_digest import unshared_reason
from cornplug.vllm_connector.model import model_config
from cornplug.vllm_connector.model.model_config import tower_identity
from devkit import checkpoints

from ..wrapped import wrapper_of
from .test_mm_identifiers import config, final, named, sample_image

get_mm_hashes = wrapper_of(mm_identifiers, "BaseMultiModalProcessor._get_mm_hashes")

FRAMES = np.random.default_rng(0).integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
METADATA: Mapping[str, Any] = {"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_5_vl(tmp_path_factory.mktemp("qwen") / "m")


@pytest.fixture(autouse=True)
def validated(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = model_config.validated_families

    def families(dtype: str, kind: str = "image") -> frozenset[str]:
        return frozenset({"qwen2_5_vl", "qwen2_vl"}) if kind == "video" else recorded(dtype, kind)

    monkeypatch.setattr(model_config, "validated_families", families)


@pytest.fixture
def active(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MmIdentifiers:
    one = named(config(qwen), tmp_path)
    monkeypatch.setattr(mm_identifiers, "_active", one)
    return one


def name(
    frames: Any = FRAMES,
    metadata: Mapping[str, Any] | None = METADATA,
    *,
    uuid: str | None = None,
    beside: bool = False,
    **options: Any,
) -> str:
    """What `_get_mm_hashes` gives one video. `beside`: vLLM keeps metadata beside frames, as for Qwen2-VL."""
    item = None if frames is None else MediaWithBytes((frames, metadata), b"a file")
    items = MultiModalDataParser(video_needs_metadata=not beside).parse_mm_data({"video": [item]})
    given = MultiModalUUIDItems({"video": [uuid]}) if uuid is not None else None
    inputs = ProcessorInputs([1], items, given, hf_processor_mm_kwargs=options)

    def original(this: Any, inputs: ProcessorInputs) -> Any:
        return inputs.get_mm_hashes("model", "blake3")

    found: list[str] = get_mm_hashes(original, None, inputs)["video"]
    return found[0]


def test_video_name_follows_frames_metadata_and_options(active: MmIdentifiers) -> None:
    found = [
        name(),
        name(FRAMES[::-1]),
        name(metadata={**METADATA, "fps": 4.0}),
        name(metadata={**METADATA, "frames_indices": [0, 2, 4, 6]}),
        name(fps=1.0),
        name(max_pixels=4096),
    ]
    assert len(set(found)) == len(found)
    assert all(key_of(one) is not None for one in found)
    assert name() == found[0]
    assert name(beside=True) == found[0]


def test_video_key_differs_from_image_key_of_equal_digest(active: MmIdentifiers) -> None:
    assert final(active, name(), modality="video") != final(active, name(), modality="image")
    salted = [final(active, name(), salt, modality="video") for salt in (None, "", "x")]
    assert len(set(salted)) == 3


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"metadata": {**METADATA, "rotation": 90}}, "video_metadata"),
        ({"frames": FRAMES.astype(np.float32)}, "video_frames"),
        ({"fps": [1.0, 2.0]}, "video_options"),
        ({"new_argument": 1}, "video_options"),
    ],
)
def test_video_with_unknown_field_has_reason_for_name(
    active: MmIdentifiers, given: Mapping[str, Any], reason: str
) -> None:
    found = name(**given)
    assert key_of(found) is None
    assert unshared_reason(final(active, found, modality="video")) == reason
    # With a uuid it is vLLM's own name, as that of a later request with the uuid alone.
    alone = {k: v for k, v in given.items() if k not in ("frames", "metadata")}
    assert name(uuid="cat", **given) == name(None, uuid="cat", **alone)


def test_video_of_deployment_with_unknown_argument_is_not_shared(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"videos_kwargs": {"new_argument": 1}}
    monkeypatch.setattr(
        mm_identifiers, "_active", named(config(qwen, mm_processor_kwargs=settings), tmp_path)
    )
    assert unshared_reason(name()) == "video_options"
    # The request's own do not hide it.
    assert unshared_reason(name(videos_kwargs={"fps": 2.0})) == "video_options"


def test_video_of_processor_that_is_told_the_cpu_has_the_plain_name(
    active: MmIdentifiers, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = final(active, name(), modality="video")
    told = named(config(qwen, mm_processor_kwargs={"device": "cpu"}), tmp_path)
    monkeypatch.setattr(mm_identifiers, "_active", told)
    assert final(told, name(device="cpu"), modality="video") == plain
    there = named(config(qwen, mm_processor_kwargs={"device": "cuda"}), tmp_path)
    monkeypatch.setattr(mm_identifiers, "_active", there)
    assert unshared_reason(name(device="cuda")) == "video_options"


def test_video_uuid_alone_names_its_last_video_and_no_image(active: MmIdentifiers) -> None:
    assert name(None, uuid="cat") == "cat"
    assert name(uuid="cat") == name()
    assert name(None, uuid="cat") == name()
    active.media_name(sample_image(1), "dog", {})
    assert name(None, uuid="dog") == "dog"


def test_video_of_unproven_family_keeps_name_of_vllm(
    active: MmIdentifiers, qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = model_config.validated_families

    def images_alone(dtype: str, kind: str = "image") -> frozenset[str]:
        return frozenset() if kind == "video" else recorded(dtype, kind)

    monkeypatch.setattr(model_config, "validated_families", images_alone)
    monkeypatch.setattr(mm_identifiers, "_active", named(config(qwen), tmp_path))
    monkeypatch.setattr(mm_identifiers, "video_digest", None)  # not even hashed
    assert unshared_reason(name()) == "unproven_family"
    assert tower_identity(config(qwen)).videos is None


def test_video_of_pruning_engine_is_not_shared(qwen: Path, tmp_path: Path) -> None:
    pruning = config(qwen)
    settings = SimpleNamespace(mm_processor_kwargs=None, video_pruning_rate=0.5)
    pruning.model_config.get_multimodal_config = lambda: settings
    assert tower_identity(pruning).why_no_videos == "video_pruning"
    assert tower_identity(pruning).videos is None


def test_tower_identity_of_videos_is_served_and_counts_positions(
    qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def videos(folder: Path, **fields: Any) -> Any:
        found = tower_identity(config(folder, **fields)).for_modality("video")
        assert found is not None
        return found

    base = videos(qwen)
    served = Checkpoint.open(qwen).identity("float32", modality="video").identity
    assert base.served_identity == served
    described = json.loads((qwen / "config.json").read_text())
    described["vision_config"]["tokens_per_second"] = 4
    faster = tmp_path / "faster"
    shutil.copytree(qwen, faster)
    (faster / "config.json").write_text(json.dumps(described))
    asked = videos(qwen, mm_processor_kwargs={"max_pixels": 4096})
    # Spelled out, and read as what they were: a key of its own all the same.
    spelled = videos(qwen, mm_processor_kwargs={"do_sample_frames": False})
    assert spelled.served_identity == served
    # Of the same rows: positions alone differ.
    assert videos(faster).served_identity == served
    version = model_config.importlib.metadata.version

    def other_transformers(name: str) -> str:
        return "0.0" if name == "transformers" else version(name)

    monkeypatch.setattr(model_config.importlib.metadata, "version", other_transformers)
    found = {base.identity, videos(faster).identity, asked.identity, videos(qwen).identity, served}
    found.add(spelled.identity)
    assert len(found) == 6
    assert tower_identity(config(qwen)).for_modality("audio") is None


def test_tower_identity_shares_images_where_videos_cannot_be_identified(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = EngineModel(
        checkpoint=Checkpoint.open(checkpoints.llava(qwen.parent / "llava")),
        dtype="float32",
        max_model_len=64,
        engine="vllm",
        validated_families=frozenset({"llava"}),
        why_no_videos="",
    )
    found = model.tower_identity()
    assert (found.videos, found.why_no_videos) == (None, "modality")
    assert found.for_modality("image") is found
