"""Preprocesses images, videos and audio, by the decoding rules of the model's engine and with the
checkpoint's processor.

Images are decoded by an engine's rule (`media.image`). For a video, the same frames are sampled as in the
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
from cornplug.encoder_service.media.audio_resample import resampled
from cornplug.encoder_service.media.video import VideoFrames, VideoHeader
from cornplug.encoder_service.model_registry import LoadedModel
from cornplug.encoder_service.preprocess.decoders import MediumHeader
from cornplug.encoder_service.preprocess.preprocessor import (
    DecodedMedium,
    FrameSampling,
    Inputs,
    MediumForm,
    MediumLimits,
    PreprocessContext,
    grid_of,
)
from cornplug.encoder_service.preprocess.whole_processor import WholeProcessor, check_encodes
from cornplug.encoder_service.towers.log_mel import LogMelFeatures
from cornplug.encoder_service.wire.messages import Decoding
from cornplug.errors import CheckpointError, MediaError

_SIDES: Final = (64, 1024)
"""Sides in pixels of two square test images. They show how large a processor's outputs are for small and
large images."""
_MOST_A_PIXEL: Final = 24
"""Maximum bytes of inputs per pixel. Families without resizing need this many bytes: three float32 values,
stored twice, as two frames."""
_SHAPES: Final = 4096
"""Maximum number of shapes whose grid is cached."""
_PIXELS_NOT_SIDES: Final = 100_000
"""Threshold above which a "longest_edge" is a number of pixels, as in the Qwen families, instead of a
side."""


class ImagePreprocessor:
    """Image preprocessor of one model.

    Raises CheckpointError("bad_config") if the checkpoint has no image processor that loads.
    """

    def __init__(self, loaded: LoadedModel, limits: MediumLimits) -> None:
        self._max_pixels = limits.max_pixels
        self._probes: tuple[int, int] | None = None
        self._asked = loaded.checkpoint.family.processor_defaults.get("image", {})
        self._wanted = loaded.checkpoint.family.inputs["image"]
        self._grid = lru_cache(_SHAPES)(self._grid_of)
        self._processor: Any = _processor(loaded)
        if isinstance(self._processor, WholeProcessor):
            self._wanted = self._processor.names
            check_encodes(loaded, self._processor)

    def decode(
        self,
        parts: Sequence[bytes],
        form: MediumForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedium:
        on_header = context.on_header(self._prepared_bytes)
        pixels = context.decoder.image(parts[0], self._max_pixels, on_header, decoding=decoding)
        return DecodedMedium(
            digest=pixels.digest(),
            shape=(pixels.height, pixels.width),
            preprocess=lambda: self._preprocess(pixels.image()),
        )

    def decode_spec(self, form: MediumForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        rule = {"modality": "image", "form": form, "mode": "RGB", "rule": decoding}
        return {**rule, "max_pixels": self._max_pixels}

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        return self._grid(shape)

    def _prepared_bytes(self, header: MediumHeader) -> int:
        small, large = self._probed()
        most = _most_pixels(self._processor)
        pixels = header.pixels if most is None else min(header.pixels, most)
        return small if small == large else max(small, large * max(pixels, _SIDES[1] ** 2) // _SIDES[1] ** 2)

    def _probed(self) -> tuple[int, int]:
        if self._probes is None:
            small, large = (self._bytes_of(Image.new("RGB", (side, side))) for side in _SIDES)
            self._probes = small, large
        return self._probes

    def _bytes_of(self, image: Image.Image) -> int:
        try:
            return sum(t.nbytes for t in self._preprocess(image).values())
        except MediaError:
            return _MOST_A_PIXEL * image.width * image.height

    def _grid_of(self, shape: tuple[int, ...]) -> Inputs | None:
        if "image_grid_thw" not in self._wanted:
            return {}
        nothing = torch.empty((3, *shape), dtype=torch.uint8, device="meta")
        return grid_of(self._processor, images=nothing, **self._asked)

    def _preprocess(self, image: Image.Image) -> Inputs:
        try:
            made = self._processor(images=image, return_tensors="pt", **self._asked)
        except ValueError as e:
            # Processors reject some shapes, for example an aspect ratio above 200 to 1.
            raise MediaError(f"the model's processor rejected this image: {e}", reason="unprocessable") from e
        return dict(made)


def _processor(loaded: LoadedModel) -> Any:
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


def _most_pixels(processor: Any) -> int | None:
    """Return the maximum number of pixels of an image after resizing, or None if the processor's settings do
    not limit the number.
    """
    size: Any = getattr(processor, "size", None) or {}
    longest = size.get("longest_edge")
    return longest if isinstance(longest, int) and longest > _PIXELS_NOT_SIDES else None


Sampler = Callable[[VideoHeader, FrameSampling], Sequence[int]]

_FPS: Final = 2.0
_MAX_FPS: Final = 30.0
_MIN_FRAMES: Final = 4
_MAX_FRAMES: Final = 768
_BYTES_A_PIXEL: Final = 12
"""Maximum bytes of inputs per pixel of a frame: three float32 values, without resizing."""
_VIDEO_SHAPES: Final = 1024
"""Maximum number of shapes whose grid is cached."""
_PATCH: Final = 2
"""Number of consecutive frames that form one temporal patch in the Qwen families."""


class VideoPreprocessor:
    """Video preprocessor of one model.

    Raises CheckpointError("bad_config") if the checkpoint has no supported video processor.
    """

    _processor: Any

    def __init__(self, loaded: LoadedModel, limits: MediumLimits) -> None:
        checkpoint = loaded.checkpoint
        self._grid = lru_cache(_VIDEO_SHAPES)(self._grid_of)
        self._limits = limits.video_limits()
        if checkpoint.family.generic:
            whole = WholeProcessor(loaded, "video")
            check_encodes(loaded, whole)
            self._sampler, self._processor = _by_transformers(whole), whole
            # The processor's settings determine the frames. Therefore the model must not share `FileMemo`
            # entries with other models.
            self._kind = (loaded.served.identity_for("video") or b"").hex()
            return
        kind = checkpoint.family.preprocess_spec_of("video")(checkpoint.preprocessors["video"])["kind"]
        if kind not in SAMPLERS:
            raise CheckpointError(f"{checkpoint.path}: {kind} is not supported", reason="bad_config")
        self._kind = kind
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
        parts: Sequence[bytes],
        form: MediumForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedium:
        """Decode the video (see `MediaPreprocessor.decode`). If it was sent as images, `sampling.fps` is the
        frame rate (default 1).
        """
        on_header = context.on_header(_video_bytes)
        if form == "images":
            video = context.decoder.frames(
                parts, sampling.fps or 1.0, self._limits, on_header, decoding=decoding
            )
        else:
            video = context.decoder.video(
                parts[0], lambda s: self._sampler(s, sampling), self._limits, on_header
            )
        return DecodedMedium(
            digest=video.digest(), shape=video.frames.shape[:3], preprocess=lambda: self._preprocess(video)
        )

    def decode_spec(self, form: MediumForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        rule = {"modality": "video", "form": form, "mode": "RGB", "rule": decoding, "sampler": self._kind}
        return {**rule, "sampling": asdict(sampling), "limits": asdict(self._limits)}

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        return self._grid(shape)

    def _grid_of(self, shape: tuple[int, ...]) -> Inputs | None:
        if isinstance(self._processor, WholeProcessor):
            return {}  # Only SGLang's route uses the grid, and it has no generic families.
        frames, height, width = shape
        nothing = torch.empty((frames, 3, height, width), dtype=torch.uint8, device="meta")
        return grid_of(self._processor, videos=[nothing], do_sample_frames=False)

    def _preprocess(self, video: VideoFrames) -> Inputs:
        if isinstance(self._processor, WholeProcessor):
            return self._processor.of_video(video)
        frames = torch.from_numpy(video.frames).permute(0, 3, 1, 2)
        try:
            made = self._processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
        except ValueError as e:
            raise MediaError(f"the model's processor rejected this video: {e}", reason="unprocessable") from e
        return dict(made)


def _by_transformers(processor: WholeProcessor) -> Sampler:
    def sampled(source: VideoHeader, sampling: FrameSampling) -> Sequence[int]:
        return processor.sample(source, **{k: v for k, v in asdict(sampling).items() if v is not None})

    return sampled


def _video_bytes(header: MediumHeader) -> int:
    return _BYTES_A_PIXEL * header.pixels


def _qwen2(source: VideoHeader, sampling: FrameSampling) -> Sequence[int]:
    """Sample whole temporal patches at even steps, like vLLM's Qwen2VLVideoBackend. `num_frames` is rounded
    in the same way as in transformers.
    """
    total = source.total
    most = min(_MAX_FRAMES, total) // _PATCH * _PATCH
    if sampling.num_frames is not None:
        wanted = float(round(sampling.num_frames / _PATCH) * _PATCH)
    else:
        wanted = total / source.fps * min(sampling.fps or _FPS, _MAX_FPS)
    count = math.floor(min(max(wanted, _MIN_FRAMES), most) / _PATCH) * _PATCH
    if count < _PATCH:  # The video has only one frame.
        return range(total)
    # Use float32 steps from torch, because other libraries round to other frames.
    found = torch.arange(0, total, total / count).int().clamp(max=total - 1)
    return [int(index) for index in found]


def _qwen3(source: VideoHeader, sampling: FrameSampling) -> Sequence[int]:
    """Sample from the first frame to the last at even steps, like vLLM's Qwen3VLVideoBackend."""
    total = source.total
    if sampling.num_frames is not None:
        count = sampling.num_frames
    else:
        count = max(int(total / source.fps * min(sampling.fps or _FPS, _MAX_FPS)), _MIN_FRAMES)
    count = min(count, _MAX_FRAMES, total)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


SAMPLERS: Final[Mapping[str, Sampler]] = {
    "Qwen2VLVideoProcessor": _qwen2,
    "Qwen2_5_VLVideoProcessor": _qwen2,
    "Qwen3VLVideoProcessor": _qwen3,
}
"""Samplers by the class name of a checkpoint's video processor, as in vLLM."""


_MELS_BYTES_A_SECOND: Final = 128 * 100 * 4
_PADDED_S: Final = 30.0
"""Length in seconds of Whisper's window. Audio is padded to whole windows."""


class AudioPreprocessor:
    """Audio preprocessor of one model.

    The digest covers the samples that the feature extractor receives, as in the engine: one channel, at the
    extractor's rate. Raises CheckpointError("bad_config") if the checkpoint has no feature extractor.
    """

    def __init__(self, loaded: LoadedModel, limits: MediumLimits) -> None:
        self._max_s = limits.max_media_s
        self._features: LogMelFeatures
        if loaded.checkpoint.family.generic:
            processor = WholeProcessor(loaded, "audio")
            check_encodes(loaded, processor)
            self._features = processor
        else:
            self._features = towers.feature_extractor(loaded.checkpoint)

    def decode(
        self,
        parts: Sequence[bytes],
        form: MediumForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedium:
        on_header = context.on_header(_audio_bytes)
        audio = resampled(context.decoder.audio(parts[0], self._max_s, on_header), self._features.rate)
        return DecodedMedium(
            digest=audio.digest(),
            shape=audio.samples.shape,
            preprocess=lambda: self._features.extract(audio.samples),
        )

    def decode_spec(self, form: MediumForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        return {"modality": "audio", "max_s": self._max_s, "rate": self._features.rate}

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        return {}


def _audio_bytes(header: MediumHeader) -> int:
    return round(_MELS_BYTES_A_SECOND * (header.seconds + _PADDED_S))
