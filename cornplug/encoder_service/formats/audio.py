"""Decodes audio files to the samples that an engine passes to its processor, and computes the digest of the
samples.

The rules are the same as in vLLM 0.32 (vllm/multimodal/media/audio.py), so that engines and the service
compute the same digest for the same audio:

1. The first audio stream is used, at its own sample rate. Other streams in the container are ignored.
2. Integers are scaled to [-1, 1), by division by 2 to the power of (bits - 1).
3. Channels are averaged to a single channel, in float32.

`audio_resample` later resamples to the processor's rate. The bytes are untrusted, so only listed containers
and protocols are allowed. Otherwise a playlist could open files and URLs.
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
"""Accepted demuxers of FFmpeg. Unlike hls, dash and concat, they do not open other files."""
MIN_RATE: Final = 1_000
MAX_RATE: Final = 384_000
MAX_CHANNELS: Final = 32
MAX_SAMPLES: Final = 1 << 26
"""Maximum number of samples per channel. As float32, they take 256 MiB."""
DECODE_TIMEOUT_S: Final = 30.0
"""Maximum seconds to decode one media item."""
_MAX_MISSING_FRACTION: Final = 0.02
"""Fraction of the announced duration that may be missing before the file counts as truncated."""
_PRIMING_S: Final = 0.1
"""Seconds of padding that an encoder may include in the announced duration."""
_MIN_UNKNOWN_SIZE: Final = 0x7FFF_F000
"""Minimum value of a RIFF size that counts as a placeholder. Programs that stream write it, because they do
not know the size yet."""
_EXACT_CONTAINERS: Final = frozenset({"wav", "w64", "aiff", "flac", "mov,mp4,m4a,3gp,3g2,mj2"})
"""Containers whose header contains the exact duration instead of an estimate."""
_INTEGER_SCALES: Final = {"u8": 1 << 7, "s16": 1 << 15, "s32": 1 << 31, "s64": 1 << 63}

# PyAV raises FFmpegError for FFmpeg's errors, and various Python exceptions for an invalid header.
DECODE_ERRORS: Final = (
    av.FFmpegError,
    ValueError,
    LookupError,
    OverflowError,
    TypeError,
    RuntimeError,
    MemoryError,
)

Samples = npt.NDArray[np.float32]
BeforeDecode = Callable[[float, int], None]
"""Function that is called before decoding, with the duration in seconds and the sample rate. If the header
has no duration, the maximum duration is passed. An exception stops the decoding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AudioSamples:
    """Decoded audio."""

    samples: Samples
    """Mono samples, of shape (samples,)."""
    rate: int
    """Samples per second."""

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.rate

    def digest(self) -> bytes:
        """Return the media digest (32 bytes) of these samples at this rate."""
        return samples_digest(self.rate, self.samples.astype("<f4", copy=False).tobytes())


def _accept_any_duration(seconds: float, rate: int) -> None:
    pass


def decode(data: bytes, *, max_s: float, before: BeforeDecode = _accept_any_duration) -> AudioSamples:
    """Decode a whole audio file at its own sample rate.

    The limits are checked against the header before decoding, and again while decoding. If the header is
    wrong, at most `max_s` seconds of samples are decoded.

    Raises MediaError: "empty" (no bytes, or 0 s), "unknown_format", "no_audio", "sample_rate", "channels",
    "too_long", "too_slow", or "damaged" (truncated, inconsistent or not finite).
    """
    riff = int.from_bytes(data[4:8], "little") if data[:4] == b"RIFF" else 0
    # The size in many files is wrong by a header or a padding byte. This does not count as truncation.
    if riff < _MIN_UNKNOWN_SIZE and len(data) < riff * (1 - _MAX_MISSING_FRACTION):
        raise MediaError(
            f"the WAV file is truncated: it has {len(data)} bytes, fewer than its header specifies",
            reason="damaged",
        )
    with open_container(data, "audio") as container:
        if not container.streams.audio:
            raise MediaError("the file has no audio stream", reason="no_audio")
        stream = container.streams.audio[0]
        if stream.codec_context is None:
            raise MediaError("the audio codec is unknown", reason="unknown_format")
        announced_s = announced_duration_s(container, stream)
        _check_header(stream, announced_s, max_s)
        rate: int = stream.rate
        before(max_s if announced_s is None else announced_s, rate)
        samples = np.concatenate([*_decode_mono(container, stream, max_s), np.zeros(0, np.float32)])
        exact = container.format.name in _EXACT_CONTAINERS
    if not len(samples):
        raise MediaError("the audio has no samples", reason="empty")
    if not np.isfinite(samples).all():
        raise MediaError("the audio has NaN or infinite samples", reason="damaged")
    if (
        exact
        and announced_s is not None
        and len(samples) / rate < announced_s * (1 - _MAX_MISSING_FRACTION) - _PRIMING_S
    ):
        raise MediaError(
            f"the audio is truncated: {len(samples) / rate:.2f} s of {announced_s:.2f} s", reason="damaged"
        )
    return AudioSamples(samples=samples, rate=rate)


def open_container(data: bytes, kind: str, **options: str) -> Any:
    """Open a file's bytes as a PyAV container, which is a context manager. `kind` is used in messages.

    Raises MediaError("empty", "unknown_format").
    """
    if not data:
        raise MediaError(f"the {kind} has no bytes", reason="empty")
    try:
        return av.open(
            io.BytesIO(data),
            metadata_errors="replace",
            # "none" is not a protocol, so no reference in the file can open another file.
            container_options={"format_whitelist": ",".join(FORMATS), "protocol_whitelist": "none"},
            options=options,
        )
    except DECODE_ERRORS as e:
        raise MediaError(
            f"not an accepted {kind} format ({len(data)} bytes); send one of {', '.join(FORMATS)}",
            reason="unknown_format",
        ) from e


def announced_duration_s(container: Any, stream: Any) -> float | None:
    """Return the duration in seconds from the header, or None if the header has no duration."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration and container.duration > 0 else None


def iter_frames(container: Any, stream: Any, kind: str) -> Iterator[Any]:
    """Yield the decoded frames of a stream. `kind` is used in messages.

    Raises MediaError("damaged", "too_slow").
    """
    end = time.monotonic() + DECODE_TIMEOUT_S
    stream.codec_context.thread_count = 1
    decoded = container.decode(stream)
    while True:
        try:
            frame = next(decoded, None)
        except DECODE_ERRORS as e:
            raise MediaError(f"the {kind} is damaged: {e}", reason="damaged") from e
        if frame is None:
            return
        if time.monotonic() > end:
            raise MediaError(
                f"the {kind} takes longer than {DECODE_TIMEOUT_S:g} s to decode", reason="too_slow"
            )
        yield frame


def _check_header(stream: Any, announced_s: float | None, max_s: float) -> None:
    rate, channels = stream.rate, stream.channels
    if not rate or not MIN_RATE <= rate <= MAX_RATE:
        raise MediaError(
            f"sample rate of {rate} Hz is not accepted; resample to {MIN_RATE} to {MAX_RATE} Hz",
            reason="sample_rate",
        )
    if not 1 <= channels <= MAX_CHANNELS:
        raise MediaError(f"{channels} channels exceed the limit of {MAX_CHANNELS}", reason="channels")
    if announced_s is not None and announced_s > max_s:
        raise MediaError(f"{announced_s:.0f} s of audio exceed the limit of {max_s:g} s", reason="too_long")


def _decode_mono(container: Any, stream: Any, max_s: float) -> Iterator[Samples]:
    rate, channels, total = stream.rate, stream.channels, 0
    most = min(math.floor(max_s * rate), MAX_SAMPLES)
    for frame in iter_frames(container, stream, "audio"):
        # The sample rate and the channels may change within a stream, but no engine supports this.
        if frame.sample_rate != rate or frame.layout.nb_channels != channels:
            raise MediaError("the audio changes its rate or channels within the stream", reason="damaged")
        total += frame.samples
        if total > most:
            raise MediaError(
                f"more than {most / rate:.0f} s of audio at {rate} Hz; the limit is {max_s:g} s",
                reason="too_long",
            )
        yield _to_float32(frame, channels).mean(axis=0)


def _to_float32(frame: Any, channels: int) -> Samples:
    """Return one decoded frame as float32 of shape (channels, samples)."""
    name: str = frame.format.name
    array = frame.to_ndarray()
    if not frame.format.is_planar:
        array = array.reshape(-1, channels).T
    kind = name.removesuffix("p")
    if kind not in _INTEGER_SCALES:
        return np.asarray(array, np.float32)
    wide = array.astype(np.float64) - (128 if kind == "u8" else 0)
    return np.asarray(wide / _INTEGER_SCALES[kind], np.float32)
