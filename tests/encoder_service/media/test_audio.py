"""Decoding of valid, unusual and hostile audio files."""

from __future__ import annotations

import contextlib
import io
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from time_limits import TimeLimits

from cornplug.encoder_service.formats import audio
from cornplug.errors import MediaError
from cornplug.identity import samples_digest

from ..conftest import png, sample_image
from ..recordings import encoded, tone, wav, wav_header

MAX_S = 5.0
MONO = tone(0.5)
NOISE = np.random.default_rng(0).integers(-20_000, 20_000, (48_000, 1), dtype=np.int16)
WHOLE = {
    "wav": wav(MONO),
    "flac": encoded(MONO, "flac", "flac"),
    "mp3": encoded(MONO, "mp3", "libmp3lame"),
    "ogg": encoded(MONO, "ogg", "libopus"),
    "mp4": encoded(MONO, "mp4", "aac"),
    "matroska": encoded(MONO, "matroska", "libopus"),
}


def decode(data: bytes) -> audio.AudioSamples:
    return audio.decode(data, max_s=MAX_S)


@pytest.mark.parametrize(
    "data",
    [
        wav(MONO),
        encoded(MONO, "flac", "flac"),
        encoded(MONO, "aiff", "pcm_s16be"),
        encoded(MONO, "matroska", "pcm_s16le"),
        encoded(MONO, "wav", "pcm_s24le"),
        encoded(MONO, "wav", "pcm_f32le"),
    ],
)
def test_audio_lossless_containers_give_one_digest(data: bytes) -> None:
    decoded = decode(data)
    want = MONO[:, 0].astype(np.float32) / 32768
    assert decoded.rate == 16_000
    assert np.array_equal(decoded.samples, want)
    assert decoded.digest() == samples_digest(16_000, want.tobytes())


def test_audio_changed_sample_or_rate_changes_digest() -> None:
    other = MONO.copy()
    other[100] ^= 1
    seen = {decode(d).digest() for d in (wav(MONO), wav(other), wav(MONO, 8000), wav(MONO[:-1]))}
    assert len(seen) == 4


@pytest.mark.parametrize("codec", ["mp3", "ogg", "adts", "mp4"])
def test_audio_lossy_containers_keep_the_tone(codec: str) -> None:
    names = {"mp3": "libmp3lame", "ogg": "libopus", "adts": "aac", "mp4": "aac"}
    decoded = decode(encoded(tone(1.0), codec, names[codec]))
    assert 0.95 < decoded.duration_s < 1.2
    loudest = np.abs(np.fft.rfft(decoded.samples))[100:]
    assert abs((loudest.argmax() + 100) / decoded.duration_s - 440) < 5


def test_audio_channels_are_averaged() -> None:
    stereo = tone(0.25, channels=2)
    want = (stereo.astype(np.float32) / 32768).T.mean(axis=0)
    assert np.array_equal(decode(wav(stereo)).samples, want)
    assert np.array_equal(decode(encoded(stereo, "flac", "flac")).samples, want)


@pytest.mark.parametrize(("codec", "levels"), [("pcm_u8", 128), ("pcm_s32le", 2**31), ("pcm_f64le", 1)])
def test_audio_any_sample_width_is_scaled_to_one(codec: str, levels: int) -> None:
    decoded = decode(encoded(MONO, "wav", codec))
    assert np.abs(decoded.samples - MONO[:, 0] / 32768).max() <= 1 / min(levels, 128) * (levels == 128)


def test_audio_samples_equal_vllm() -> None:
    """Its loader is the rule, where it scales: run it on floats, which it takes as they are."""
    vllm_audio = pytest.importorskip("vllm.multimodal.media.audio")
    data = encoded(tone(0.3, channels=2), "matroska", "libopus")
    theirs, rate = vllm_audio.load_audio(io.BytesIO(data), sr=None, backend="pyav")
    ours = decode(data)
    assert rate == ours.rate
    assert np.array_equal(ours.samples, theirs)


def test_audio_stream_of_unknown_length_is_decoded() -> None:
    """What speech synthesis sends: the size is all ones."""
    data = wav_header(2**32 - 1) + MONO.tobytes()
    assert len(decode(data).samples) == len(MONO)


def test_audio_header_off_by_bytes_is_not_truncated() -> None:
    data = bytearray(wav(MONO))
    data[4:8] = (len(data) + 3).to_bytes(4, "little")
    assert len(decode(bytes(data)).samples) == len(MONO)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"
CONCAT = b"ffconcat version 1.0\nfile /etc/hostname\n"
HOUR_BYTES = 3600 * 16_000 * 2


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0" * 5000, "unknown_format"),
        (b"hello, this is text" * 50, "unknown_format"),
        (PLAYLIST, "unknown_format"),
        (CONCAT, "unknown_format"),
        (wav(MONO[:0]), "empty"),
        (wav(tone(6.0)), "too_long"),
        (wav_header(10 * HOUR_BYTES) + MONO.tobytes(), "damaged"),
        (wav(tone(0.5, 500), 500), "sample_rate"),
        (wav_header(MONO.nbytes, rate=2_000_000) + MONO.tobytes(), "sample_rate"),
        (wav_header(MONO.nbytes, channels=64) + MONO.tobytes(), "channels"),
        (wav(MONO)[:6000], "damaged"),
        (encoded(NOISE, "flac", "flac")[:60_000], "damaged"),
        (wav_header(4096, bits=32, tag=3) + np.full(1024, np.nan, "<f4").tobytes(), "damaged"),
    ],
)
def test_audio_bad_files_are_refused_with_reason(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError) as e:
        decode(data)
    assert e.value.reason == reason


def test_audio_image_file_is_refused() -> None:
    with pytest.raises(MediaError) as e:
        decode(png(sample_image(1)))
    assert e.value.reason == "unknown_format"


def test_audio_ten_hours_are_refused_before_decoding(within: TimeLimits) -> None:
    """Silence in FLAC: 10 hours in a few kilobytes a minute; the header tells."""
    data = bytearray(encoded(tone(1.0), "flac", "flac"))
    # STREAMINFO: the total of samples is 36 bits, 13 bytes after the block's begin at 8.
    total = 10 * 3600 * 16_000
    data[21] = (data[21] & 0xF0) | (total >> 32)
    data[22:26] = (total & 0xFFFFFFFF).to_bytes(4, "big")
    with within.cpu(1), pytest.raises(MediaError) as e:
        decode(bytes(data))
    assert e.value.reason == "too_long"


def test_audio_wrong_header_costs_at_most_the_limit() -> None:
    """A long stream that announces nothing is cut off where the limit is."""
    silence = np.zeros((60 * 16_000, 1), np.int16)
    with pytest.raises(MediaError) as e:
        decode(wav_header(2**32 - 1) + silence.tobytes())
    assert e.value.reason == "too_long"


def test_audio_playlist_opens_no_other_file(tmp_path: Path) -> None:
    inner = tmp_path / "inner.wav"
    inner.write_bytes(wav(MONO))
    for text in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{inner}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {inner}\n",
    ):
        with pytest.raises(MediaError):
            decode(text.encode())


@pytest.mark.parametrize("kind", WHOLE)
def test_audio_damaged_file_decodes_or_is_refused(kind: str) -> None:
    """Never another exception: 60 mutations of each container."""
    rng = random.Random(kind)
    refused = 0
    for i in range(60):
        data = bytearray(WHOLE[kind])
        if i % 3 == 0:
            data = data[: rng.randrange(1, len(data))]
        for _ in range(rng.randrange(1, 8)):
            data[rng.randrange(min(len(data), 200 if i % 2 else len(data)))] = rng.randrange(256)
        try:
            decoded = decode(bytes(data))
        except MediaError:
            refused += 1
        else:
            assert 0 < decoded.duration_s <= MAX_S
    assert refused > 0


@settings(max_examples=60)
@given(st.binary(max_size=400), st.sampled_from([b"", *(w[:64] for w in WHOLE.values())]))
def test_audio_any_bytes_decode_or_are_refused(data: bytes, begin: bytes) -> None:
    with contextlib.suppress(MediaError):
        assert decode(begin + data).duration_s > 0
