"""Audio and video of families that `cornplug.checkpoints.families` does not describe, and two-tower models.

The reference is what the decoder of transformers' whole model receives in place of the medium's tokens.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from expected_errors import expect_error
from PIL import Image
from transformers.video_utils import VideoMetadata

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import Modality
from cornplug.config import Config
from cornplug.encoder_service import replica_messages
from cornplug.encoder_service.formats import audio, video
from cornplug.encoder_service.model_loader import read_checkpoint
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess.preparer import MediaPreparer, MediaSource
from cornplug.encoder_service.preprocess.preprocessor import MediaLimits
from cornplug.encoder_service.replica_main import ReplicaModels
from cornplug.errors import EncoderRefused
from cornplug.store.memory import MemoryStore
from devkit import checkpoints

from .. import recordings
from ..conftest import SECRET, MakeEncoder, png, sample_image
from ..http_service import Service
from ..tower_rig import edit_config
from .test_generic import Tiny, rows_of, tiny

__all__ = ["tiny"]
OMNI = "qwen2_5_omni"
"""A vision and an audio tower in one model."""
SOON = {("qwen2_5_omni", "audio"), ("glm4v", "video")}
"""Cases that `script/test` runs."""
CASES = [
    pytest.param(name, modality, marks=[] if (name, modality) in SOON else pytest.mark.more)
    for name, family in checkpoints.ANY_FAMILIES.items()
    for modality in family.media
    if modality != "image" or family.nested or name in ("llama4", "ovis2")
]
"""Whose rows are not simply what `get_image_features` gives: these `test_generic` compares."""
MEDIA: dict[Modality, Callable[[int], bytes]] = {
    "image": lambda i: png(sample_image(i, 70 + 30 * i, 60)),
    "audio": lambda i: recordings.wav(recordings.tone(0.4 + 0.9 * i)),
    "video": lambda i: recordings.video(recordings.moving(20 + 10 * i, 96, 72)),
}


def expected(path: Path, modality: Modality, data: bytes) -> torch.Tensor:
    """The rows in the decoder's input, by transformers' processor and whole model."""
    processor = transformers.AutoProcessor.from_pretrained(path)
    config: Any = transformers.AutoConfig.from_pretrained(path)
    config = getattr(config, "thinker_config", config)
    mapping: Any = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(config) not in mapping:
        mapping = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    kind = mapping[type(config)]
    model = kind.from_pretrained(path, config=config, dtype=torch.float32).eval()
    mark = f"a{getattr(processor, f'{modality}_token')}a"
    if modality == "video":
        mark = f"<|begin_of_video|>{mark}<|end_of_video|>"  # GLM's, to others plain text
    if modality == "audio":
        found = audio.decode(data, max_s=60)
        made = processor(text=mark, audio=found.samples, sampling_rate=found.rate, return_tensors="pt")
    elif modality == "video":
        every = video.decode(data, lambda source: range(source.total), video.VideoLimits())
        source = every.header
        metadata = VideoMetadata(total_num_frames=source.total, fps=source.fps, duration=source.duration_s)
        frames = torch.from_numpy(every.frames).permute(0, 3, 1, 2)
        made = processor(text=mark, videos=[frames], video_metadata=[metadata], return_tensors="pt")
    else:
        made = processor(text=mark, images=Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="pt")
    seen: list[tuple[torch.Tensor, list[torch.Tensor]]] = []

    def keep(_module: Any, _args: Any, kwargs: Any) -> None:
        seen.append((kwargs["inputs_embeds"][0].clone(), kwargs.get("deepstack_visual_embeds") or []))

    model.get_decoder().register_forward_pre_hook(keep, with_kwargs=True)
    with torch.inference_mode():
        # Llama 4's processor makes bfloat16.
        model(**{k: t.float() if t.is_floating_point() else t for k, t in made.items()})
        tokens = model.get_input_embeddings()(made["input_ids"])[0]
    (rows, levels) = seen[0]
    return torch.cat([rows[(rows != tokens).any(-1)], *levels], dim=-1)


@pytest.mark.parametrize(("name", "modality"), CASES)
def test_generic_modality_over_http_equals_the_decoders_input(
    name: str,
    modality: Modality,
    tiny: Tiny,
    make_encoder: MakeEncoder,
    memory_store: MemoryStore,
    config: Config,
) -> None:
    """To 1e-6 of the largest value; `-s` prints by how much each is off."""
    registry = ModelRegistry.open([str(tiny(name))], dtype="float32", device="cpu")
    service = Service(make_encoder(memory_store.connect(), registry=registry), config)
    for i in range(2):
        data = MEDIA[modality](i)
        sent = {"data": {"model": str(tiny(name)), "deadline_s": "100"}, "files": {modality: data}}
        first, second = service.post(**sent), service.post(**sent)
        assert (first.status_code, second.status_code) == (200, 200), first.text
        assert (first.json()["origin"], second.json()["origin"]) == ("computed", "cached")
        ours, theirs = rows_of(first.json()), expected(tiny(name), modality, data)
        assert ours.shape == theirs.shape
        worst = float((ours - theirs).abs().max())
        print(f"{name} {modality} {i}: {tuple(ours.shape)}, off by {worst:g}")
        assert worst <= 1e-6 * max(1.0, float(theirs.abs().max()))


def identities(path: Path) -> dict[str, bytes]:
    """Model identity by modality."""
    return {
        modality.name: modality.identity for modality in read_checkpoint(str(path), "float32")[1].modalities
    }


def changed(path: Path, other: Path) -> set[str]:
    """The modalities whose identity differs."""
    return {name for name, found in identities(path).items() if found != identities(other)[name]}


def omni(path: Path, **seeds: int) -> Path:
    return checkpoints.any_family(path, OMNI, checkpoints.ANY_FAMILIES[OMNI], **seeds)


def test_generic_two_towers_weights_change_their_own_modalities_keys_only(tiny: Tiny, tmp_path: Path) -> None:
    assert len(set(identities(tiny(OMNI)).values())) == 3
    assert changed(omni(tmp_path / "vision", tower_seed=5), tiny(OMNI)) == {"image", "video"}
    assert changed(omni(tmp_path / "audio", audio_seed=5), tiny(OMNI)) == {"audio"}
    assert changed(omni(tmp_path / "llm", llm_seed=5), tiny(OMNI)) == set()


@pytest.mark.parametrize(
    ("file", "path", "value", "modalities"),
    [
        ("config.json", ("thinker_config", "audio_config", "n_window"), 50, {"audio"}),
        ("config.json", ("thinker_config", "vision_config", "window_size"), 112, {"image", "video"}),
        ("config.json", ("thinker_config", "text_config", "vocab_size"), 7, {"image", "video", "audio"}),
        ("processor_config.json", ("feature_extractor", "hop_length"), 80, {"audio"}),
        ("processor_config.json", ("video_processor", "patch_size"), 7, {"image", "video"}),
        ("preprocessor_config.json", ("image_mean",), [0.1, 0.2, 0.3], {"image", "video", "audio"}),
    ],
)
def test_generic_two_towers_settings_change_the_keys_of_modalities_that_read_them(
    file: str, path: tuple[str, ...], value: Any, modalities: set[str], tiny: Tiny, tmp_path: Path
) -> None:
    """A file that several processors read counts for all."""
    copy = Path(shutil.copytree(tiny(OMNI), tmp_path / "copy"))
    whole = json.loads((copy / file).read_text())
    part = whole
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    (copy / file).write_text(json.dumps(whole))
    assert changed(copy, tiny(OMNI)) == modalities


@pytest.mark.more
def test_generic_two_towers_are_loaded_apart_and_shared_apart(tiny: Tiny, tmp_path: Path) -> None:
    other = omni(tmp_path / "other", tower_seed=5)
    registry = ModelRegistry.open([str(tiny(OMNI)), str(other)], dtype="float32", device="cpu")
    one, two = registry.loaded_models()
    assert registry.summary() == "2 models, 3 towers, 2 projectors"
    assert one.part_for("image") is one.part_for("video") is not one.part_for("audio")
    assert {part.modalities for part in one.iter_parts()} == {("image", "video"), ("audio",)}
    assert [part.tower for part in one.other_parts] == [part.tower for part in two.other_parts]
    assert one.tower is not two.tower
    for modality, found in identities(tiny(OMNI)).items():
        assert registry.find_by_identity(found) is one.part_for(modality)
    # Neither model holds the other's weights.
    names = {part.modalities[0]: vars(part.tower)["_model"].state_dict().keys() for part in one.iter_parts()}
    assert not any("audio" in name for name in names["image"])
    assert not any("visual" in name for name in names["audio"])
    assert names["image"]
    assert names["audio"]


def test_replica_finds_each_tower_by_its_own_identity(tiny: Tiny) -> None:
    _, served = read_checkpoint(str(tiny(OMNI)), "float32")
    models = ReplicaModels(replica_messages.OpenModels((), "float32", "cpu", 1, False))
    models.load([replica_messages.ModelSpec(str(tiny(OMNI)), served.identity)])
    for part in ("image", "audio"):
        wanted = served.identity_for(part)
        assert wanted is not None
        assert part in models.get(wanted).modalities


def test_generic_modality_that_transformers_cannot_serve_is_left_out_and_named(
    tiny: Tiny, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Images of the model are served all the same."""
    copy = Path(shutil.copytree(tiny("mistral3"), tmp_path / "copy"))
    edit_config(copy, audio_token_id=3)
    written = json.loads((copy / "processor_config.json").read_text())
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor"}
    (copy / "processor_config.json").write_text(json.dumps({**written, "feature_extractor": extractor}))
    lines: list[str] = []
    registry = ModelRegistry.open([str(copy)], dtype="float32", device="cpu", report=lines.append)
    preparer = MediaPreparer(registry, secret=SECRET, limits=MediaLimits())
    assert any("audio: not served" in line for line in (*lines, *caplog.messages))
    assert Checkpoint.open(str(copy)).family.inputs.keys() == {"image", "audio"}

    def source(modality: Modality) -> MediaSource:
        return MediaSource(
            model=str(copy), modality=modality, contents=[MEDIA[modality](0)], salt=None, deadline_s=9
        )

    assert preparer.prepare(source("image")).inputs
    with expect_error(EncoderRefused, reason="modality"):
        preparer.prepare(source("audio"))


@pytest.mark.more
def test_generic_videos_of_other_samplers_are_remembered_apart(tiny: Tiny, tmp_path: Path) -> None:
    """One file, and other frames of it by another setting of the video processor."""
    copy = Path(shutil.copytree(tiny(OMNI), tmp_path / "copy"))
    written = json.loads((copy / "processor_config.json").read_text())
    written["video_processor"] |= {"do_sample_frames": True, "fps": 2}
    (copy / "processor_config.json").write_text(json.dumps(written))
    registry = ModelRegistry.open([str(tiny(OMNI)), str(copy)], dtype="float32", device="cpu")
    preparer = MediaPreparer(registry, secret=SECRET, limits=MediaLimits())
    data = MEDIA["video"](2)
    digests = []
    for path in (tiny(OMNI), copy):
        medium = preparer.open(
            MediaSource(model=str(path), modality="video", contents=[data], salt=None, deadline_s=9)
        )
        assert medium.look_up_cached(lambda request: None) is None
        digests.append(medium.prepare().media_digest)
    assert len(set(digests)) == 2
    assert np.frombuffer(digests[0], np.uint8).size == 32
