"""Preprocesses one modality with a checkpoint's complete transformers processor, for generic families.

The modality's own processor would lack arguments that the complete processor adds, such as a patch size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from PIL import Image
from transformers.video_utils import VideoMetadata

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.formats.audio import Samples
from cornplug.encoder_service.formats.video import VideoFrames, VideoHeader
from cornplug.encoder_service.model_loader import CompiledTower
from cornplug.encoder_service.model_registry import LoadedModel
from cornplug.encoder_service.towers.decoderless import TRANSFORMERS_ERRORS, UNSUPPORTED_HINT
from cornplug.encoder_service.towers.generic import EncodeMethod, GenericTower
from cornplug.errors import CheckpointError, EncoderRefused, MediaError

Inputs = Mapping[str, torch.Tensor]

_TRIAL_SIZE: Final = (96, 64)
"""Width and height in pixels of the image with which a model is tested at load time."""
_TRIAL_S: Final = 1.3
_TRIAL_FRAMES: Final = 4
_ARGUMENTS: Final[Mapping[Modality, str]] = {"image": "images", "video": "videos", "audio": "audio"}
_PLACEHOLDERS: Final[Mapping[Modality, tuple[str, ...]]] = {
    "image": ("image_token", "boi_token"),
    "video": ("video_token",),
    "audio": ("audio_token",),
}
_WORD: Final = "a"
_NON_SAMPLING_ARGUMENTS: Final = frozenset(
    {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}
)
"""Arguments of transformers' `BaseVideoProcessor.preprocess` that are not passed on to `sample_frames`."""


class WholeProcessor:
    """Computes a tower's inputs from one media item, with a transformers processor. Thread-safe.

    Raises CheckpointError("bad_config") if the checkpoint has no processor that accepts a single item.
    """

    def __init__(self, loaded: LoadedModel, modality: Modality) -> None:
        path = loaded.checkpoint.path
        tower = loaded.tower.inner if isinstance(loaded.tower, CompiledTower) else loaded.tower
        assert isinstance(tower, GenericTower)
        method = tower.methods.get(modality)
        if method is None:
            raise CheckpointError(f"{path}: the model class has no tower for {modality}", reason="bad_config")
        self.input_names = method.input_names
        self._method: EncodeMethod = method
        self._modality: Modality = modality
        # Two threads must not use a fast tokenizer at the same time.
        self._lock = threading.Lock()
        try:
            self._processor: Any = transformers.AutoProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except TRANSFORMERS_ERRORS as e:
            raise CheckpointError(f"{path}: the processor does not load: {e}", reason="bad_config") from e
        self._text: str | None = None
        self._text = self._find_working_text(path)

    @property
    def size(self) -> Any:
        """Value of the image processor's setting `size`, or None if the processor has no such setting."""
        return getattr(getattr(self._processor, "image_processor", self._processor), "size", None)

    @property
    def rate(self) -> int:
        """Sampling rate in Hz that the feature extractor expects."""
        return int(self._processor.feature_extractor.sampling_rate)

    def __call__(self, images: Any, return_tensors: str = "pt", **asked: Any) -> Inputs:
        """Return the tower's inputs for one image. Raises ValueError if the processor rejects the image."""
        try:
            return self._run_processor(images, self._text, **asked)
        except TRANSFORMERS_ERRORS as e:
            raise ValueError(f"{type(e).__name__}: {e}") from e

    def extract(self, samples: Samples) -> Inputs:
        """Return the tower's inputs for mono samples at `rate`. Raises MediaError("unprocessable") if the
        processor rejects the samples.
        """
        return self._convert_errors(lambda: self._run_processor(samples, self._text, sampling_rate=self.rate))

    def extract_video(self, video: VideoFrames) -> Inputs:
        """Return the tower's inputs for the sampled frames of a video. Raises MediaError("unprocessable") if
        the processor rejects the frames.
        """
        frames = torch.from_numpy(video.frames).permute(0, 3, 1, 2)
        metadata = _metadata(video.header, video.indices)
        return self._convert_errors(
            lambda: self._run_processor(
                [frames], self._text, video_metadata=[metadata], do_sample_frames=False
            )
        )

    def sample_frames(self, header: VideoHeader, **asked: Any) -> Sequence[int]:
        """Return the numbers of the frames that transformers' video processor samples from a video.

        `asked` contains the sampling options that the request sets. Raises MediaError("unprocessable") if the
        processor cannot sample the video.
        """
        processor = self._processor.video_processor
        # Use the settings that the complete processor passes to its video processor in
        # `BaseVideoProcessor.preprocess`.
        settings = {name: getattr(processor, name, None) for name in processor.valid_kwargs.__annotations__}
        settings |= self._processor.valid_processor_kwargs._defaults.get("videos_kwargs", {})
        if not (settings["do_sample_frames"] or asked):
            return range(header.total)
        settings = {k: v for k, v in settings.items() if k not in _NON_SAMPLING_ARGUMENTS} | asked
        if asked:
            settings |= {name: None for name in ("fps", "num_frames") if name not in asked}
        found = self._convert_errors(lambda: processor.sample_frames(metadata=_metadata(header), **settings))
        return sorted({int(index) for index in found})

    def _convert_errors(self, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except TRANSFORMERS_ERRORS as e:
            raise MediaError(
                f"the model's processor rejected this {self._modality}: {type(e).__name__}: {e}",
                reason="unprocessable",
            ) from e

    def _find_working_text(self, path: Path) -> str | None:
        """Return the text to pass to this processor with an item. The text contains a placeholder. Return
        None if the processor needs no text.

        Raises CheckpointError if the processor does not work with any of the possible texts.
        """
        problems: list[str] = []
        for text in self._candidate_texts():
            self._text = text
            try:
                made = self.trial_inputs()
            except (MediaError, *TRANSFORMERS_ERRORS) as e:
                problems.append(str(e) if isinstance(e, MediaError) else f"{type(e).__name__}: {e}")
                continue
            if not self._method.required_inputs - made.keys():
                return text
            problems.append(
                f"the output has no {', '.join(sorted(self._method.required_inputs - made.keys()))}"
            )
        kind = type(self._processor).__name__
        raise CheckpointError(
            f"{path}: {kind} does not accept a single {self._modality}: {'; '.join(problems)}",
            reason="bad_config",
        )

    def _candidate_texts(self) -> Iterator[str | None]:
        prompt = self._method.needs_prompt
        if not prompt:
            yield None
        for name in _PLACEHOLDERS[self._modality]:
            mark = getattr(self._processor, name, None)
            if isinstance(mark, str):
                # Add a word, because the item's rows cannot be recognised in a prompt without other tokens.
                yield f"{mark}{_WORD}" if prompt else mark

    def trial_inputs(self) -> Inputs:
        """Return the tower's inputs for a test item."""
        if self._modality == "audio":
            return self.extract(np.sin(np.arange(round(_TRIAL_S * self.rate)) / 9, dtype=np.float32))
        image = Image.new("RGB", _TRIAL_SIZE, "gray")
        if self._modality == "image":
            return self._run_processor(image, self._text)
        frames = np.stack([np.asarray(image)] * _TRIAL_FRAMES)
        source = VideoHeader(total=_TRIAL_FRAMES, fps=2.0, width=_TRIAL_SIZE[0], height=_TRIAL_SIZE[1])
        return self.extract_video(
            VideoFrames(frames=frames, indices=tuple(range(_TRIAL_FRAMES)), header=source)
        )

    def _run_processor(self, media: Any, text: str | None, **asked: Any) -> Inputs:
        prompt = {} if text is None else {"text": text}
        with self._lock if prompt else nullcontext():
            made = self._processor(
                **{_ARGUMENTS[self._modality]: media}, return_tensors="pt", **prompt, **asked
            )
        found = {name: made[name] for name in self.input_names if made.get(name) is not None}
        return {name: _tensor(value) for name, value in found.items()}


def check_encodes(loaded: LoadedModel, processor: WholeProcessor) -> None:
    """Encode a test item, to check a model that cornplug's tests may not cover.

    Raises CheckpointError("unknown_family") if the encoding fails, or if the model's decoder could not use
    the embedding.
    """
    if loaded.device.type == "meta":
        return  # Only the replicas have the weights.
    name, wanted = loaded.served.name, loaded.projector.hidden_size
    try:
        made = processor.trial_inputs()
        item = loaded.tower.prepare(made)
        rows = loaded.tower.encode([item])[0]
    except (CheckpointError, EncoderRefused, *TRANSFORMERS_ERRORS) as e:
        raise CheckpointError(
            f"{name}: the {loaded.served.family} of transformers {transformers.__version__} does not encode "
            f"one medium by itself: {type(e).__name__}: {e}. {UNSUPPORTED_HINT}",
            reason="unknown_family",
        ) from e
    if rows.shape[1] != wanted or not bool(torch.isfinite(rows).all()):
        raise CheckpointError(
            f"{name}: rows of shape {tuple(rows.shape)} are not finite, or do not have the decoder's width "
            f"{wanted}. {UNSUPPORTED_HINT}",
            reason="unknown_family",
        )


def _metadata(source: VideoHeader, indices: Sequence[int] | None = None) -> VideoMetadata:
    taken = None if indices is None else list(indices)
    header = {k: v for k, v in asdict(source).items() if k != "total"}
    return VideoMetadata(
        total_num_frames=source.total, duration=source.duration_s, frames_indices=taken, **header
    )


def _tensor(value: Any) -> torch.Tensor:
    """Return the value as a tensor. Raises ValueError if it cannot be converted, for example a list of images
    of different sizes.
    """
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)
