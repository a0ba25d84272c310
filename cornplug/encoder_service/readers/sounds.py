"""Sounds: decoded (`sounds`), at the model's rate (`resampling`), through its feature extractor."""

from __future__ import annotations

from cornplug.encoder_service import sounds, towers
from cornplug.encoder_service.readers.base import Limits, Reading, Sampling
from cornplug.encoder_service.registry import Loaded
from cornplug.encoder_service.resampling import resampled


class Sounds:
    """Reads sounds for one model. Raises CheckpointError("bad_config") without a feature extractor.

    The digest is over the samples that the extractor receives, as in the engine: mono, at its rate.
    """

    def __init__(self, loaded: Loaded, limits: Limits) -> None:
        self._max_s = limits.max_audio_s
        self._mels = towers.listener(loaded.checkpoint)

    def read(self, data: bytes, sampling: Sampling) -> Reading:
        sound = resampled(sounds.decode(data, max_s=self._max_s), self._mels.rate)
        return Reading(digest=sound.digest(), inputs=self._mels.listen(sound.samples))
