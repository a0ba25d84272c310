"""Audio preprocessing: decoding, resampling to the model's rate, and the model's feature extractor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from cornplug.encoder_service import towers
from cornplug.encoder_service.media.audio_resample import resampled
from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.preprocess.preprocessor import (
    DecodedMedium,
    FrameSampling,
    Inputs,
    MediumForm,
    MediumLimits,
    PreprocessContext,
)
from cornplug.encoder_service.preprocess.sandbox.decoders import MediumHeader
from cornplug.encoder_service.preprocess.whole_processor import WholeProcessor, check_encodes
from cornplug.encoder_service.towers.log_mel import LogMelFeatures
from cornplug.encoder_service.wire.decodings import Decoding

_MELS_BYTES_A_SECOND: Final = 128 * 100 * 4
_PADDED_S: Final = 30.0
"""Length in seconds of Whisper's window. Audio is padded to whole windows."""


class AudioPreprocessor:
    """Audio preprocessor of one model.

    The digest covers the samples that the feature extractor receives, as in the engine: mono, at its rate.
    Raises CheckpointError("bad_config") if the checkpoint has no feature extractor.
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
        on_header = context.on_header(_prepared_bytes)
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


def _prepared_bytes(header: MediumHeader) -> int:
    return round(_MELS_BYTES_A_SECOND * (header.seconds + _PADDED_S))
