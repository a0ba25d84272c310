"""Decoding of audio files to the samples that an engine passes on, and their digest.

The rule is that of vLLM 0.32 (vllm/multimodal/media/audio.py), so that engines and the service compute one
digest for the same audio:

1. The first audio stream counts, at its own rate; the container's other streams are ignored.
2. Integers are scaled to [-1, 1): divided by 2 to the (bits - 1).
3. Channels are averaged to one, in float32.

Resampling to the processor's rate follows later (`audio_resample`). The bytes are untrusted: containers and
protocols are on an allow list, since a playlist would otherwise open files and URLs.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import av
import numpy as np
import numpy.typing as npt

from cornplug.errors import MediaError
from cornplug.identity import samples_digest

FORMATS: Final = (
    "wav", "w64", "aiff", "au", "caf", "flac", "mp3", "ogg", "aac", "amr", "mov", "mp4", "m4a", "3gp",
    "matroska", "webm", "avi", "asf", "flv", "mpegts", "mpeg",
)  # fmt: skip
"""FFmpeg's demuxers that open no further file; hls, dash and concat do."""
MIN_RATE: Final = 1_000
MAX_RATE: Final = 384_000
MAX_CHANNELS: Final = 32
MAX_SAMPLES: Final = 1 << 26
"""Samples per channel, at any rate: 256 MiB of float32."""
DECODE_TIMEOUT_S: Final = 30.0
"""Longest decoding of one medium."""
_SHORT_BY: Final = 0.02
"""Fraction of the announced duration that may be missing without being a truncation."""
_PRIMING_S: Final = 0.1
"""Padding at both ends that an encoder may include in the announced duration."""
_ENDLESS: Final = 0x7FFF_F000
"""RIFF sizes from here on are placeholders of writers that stream and do not know the size yet."""
_EXACT: Final = frozenset({"wav", "w64", "aiff", "flac", "mov,mp4,m4a,3gp,3g2,mj2"})
"""Containers whose header has the exact duration, not an estimate."""
_SCALE: Final = {"u8": 1 << 7, "s16": 1 << 15, "s32": 1 << 31, "s64": 1 << 63}

# PyAV lets FFmpeg's errors out as its own, and Python's where a header is nonsense.
BROKEN: Final = (av.FFmpegError, ValueError, LookupError, OverflowError, TypeError, RuntimeError, MemoryError)

Samples = npt.NDArray[np.float32]
Before = Callable[[float, int], None]
"""Called with the seconds (at most) and the rate before decoding; an exception ends the decoding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AudioSamples:
    """Decoded audio."""

    samples: Samples
    """Mono, shape (samples,)."""
    rate: int
    """Samples a second."""

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate

    def digest(self) -> bytes:
        """Media digest (32 bytes) of these samples at this rate."""
        return samples_digest(self.rate, self.samples.astype("<f4", copy=False).tobytes())


def _no_objection(seconds: float, rate: int) -> None:
    pass


def decode(data: bytes, *, max_s: float, before: Before = _no_objection) -> AudioSamples:
    """The samples of a whole audio file, at its own rate.

    The header is checked before decoding, and the samples during it: a wrong header costs at most
    `max_s` of samples.

    Raises MediaError: "empty" (no bytes, or 0 s), "unknown_format", "no_audio", "sample_rate",
    "channels", "too_long", "too_slow", "damaged" (truncated, inconsistent, not finite).
    """
    riff = int.from_bytes(data[4:8], "little") if data[:4] == b"RIFF" else 0
    # Many writers miscount by a header or a padding byte: that is no truncation.
    if riff < _ENDLESS and len(data) < riff * (1 - _SHORT_BY):
        raise MediaError(f"the WAV is truncated: {len(data)} bytes are not what it says", reason="damaged")
    with opened(data, "audio") as container:
        if not container.streams.audio:
            raise MediaError("the file has no audio stream", reason="no_audio")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise MediaError("the audio codec is unknown", reason="unknown_format")
        announced_s = announced_duration_s(container, stream)
        _check_header(stream, announced_s, max_s)
        rate: int = stream.rate
        before(max_s if announced_s is None else announced_s, rate)
        samples = np.concatenate([*_mono(container, stream, max_s), np.zeros(0, np.float32)])
        exact = container.format.name in _EXACT
    if not len(samples):
        raise MediaError("the audio has no samples: 0 s", reason="empty")
    if not np.isfinite(samples).all():
        raise MediaError("the audio has NaN or infinite samples", reason="damaged")
    if exact and announced_s is not None and len(samples) / rate < announced_s * (1 - _SHORT_BY) - _PRIMING_S:
        raise MediaError(
            f"the audio is truncated: {len(samples) / rate:.2f} s of {announced_s:.2f} s", reason="damaged"
        )
    return AudioSamples(samples=samples, rate=rate)


def opened(data: bytes, what: str, **options: str) -> Any:
    """PyAV's container over bytes; a context manager. Raises MediaError("empty", "unknown_format")."""
    if not data:
        raise MediaError(f"the {what} has no bytes", reason="empty")
    try:
        return av.open(
            io.BytesIO(data),
            metadata_errors="replace",
            # A protocol that does not exist: nothing inside the file can name another one to read.
            container_options={"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"},
            options=options,
        )
    except BROKEN as e:
        raise MediaError(
            f"{len(data)} bytes are no accepted {what}; send one of {', '.join(FORMATS)}",
            reason="unknown_format",
        ) from e


def announced_duration_s(container: Any, stream: Any) -> float | None:
    """The duration by the header, None if it has none."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration and container.duration > 0 else None


def frames(container: Any, stream: Any, what: str) -> Iterator[Any]:
    """Decoded frames. Raises MediaError("damaged", "too_slow")."""
    end = time.monotonic() + DECODE_TIMEOUT_S
    stream.codec_context.thread_count = 1
    decoded = container.decode(stream)
    while True:
        try:
            frame = next(decoded, None)
        except BROKEN as e:
            raise MediaError(f"the {what} is damaged: {e}", reason="damaged") from e
        if frame is None:
            return
        if time.monotonic() > end:
            raise MediaError(f"the {what} takes over {DECODE_TIMEOUT_S:g} s to decode", reason="too_slow")
        yield frame


def _check_header(stream: Any, announced_s: float | None, max_s: float) -> None:
    rate, channels = stream.rate, stream.channels
    if not rate or not MIN_RATE <= rate <= MAX_RATE:
        raise MediaError(
            f"a rate of {rate} Hz; {MIN_RATE} to {MAX_RATE} are accepted: resample it", reason="sample_rate"
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise MediaError(f"{channels} channels, at most {MAX_CHANNELS} are accepted", reason="channels")
    if announced_s is not None and announced_s > max_s:
        raise MediaError(f"{announced_s:.0f} s of audio, at most {max_s:g} are accepted", reason="too_long")


def _mono(container: Any, stream: Any, max_s: float) -> Iterator[Samples]:
    rate, channels, total = stream.rate, stream.channels, 0
    most = min(math.floor(max_s * rate), MAX_SAMPLES)
    for frame in frames(container, stream, "audio"):
        # A frame may change both in mid-stream, which no engine supports.
        if frame.sample_rate != rate or frame.layout.nb_channels != channels:
            raise MediaError("the audio changes its rate or channels in mid-stream", reason="damaged")
        total += frame.samples
        if total > most:
            raise MediaError(
                f"over {most / rate:.0f} s of audio at {rate} Hz, at most {max_s:g} s are accepted",
                reason="too_long",
            )
        yield _floats(frame, channels).mean(axis=0)


def _floats(frame: Any, channels: int) -> Samples:
    """(channels, samples) float32 of one decoded frame."""
    name: str = frame.format.name
    array = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(-1, channels).T
    kind = name.removesuffix("p")
    if kind not in _SCALE:
        return np.asarray(array, np.float32)
    wide = array.astype(np.float64) - (128 if kind == "u8" else 0)
    return np.asarray(wide / _SCALE[kind], np.float32)
