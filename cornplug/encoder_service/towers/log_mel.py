"""Feature extraction for Whisper towers. It calls transformers' feature extractor in the same way as the
engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional
from transformers import WhisperFeatureExtractor

from cornplug.errors import CheckpointError, MediaError

Samples = npt.NDArray[np.float32]
_MIN_FRAMES: Final = 3
"""Minimum number of frames. With fewer frames, no row is left after a convolution of stride two and a
pooling."""


class LogMelFeatures(Protocol):
    """Feature extractor for audio. Thread-safe."""

    @property
    def rate(self) -> int:
        """Sampling rate in Hz that `extract` expects."""

    def extract(self, samples: Samples) -> Mapping[str, torch.Tensor]:
        """Return the tower's inputs for mono samples. Raises MediaError("unprocessable") if the audio is too
        short or is rejected."""


class PaddedLogMel:
    """Feature extractor of Qwen2-Audio. It pads audio with silence or truncates it, to 30 s. vLLM passes the
    same argument (truncation=True)."""

    def __init__(self, preprocessor: Mapping[str, Any]) -> None:
        self._extractor = whisper_extractor(preprocessor)

    @property
    def rate(self) -> int:
        return int(self._extractor.sampling_rate)

    def extract(self, samples: Samples) -> Mapping[str, torch.Tensor]:
        made = self._extractor(
            samples,
            sampling_rate=self.rate,
            padding="max_length",
            truncation=True,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = made["attention_mask"]
        if int(mask.sum()) < _MIN_FRAMES:
            raise MediaError(
                f"{len(samples) / self.rate:.3f} s of audio are too short for the model",
                reason="unprocessable",
            )
        return {"input_features": made["input_features"], "feature_attention_mask": mask}


class ChunkedLogMel:
    """Feature extractor of Ultravox. The features are as long as the audio, in chunks of the tower's context.

    It gives the same results as `UltravoxProcessor` on the hub (2025-02 and later), without running the
    processor's code. Audio is padded to at least two whole hops. If there are several chunks, the last chunk
    is padded with zeros.
    """

    def __init__(self, preprocessor: Mapping[str, Any]) -> None:
        self._extractor = whisper_extractor(preprocessor)

    @property
    def rate(self) -> int:
        return int(self._extractor.sampling_rate)

    def extract(self, samples: Samples) -> Mapping[str, torch.Tensor]:
        hop, context = self._extractor.hop_length, self._extractor.nb_max_frames
        made = self._extractor(
            np.pad(samples, (0, max(2 * hop - len(samples), 0))),
            sampling_rate=self.rate,
            padding="longest",
            pad_to_multiple_of=hop,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mel, frames = made["input_features"][0], int(made["attention_mask"].sum())
        starts = range(0, frames, context)
        if len(starts) == 1:
            return {"audio_features": mel[None], "audio_lens": torch.tensor([frames])}
        mel = functional.pad(mel[:, :frames], (0, -frames % context))
        return {
            "audio_features": mel.unflatten(1, (-1, context)).transpose(0, 1).contiguous(),
            "audio_lens": torch.tensor([min(frames - start, context) for start in starts]),
        }


def whisper_extractor(preprocessor: Mapping[str, Any]) -> Any:
    """Return transformers' feature extractor with the settings in a checkpoint's preprocessor JSON.

    Raises CheckpointError("bad_config") if the JSON names another class or is invalid.
    """
    kind = preprocessor.get("feature_extractor_type", "WhisperFeatureExtractor")
    if kind != "WhisperFeatureExtractor":
        raise CheckpointError(f"feature_extractor_type {kind!r} is not supported", reason="bad_config")
    try:
        return WhisperFeatureExtractor.from_dict(dict(preprocessor))
    except (TypeError, ValueError, ZeroDivisionError) as e:
        raise CheckpointError(f"preprocessor_config.json: {e}", reason="bad_config") from e
