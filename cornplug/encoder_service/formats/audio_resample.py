"""Resamples audio to the sample rate of a model's processor, in the same way as vLLM 0.32.

vLLM uses torchaudio's `Resample` with its defaults: a sinc filter with a Hann window, 6 zero crossings wide,
which rolls off at 0.99 of the lower rate. The formula is from J. O. Smith
(https://ccrma.stanford.edu/~jos/resample/). The order of the steps and the rounding are the same as in
torchaudio, so that an engine and the service compute the same bits and the same digest.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Final

import numpy as np
import torch

from cornplug.encoder_service.formats.audio import AudioSamples, Samples
from cornplug.errors import MediaError

_ZERO_CROSSINGS: Final = 6
_ROLLOFF: Final = 0.99
_MAX_FILTER_VALUES: Final = 1 << 20
"""Maximum number of values in the filters. Two rates without a common divisor could need billions of
values."""
_BLOCK_SAMPLES: Final = 1 << 22
"""Approximate number of unfolded samples in memory at a time."""


def resample(audio: AudioSamples, rate: int) -> AudioSamples:
    """Return the audio at another sample rate. Audio that already has this rate is returned unchanged.

    Raises MediaError("sample_rate") if the common divisor of the two rates is too small.
    """
    if audio.rate == rate:
        return audio
    divisor = math.gcd(audio.rate, rate)
    old, new = audio.rate // divisor, rate // divisor
    if new * (old + 2 * _filter_reach(old, new)) > _MAX_FILTER_VALUES:
        raise MediaError(
            f"cannot resample {audio.rate} Hz to {rate} Hz; resample the audio to a common rate first",
            reason="sample_rate",
        )
    kernel, reach = _build_filters(old, new)
    wanted = math.ceil(new * len(audio.samples) / old)
    return AudioSamples(samples=_convolve(audio.samples, kernel, old, reach)[:wanted], rate=rate)


def _filter_reach(old: int, new: int) -> int:
    """Return the number of samples on each side that a filter covers."""
    return math.ceil(_ZERO_CROSSINGS * old / (min(old, new) * _ROLLOFF))


@lru_cache(maxsize=32)
def _build_filters(old: int, new: int) -> tuple[torch.Tensor, int]:
    """Return (filters, reach). The filters are float32 of shape (new, old + 2 * reach), one per new sample in
    a period."""
    reach, cutoff = _filter_reach(old, new), min(old, new) * _ROLLOFF
    inputs = torch.arange(-reach, reach + old, dtype=torch.float64)[None] / old
    # The first term is float32, as in torchaudio. The sum is float64.
    t = torch.arange(0, -new, -1)[:, None] / new + inputs
    t = (t * cutoff).clamp(-_ZERO_CROSSINGS, _ZERO_CROSSINGS)
    window = torch.cos(t * math.pi / _ZERO_CROSSINGS / 2) ** 2
    t = t * math.pi
    sinc = torch.where(t == 0, torch.ones((), dtype=t.dtype), t.sin() / t)
    return (sinc * (window * (cutoff / old))).to(torch.float32), reach


def _convolve(samples: Samples, kernel: torch.Tensor, old: int, reach: int) -> Samples:
    """Return the samples convolved with the filters at stride `old`, computed as matrix products."""
    padded = torch.from_numpy(np.pad(samples, (reach, reach + old)))
    periods = padded.unfold(0, kernel.shape[1], old)
    step = max(_BLOCK_SAMPLES // kernel.shape[1], 1)
    parts = [kernel @ block.T.contiguous() for block in periods.split(step)]
    return np.ascontiguousarray(torch.cat(parts, 1).T.reshape(-1).numpy())
