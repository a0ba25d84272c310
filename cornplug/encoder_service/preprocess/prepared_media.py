"""Preprocesses images, videos and audio, by the decoding rules of the model's engine and with the
checkpoint's processor.

Images are decoded by an engine's rule (`formats.image`). For a video, the same frames are sampled as in the
engine. Audio is resampled to the model's rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoVideoProcessor

from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.audio_resample import resample
from cornplug.encoder_service.formats.messages import Decoding
from cornplug.encoder_service.formats.video import VideoFrames, VideoHeader
from cornplug.encoder_service.model_registry import LoadedModel
from cornplug.encoder_service.preprocess.decoders import MediaHeader
from cornplug.encoder_service.preprocess.preprocessor import (
    DecodedMedia,
    FrameSampling,
    Inputs,
    MediaForm,
    MediaLimits,
    PreprocessContext,
    grid_of,
)
from cornplug.encoder_service.preprocess.whole_processor import WholeProcessor, check_encodes
from cornplug.encoder_service.towers.log_mel import LogMelFeatures
from cornplug.errors import CheckpointError, MediaError

_PROBE_SIDES: Final = (64, 1024)
"""Sides in pixels of two square test images. They show how large a processor's outputs are for small and
large images."""
_MAX_BYTES_PER_PIXEL: Final = 24
"""Maximum bytes of inputs per pixel. Families without resizing need this many bytes: three float32 values,
stored twice, as two frames."""
_MAX_CACHED_SHAPES: Final = 4096
"""Maximum number of shapes whose grid is cached."""
_MIN_PIXEL_COUNT: Final = 100_000
"""Threshold above which a "longest_edge" is a number of pixels, as in the Qwen families, instead of a
side."""
Sampler = Callable[[VideoHeader, FrameSampling], Sequence[int]]
_FPS: Final = 2.0
_MAX_FPS: Final = 30.0
_MIN_FRAMES: Final = 4
_MAX_FRAMES: Final = 768
_VIDEO_BYTES_PER_PIXEL: Final = 12
"""Maximum bytes of inputs per pixel of a frame: three float32 values, without resizing."""
_MAX_CACHED_VIDEO_SHAPES: Final = 1024
"""Maximum number of shapes whose grid is cached."""
_FRAMES_PER_PATCH: Final = 2
"""Number of consecutive frames that form one temporal patch in the Qwen families."""
_MEL_BYTES_PER_SECOND: Final = 128 * 100 * 4
_WINDOW_S: Final = 30.0
"""Length in seconds of Whisper's window. Audio is padded to whole windows."""


class ImagePreprocessor:
    """Image preprocessor of one model.

    Raises CheckpointError("bad_config") if the checkpoint has no image processor that loads.
    """

    def __init__(self, loaded: LoadedModel, limits: MediaLimits) -> None:
        self._max_pixels = limits.max_pixels
        self._probe_bytes: tuple[int, int] | None = None
        self._processor_kwargs = loaded.checkpoint.family.processor_defaults.get("image", {})
        self._input_names = loaded.checkpoint.family.inputs["image"]
        self._grid = lru_cache(_MAX_CACHED_SHAPES)(self._compute_grid)
        self._processor: Any = _load_image_processor(loaded)
        if isinstance(self._processor, WholeProcessor):
            self._input_names = self._processor.input_names
            check_encodes(loaded, self._processor)

    def decode(
        self,
        contents: Sequence[bytes],
        form: MediaForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedia:
        on_header = context.header_callback(self._prepared_bytes)
        pixels = context.decoder.decode_image(contents[0], self._max_pixels, on_header, decoding=decoding)
        return DecodedMedia(
            digest=pixels.digest(),
            shape=(pixels.height, pixels.width),
            preprocess=lambda: self._preprocess(pixels.to_image()),
        )

    def decode_spec(self, form: MediaForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        rule = {"modality": "image", "form": form, "mode": "RGB", "rule": decoding}
        return {**rule, "max_pixels": self._max_pixels}

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        return self._grid(shape)

    def _prepared_bytes(self, header: MediaHeader) -> int:
        small, large = self._measure_probes()
        most = _max_resized_pixels(self._processor)
        pixels = header.pixels if most is None else min(header.pixels, most)
        return (
            small
            if small == large
            else max(small, large * max(pixels, _PROBE_SIDES[1] ** 2) // _PROBE_SIDES[1] ** 2)
        )

    def _measure_probes(self) -> tuple[int, int]:
        if self._probe_bytes is None:
            small, large = (self._input_bytes(Image.new("RGB", (side, side))) for side in _PROBE_SIDES)
            self._probe_bytes = small, large
        return self._probe_bytes

    def _input_bytes(self, image: Image.Image) -> int:
        try:
            return sum(t.nbytes for t in self._preprocess(image).values())
        except MediaError:
            return _MAX_BYTES_PER_PIXEL * image.width * image.height

    def _compute_grid(self, shape: tuple[int, ...]) -> Inputs | None:
        if "image_grid_thw" not in self._input_names:
            return {}
        nothing = torch.empty((3, *shape), dtype=torch.uint8, device="meta")
        return grid_of(self._processor, images=nothing, **self._processor_kwargs)

    def _preprocess(self, image: Image.Image) -> Inputs:
        try:
            made = self._processor(images=image, return_tensors="pt", **self._processor_kwargs)
        except ValueError as e:
            # Processors reject some shapes, for example an aspect ratio above 200 to 1.
            raise MediaError(f"the model's processor rejected this image: {e}", reason="unprocessable") from e
        return dict(made)


def _load_image_processor(loaded: LoadedModel) -> Any:
    checkpoint = loaded.checkpoint
    if checkpoint.family.generic:
        return WholeProcessor(loaded, "image")
    try:
        return AutoImageProcessor.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as e:
        raise CheckpointError(
            f"{checkpoint.path}: the image processor does not load: {e}", reason="bad_config"
        ) from e


def _max_resized_pixels(processor: Any) -> int | None:
    """Return the maximum number of pixels of an image after resizing, or None if the processor's settings do
    not limit the number.
    """
    size: Any = getattr(processor, "size", None) or {}
    longest = size.get("longest_edge")
    return longest if isinstance(longest, int) and longest > _MIN_PIXEL_COUNT else None


class VideoPreprocessor:
    """Video preprocessor of one model.

    Raises CheckpointError("bad_config") if the checkpoint has no supported video processor.
    """

    _processor: Any

    def __init__(self, loaded: LoadedModel, limits: MediaLimits) -> None:
        checkpoint = loaded.checkpoint
        self._grid = lru_cache(_MAX_CACHED_VIDEO_SHAPES)(self._compute_grid)
        self._limits = limits.video_limits()
        if checkpoint.family.generic:
            whole = WholeProcessor(loaded, "video")
            check_encodes(loaded, whole)
            self._sampler, self._processor = _transformers_sampler(whole), whole
            # The processor's settings determine the frames. Therefore the model must not share
            # `DecodedFileCache` entries with other models.
            self._sampler_name = (loaded.served.identity_for("video") or b"").hex()
            return
        kind = checkpoint.family.preprocess_spec_of("video")(checkpoint.preprocessors["video"])["kind"]
        if kind not in SAMPLERS:
            raise CheckpointError(f"{checkpoint.path}: {kind} is not supported", reason="bad_config")
        self._sampler_name = kind
        self._sampler = SAMPLERS[kind]
        try:
            self._processor = AutoVideoProcessor.from_pretrained(
                checkpoint.path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as e:
            raise CheckpointError(
                f"{checkpoint.path}: the video processor does not load: {e}", reason="bad_config"
            ) from e

    def decode(
        self,
        contents: Sequence[bytes],
        form: MediaForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedia:
        """Decode the video (see `MediaPreprocessor.decode`). If it was sent as images, `sampling.fps` is the
        frame rate (default 1).
        """
        on_header = context.header_callback(_video_input_bytes)
        if form == "images":
            video = context.decoder.decode_frames(
                contents, sampling.fps or 1.0, self._limits, on_header, decoding=decoding
            )
        else:
            video = context.decoder.decode_video(
                contents[0], lambda s: self._sampler(s, sampling), self._limits, on_header
            )
        return DecodedMedia(
            digest=video.digest(), shape=video.frames.shape[:3], preprocess=lambda: self._preprocess(video)
        )

    def decode_spec(self, form: MediaForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        rule = {
            "modality": "video",
            "form": form,
            "mode": "RGB",
            "rule": decoding,
            "sampler": self._sampler_name,
        }
        return {**rule, "sampling": asdict(sampling), "limits": asdict(self._limits)}

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        return self._grid(shape)

    def _compute_grid(self, shape: tuple[int, ...]) -> Inputs | None:
        if isinstance(self._processor, WholeProcessor):
            return {}  # Only SGLang's route uses the grid, and it has no generic families.
        frames, height, width = shape
        nothing = torch.empty((frames, 3, height, width), dtype=torch.uint8, device="meta")
        return grid_of(self._processor, videos=[nothing], do_sample_frames=False)

    def _preprocess(self, video: VideoFrames) -> Inputs:
        if isinstance(self._processor, WholeProcessor):
            return self._processor.extract_video(video)
        frames = torch.from_numpy(video.frames).permute(0, 3, 1, 2)
        try:
            made = self._processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        except ValueError as e:
            raise MediaError(f"the model's processor rejected this video: {e}", reason="unprocessable") from e
        return dict(made)


def _transformers_sampler(processor: WholeProcessor) -> Sampler:
    def sampled(source: VideoHeader, sampling: FrameSampling) -> Sequence[int]:
        return processor.sample_frames(source, **{k: v for k, v in asdict(sampling).items() if v is not None})

    return sampled


def _video_input_bytes(header: MediaHeader) -> int:
    return _VIDEO_BYTES_PER_PIXEL * header.pixels


def _sample_qwen2(header: VideoHeader, sampling: FrameSampling) -> Sequence[int]:
    """Sample whole temporal patches at even steps, like vLLM's Qwen2VLVideoBackend. `num_frames` is rounded
    in the same way as in transformers.
    """
    total = header.total
    most = min(_MAX_FRAMES, total) // _FRAMES_PER_PATCH * _FRAMES_PER_PATCH
    if sampling.num_frames is not None:
        wanted = float(round(sampling.num_frames / _FRAMES_PER_PATCH) * _FRAMES_PER_PATCH)
    else:
        wanted = total / header.fps * min(sampling.fps or _FPS, _MAX_FPS)
    count = math.floor(min(max(wanted, _MIN_FRAMES), most) / _FRAMES_PER_PATCH) * _FRAMES_PER_PATCH
    if count < _FRAMES_PER_PATCH:  # The video has only one frame.
        return range(total)
    # Use float32 steps from torch, because other libraries round to other frames.
    found = torch.arange(0, total, total / count).int().clamp(max=total - 1)
    return [int(index) for index in found]


def _sample_qwen3(header: VideoHeader, sampling: FrameSampling) -> Sequence[int]:
    """Sample from the first frame to the last at even steps, like vLLM's Qwen3VLVideoBackend."""
    total = header.total
    if sampling.num_frames is not None:
        count = sampling.num_frames
    else:
        count = max(int(total / header.fps * min(sampling.fps or _FPS, _MAX_FPS)), _MIN_FRAMES)
    count = min(count, _MAX_FRAMES, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


SAMPLERS: Final[Mapping[str, Sampler]] = {
    "Qwen2VLVideoProcessor": _sample_qwen2,
    "Qwen2_5_VLVideoProcessor": _sample_qwen2,
    "Qwen3VLVideoProcessor": _sample_qwen3,
}
"""Samplers by the class name of a checkpoint's video processor, as in vLLM."""


class AudioPreprocessor:
    """Audio preprocessor of one model.

    The digest covers the samples that the feature extractor receives, as in the engine: one channel, at the
    extractor's rate. Raises CheckpointError("bad_config") if the checkpoint has no feature extractor.
    """

    def __init__(self, loaded: LoadedModel, limits: MediaLimits) -> None:
        self._max_s = limits.max_media_s
        self._feature_extractor: LogMelFeatures
        if loaded.checkpoint.family.generic:
            processor = WholeProcessor(loaded, "audio")
            check_encodes(loaded, processor)
            self._feature_extractor = processor
        else:
            self._feature_extractor = towers.feature_extractor(loaded.checkpoint)

    def decode(
        self,
        contents: Sequence[bytes],
        form: MediaForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedia:
        on_header = context.header_callback(_audio_input_bytes)
        audio = resample(
            context.decoder.decode_audio(contents[0], self._max_s, on_header), self._feature_extractor.rate
        )
        return DecodedMedia(
            digest=audio.digest(),
            shape=audio.samples.shape,
            preprocess=lambda: self._feature_extractor.extract(audio.samples),
        )

    def decode_spec(self, form: MediaForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        return {"modality": "audio", "max_s": self._max_s, "rate": self._feature_extractor.rate}

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        return {}


def _audio_input_bytes(header: MediaHeader) -> int:
    return round(_MEL_BYTES_PER_SECOND * (header.seconds + _WINDOW_S))
