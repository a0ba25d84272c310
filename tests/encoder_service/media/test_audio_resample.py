"""Audio at another rate: the same tone, and the same bits as the engine."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cornplug.encoder_service.formats import audio_resample
from cornplug.encoder_service.formats.audio import AudioSamples
from cornplug.encoder_service.formats.audio_resample import resample
from cornplug.errors import MediaError


def tone(rate: int, seconds: float = 0.5, pitch: float = 440.0) -> AudioSamples:
    t = np.arange(int(rate * seconds)) / rate
    return AudioSamples(samples=np.sin(2 * np.pi * pitch * t).astype(np.float32), rate=rate)


@pytest.mark.parametrize("rate", [8000, 11_025, 22_050, 24_000, 44_100, 48_000, 96_000, 384_000])
def test_resampled_tone_keeps_its_pitch(rate: int) -> None:
    audio = resample(tone(rate), 16_000)
    want = tone(16_000)
    assert audio.rate == 16_000
    assert len(audio.samples) == math.ceil(16_000 * int(rate * 0.5) / rate)
    inner = slice(200, 7800)  # a filter has no past at the very edges
    assert np.abs(audio.samples[inner] - want.samples[inner]).max() < 3e-3


def test_resampled_high_tone_is_filtered_out() -> None:
    assert np.abs(resample(tone(48_000, pitch=12_000), 16_000).samples[200:-200]).max() < 1e-2


def test_resampled_at_own_rate_is_unchanged() -> None:
    audio = tone(16_000)
    assert resample(audio, 16_000) is audio


@pytest.mark.parametrize("rate", [44_100, 48_000, 8000])
def test_resampled_bits_equal_torchaudio(rate: int) -> None:
    """vLLM runs `Resample` with oneDNN off; torchaudio's steps, on the same filters."""
    audio = tone(rate, 0.7)
    divisor = math.gcd(rate, 16_000)
    old, new = rate // divisor, 16_000 // divisor
    kernel, reach = audio_resample._build_filters(old, new)
    padded = torch.nn.functional.pad(torch.from_numpy(audio.samples)[None], (reach, reach + old))
    with torch.backends.mkldnn.flags(enabled=False):
        rows = torch.nn.functional.conv1d(padded[:, None], kernel[:, None], stride=old)
    theirs = rows.transpose(1, 2).reshape(-1)[: math.ceil(new * len(audio.samples) / old)].numpy()
    assert np.array_equal(resample(audio, 16_000).samples, theirs)


def test_resampled_blocks_equal_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = resample(tone(44_100, 1.0), 16_000).samples
    monkeypatch.setattr(audio_resample, "_BLOCK_SAMPLES", 4000)
    assert np.allclose(resample(tone(44_100, 1.0), 16_000).samples, whole, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rate", [16_001, 47_999, 383_999])
def test_resampled_rate_without_divisor_is_refused(rate: int) -> None:
    with pytest.raises(MediaError) as e:
        resample(tone(rate, 0.01), 16_000)
    assert e.value.reason == "sample_rate"
