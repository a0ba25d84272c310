"""From media to requests: the tower's inputs, and the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, AutoVideoProcessor, Qwen2AudioProcessor, WhisperFeatureExtractor

from cornplug.encoder_service.media import audio
from cornplug.encoder_service.models.registry import ModelRegistry
from cornplug.encoder_service.preprocess.preparer import MediaPreparer, PreprocessedMedium
from cornplug.encoder_service.preprocess.preprocessor import FrameSampling, MediumLimits
from cornplug.encoder_service.towers.input_checks import FLOATS, INTEGERS, from_wire
from cornplug.errors import EncoderRefused, MediaError
from cornplug.identity import embedding_key
from devkit import checkpoints

from ..conftest import SECRET, png, sample_image
from ..recordings import encoded, moving, tone, video, wav

SPOKEN = tone(1.3)


@pytest.fixture(scope="module")
def on_header(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_audio(tmp_path_factory.mktemp("audio") / "q", seconds=4)


@pytest.fixture(scope="module")
def preparer(on_header: Path) -> MediaPreparer:
    registry = ModelRegistry.open([str(on_header)], dtype="float32", device="cpu")
    return MediaPreparer(registry, secret=SECRET, limits=MediumLimits(max_audio_s=10))


def prepare(preparer: MediaPreparer, path: Path, data: bytes) -> PreprocessedMedium:
    return preparer.prepare(str(path), "audio", data, salt=None, deadline_s=5)


def test_preparer_audio_inputs_equal_transformers_processor(preparer: MediaPreparer, on_header: Path) -> None:
    made = prepare(preparer, on_header, wav(SPOKEN)).request.inputs
    processor = Qwen2AudioProcessor(
        WhisperFeatureExtractor.from_pretrained(on_header), AutoTokenizer.from_pretrained(on_header)
    )
    theirs = processor(text="<|AUDIO|>", audio=[SPOKEN[:, 0] / np.float32(32768)], sampling_rate=16_000)
    ours = from_wire("x", made["input_features"], FLOATS)
    assert torch.equal(ours, torch.as_tensor(theirs["input_features"]))
    mask = from_wire("x", made["feature_attention_mask"], INTEGERS)
    assert torch.equal(mask.long(), torch.as_tensor(theirs["feature_attention_mask"]).long())


def test_preparer_key_depends_on_samples_model_and_salt(preparer: MediaPreparer, on_header: Path) -> None:
    by_wav, by_flac = (
        prepare(preparer, on_header, d) for d in (wav(SPOKEN), encoded(SPOKEN, "flac", "flac"))
    )
    assert by_wav.request == by_flac.request
    served = preparer._registry.served()[0]
    digest = audio.decode(wav(SPOKEN), max_s=9).digest()
    assert by_wav.media_digest == digest
    assert by_wav.request.key == embedding_key(SECRET, served.identity, digest, None)
    salted = preparer.prepare(str(on_header), "audio", wav(SPOKEN), salt="t", deadline_s=5)
    assert salted.request.key != by_wav.request.key


def test_preparer_audio_is_resampled_to_model_rate(preparer: MediaPreparer, on_header: Path) -> None:
    made = prepare(preparer, on_header, wav(tone(1.3, 48_000), 48_000)).request.inputs
    ours = from_wire("x", made["input_features"], FLOATS)
    theirs = from_wire(
        "x", prepare(preparer, on_header, wav(SPOKEN)).request.inputs["input_features"], FLOATS
    )
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().mean() < 0.05


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (wav(tone(0.001)), "unprocessable"),
        (wav(tone(11.0)), "too_long"),
        (wav(tone(0.1, 16_001), 16_001), "sample_rate"),
        (b"no audio", "unknown_format"),
    ],
)
def test_preparer_too_short_audio_is_unprocessable(
    data: bytes, reason: str, preparer: MediaPreparer, on_header: Path
) -> None:
    with pytest.raises(MediaError) as e:
        prepare(preparer, on_header, data)
    assert e.value.reason == reason


def test_preparer_modality_of_other_models_is_refused(preparer: MediaPreparer, on_header: Path) -> None:
    with pytest.raises(EncoderRefused, match="audio only") as e:
        preparer.prepare(str(on_header), "image", png(sample_image(1)), salt=None, deadline_s=5)
    assert e.value.reason == "modality"
    with pytest.raises(EncoderRefused) as e:
        preparer.prepare_for_sglang(str(on_header), png(sample_image(1)), salt=None, deadline_s=5)
    assert e.value.reason == "modality"


def test_preparer_video_inputs_equal_transformers_processor(qwen: Path) -> None:
    registry = ModelRegistry.open([str(qwen)], dtype="float32", device="cpu")
    preparer = MediaPreparer(registry, secret=SECRET, limits=MediumLimits())
    data = video(moving(31), "matroska", "libx264rgb", pix_fmt="rgb24", crf="0")

    def prepare(**options: Any) -> PreprocessedMedium:
        return preparer.prepare(str(qwen), "video", data, salt=None, deadline_s=5, **options)

    made, denser = prepare(), prepare(sampling=FrameSampling(fps=5))
    shown = np.stack([moving(31)[i] for i in (0, 5, 10, 15, 20, 25)])
    theirs = AutoVideoProcessor.from_pretrained(qwen)(
        videos=[torch.from_numpy(shown).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    pixels = from_wire("x", made.request.inputs["pixel_values_videos"], FLOATS)
    assert torch.equal(pixels, theirs["pixel_values_videos"])
    served = registry.served()[0]
    assert made.request.identity == served.identity_for("video") != served.identity
    assert denser.media_digest != made.media_digest
    assert denser.request.key != made.request.key
    by_images = preparer.prepare_frames(
        str(qwen),
        [png(Image.fromarray(f)) for f in shown],
        sampling=FrameSampling(fps=2.0),
        salt=None,
        deadline_s=5,
    )
    # The same frames at the same times: the same video.
    assert by_images.request == made.request


def test_preparer_image_with_frame_sampling_is_refused(qwen: Path) -> None:
    registry = ModelRegistry.open([str(qwen)], dtype="float32", device="cpu")
    preparer = MediaPreparer(registry, secret=SECRET, limits=MediumLimits())
    with pytest.raises(EncoderRefused, match="of a video") as e:
        preparer.prepare(
            str(qwen), "image", png(sample_image(1)), salt=None, deadline_s=5, sampling=FrameSampling(fps=1)
        )
    assert e.value.reason == "bad_input"
