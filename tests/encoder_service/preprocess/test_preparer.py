"""From media to requests: the tower's inputs, and the keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from expected_errors import expect_error
from PIL import Image
from transformers import AutoTokenizer, AutoVideoProcessor, Qwen2AudioProcessor, WhisperFeatureExtractor

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.formats import audio
from cornplug.encoder_service.formats.messages import EncodeReply, EncodeRequest
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess import preparer as preparer_module
from cornplug.encoder_service.preprocess.preparer import (
    DecodedFileCache,
    MediaPreparer,
    MediaSource,
    PreprocessedMediaItem,
)
from cornplug.encoder_service.preprocess.preprocessor import FrameSampling, MediaLimits, PreprocessContext
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
    return MediaPreparer(registry, secret=SECRET, limits=MediaLimits(max_media_s=10))


def source(path: Path, modality: Modality, *parts: bytes, **fields: Any) -> MediaSource:
    common = {"salt": None, "deadline_s": 5.0, **fields}
    return MediaSource(model=str(path), modality=modality, contents=parts, **common)


def prepare(preparer: MediaPreparer, path: Path, data: bytes) -> PreprocessedMediaItem:
    return preparer.prepare(source(path, "audio", data))


def test_preparer_audio_inputs_equal_transformers_processor(preparer: MediaPreparer, on_header: Path) -> None:
    made = prepare(preparer, on_header, wav(SPOKEN)).inputs
    processor = Qwen2AudioProcessor(
        WhisperFeatureExtractor.from_pretrained(on_header), AutoTokenizer.from_pretrained(on_header)
    )
    theirs = processor(text="<|AUDIO|>", audio=[SPOKEN[:, 0] / np.float32(32768)], sampling_rate=16_000)
    assert torch.equal(made["input_features"], torch.as_tensor(theirs["input_features"]))
    mask = made["feature_attention_mask"]
    assert torch.equal(mask.long(), torch.as_tensor(theirs["feature_attention_mask"]).long())


def test_preparer_key_depends_on_samples_model_and_salt(preparer: MediaPreparer, on_header: Path) -> None:
    by_wav, by_flac = (
        prepare(preparer, on_header, d) for d in (wav(SPOKEN), encoded(SPOKEN, "flac", "flac"))
    )
    assert by_wav.request == by_flac.request
    assert by_wav.request.inputs == {}
    served = preparer._registry.served_models()[0]
    digest = audio.decode(wav(SPOKEN), max_s=9).digest()
    assert by_wav.media_digest == digest
    assert by_wav.request.key == embedding_key(SECRET, served.identity, digest, None)
    salted = preparer.prepare(source(on_header, "audio", wav(SPOKEN), salt="t"))
    assert salted.request.key != by_wav.request.key


def test_preparer_audio_is_resampled_to_model_rate(preparer: MediaPreparer, on_header: Path) -> None:
    ours = prepare(preparer, on_header, wav(tone(1.3, 48_000), 48_000)).inputs["input_features"]
    theirs = prepare(preparer, on_header, wav(SPOKEN)).inputs["input_features"]
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
    with expect_error(EncoderRefused, reason="modality") as e:
        preparer.prepare(source(on_header, "image", png(sample_image(1))))
    with pytest.raises(EncoderRefused) as e:
        preparer.prepare(source(on_header, "image", png(sample_image(1)), decoding="sglang-0.5.23"))
    assert e.value.reason == "modality"


def test_preparer_video_inputs_equal_transformers_processor(qwen: Path) -> None:
    registry = ModelRegistry.open([str(qwen)], dtype="float32", device="cpu")
    preparer = MediaPreparer(registry, secret=SECRET, limits=MediaLimits())
    data = video(moving(31), "matroska", "libx264rgb", pix_fmt="rgb24", crf="0")

    def prepare(**options: Any) -> PreprocessedMediaItem:
        return preparer.prepare(source(qwen, "video", data, **options))

    made, denser = prepare(), prepare(sampling=FrameSampling(fps=5))
    shown = np.stack([moving(31)[i] for i in (0, 5, 10, 15, 20, 25)])
    theirs = AutoVideoProcessor.from_pretrained(qwen)(
        videos=[torch.from_numpy(shown).permute(0, 3, 1, 2)], do_sample_frames=False, return_tensors="pt"
    )
    assert torch.equal(made.inputs["pixel_values_videos"], theirs["pixel_values_videos"])
    served = registry.served_models()[0]
    assert made.request.identity == served.identity_for("video") != served.identity
    assert denser.media_digest != made.media_digest
    assert denser.request.key != made.request.key
    images = [png(Image.fromarray(f)) for f in shown]
    by_images = preparer.prepare(
        source(qwen, "video", *images, form="images", sampling=FrameSampling(fps=2.0))
    )
    # The same frames at the same times: the same video.
    assert by_images.request == made.request


def test_preparer_image_with_frame_sampling_is_refused(qwen: Path) -> None:
    registry = ModelRegistry.open([str(qwen)], dtype="float32", device="cpu")
    preparer = MediaPreparer(registry, secret=SECRET, limits=MediaLimits())
    with expect_error(EncoderRefused, reason="bad_input", match="fps"):
        preparer.prepare(source(qwen, "image", png(sample_image(1)), sampling=FrameSampling(fps=1)))


def answered(request: EncodeRequest) -> EncodeReply:
    return EncodeReply(id=0, key=request.key, origin="cached", stored=True, tensor=None, service_time_s=0.0)


class Broken:
    """A decoder that fails the test: nothing may be decoded."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"decoded by {name}")


@pytest.mark.parametrize(
    "limits",
    [MediaLimits(max_pixels=100), MediaLimits(max_pixels=10_000)],
)
def test_preparer_remembered_file_under_other_limits_is_decoded_anew(
    qwen_registry: ModelRegistry, qwen: Path, limits: MediaLimits
) -> None:
    with mock.patch.object(preparer_module, "DecodedFileCache", return_value=DecodedFileCache(8)):
        wide, other = (
            MediaPreparer(qwen_registry, secret=SECRET, limits=each) for each in (MediaLimits(), limits)
        )
    medium = source(qwen, "image", png(sample_image(1)))
    made = wide.prepare(medium)
    known = wide.open(medium).look_up_cached(answered)
    assert known is not None
    assert known.cached_reply is not None
    assert known.request.key == made.request.key
    assert other.open(medium).look_up_cached(answered) is None


def test_preparer_remembered_file_for_another_engine_is_decoded_anew(
    qwen_registry: ModelRegistry, qwen: Path
) -> None:
    """EXIF orientation and transparency: vLLM applies both, SGLang neither."""
    preparer = MediaPreparer(qwen_registry, secret=SECRET, limits=MediaLimits())
    image = sample_image(2, 80, 40).convert("RGBA")
    image.putalpha(100)
    data = png(image)
    keys = []
    for rule in ("vllm-0.33", "sglang-0.5.23"):
        medium = source(qwen, "image", data, decoding=rule)
        assert preparer.open(medium).look_up_cached(answered) is None
        keys.append(preparer.prepare(medium).request.key)
        known = preparer.open(medium).look_up_cached(answered)
        assert known is not None
        assert known.request.key == keys[-1]
    assert keys[0] != keys[1]


def test_preparer_remembered_file_of_a_medium_not_cached_is_not_answered(
    qwen_registry: ModelRegistry, qwen: Path
) -> None:
    preparer = MediaPreparer(qwen_registry, secret=SECRET, limits=MediaLimits())
    medium = source(qwen, "image", png(sample_image(3)))
    preparer.prepare(medium)
    assert preparer.open(medium).look_up_cached(lambda request: None) is None


def test_preparer_refused_file_is_not_remembered(qwen_registry: ModelRegistry, qwen: Path) -> None:
    preparer = MediaPreparer(qwen_registry, secret=SECRET, limits=MediaLimits(max_pixels=100))
    medium = source(qwen, "image", png(sample_image(1)))
    with pytest.raises(MediaError):
        preparer.prepare(medium)
    assert preparer.open(medium).look_up_cached(answered) is None


def test_preparer_audio_repeated_file_is_recalled(preparer: MediaPreparer, on_header: Path) -> None:
    medium = source(on_header, "audio", wav(tone(1.1)))
    made = preparer.prepare(medium)
    context = PreprocessContext(decoder=Broken())
    known = preparer.open(medium).look_up_cached(answered)
    assert known is not None
    assert (known.request.key, dict(known.inputs)) == (made.request.key, {})
    with pytest.raises(AssertionError, match="decoded by decode_audio"):
        preparer.open(medium).prepare(context)
