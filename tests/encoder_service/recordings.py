"""Audio and videos made by code: good, odd and hostile."""

from __future__ import annotations

import io
import struct
import wave

import av
import numpy as np
import numpy.typing as npt

Pcm = npt.NDArray[np.int16]


def tone(seconds: float, rate: int = 16_000, *, pitch: float = 440.0, channels: int = 1) -> Pcm:
    """(samples, channels) int16: a chord that swells, another in each channel."""
    t = np.arange(round(seconds * rate)) / rate
    swell = 0.2 + 0.6 * t / max(seconds, 1e-9)
    rows = [np.sin(2 * np.pi * pitch * (c + 1) * t) * swell for c in range(channels)]
    return (32767 * np.stack(rows, axis=1)).astype(np.int16)


def wav(samples: Pcm, rate: int = 16_000) -> bytes:
    """16-bit WAV of (samples, channels)."""
    out = io.BytesIO()
    with wave.open(out, "wb") as f:
        f.setnchannels(samples.shape[1])
        f.setsampwidth(2)
        f.setframerate(rate)
        f.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


def wav_header(size: int, *, rate: int = 16_000, channels: int = 1, bits: int = 16, tag: int = 1) -> bytes:
    """The 44 bytes before `size` bytes of samples, true or not."""
    block = channels * bits // 8
    form = struct.pack("<HHIIHH", tag, channels, rate, min(rate * block, 2**32 - 1), block, bits)
    riff = struct.pack("<I", min(36 + size, 2**32 - 1))
    return b"RIFF" + riff + b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", size)


def encoded(samples: Pcm, container: str, codec: str, rate: int = 16_000) -> bytes:
    """The same samples by one of FFmpeg's encoders."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        layout = "mono" if samples.shape[1] == 1 else "stereo"
        stream = file.add_stream(codec, rate=rate, layout=layout)
        frame = av.AudioFrame.from_ndarray(samples.reshape(1, -1), format="s16", layout=layout)
        frame.sample_rate = rate
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    return out.getvalue()


def moving(count: int, width: int = 64, height: int = 48) -> list[npt.NDArray[np.uint8]]:
    """(height, width, 3) RGB frames: coarse patches that wander, another shade in each frame."""
    patches = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    still = patches.repeat(height // 6, 0).repeat(width // 8, 1)
    return [np.roll(still, 2 * i, axis=1) // 2 + np.uint8(i * 3 % 120) for i in range(count)]


def video(
    frames: list[npt.NDArray[np.uint8]],
    container: str = "mp4",
    codec: str = "libx264",
    *,
    fps: int = 10,
    pix_fmt: str = "yuv420p",
    **options: str,
) -> bytes:
    """The frames by one of FFmpeg's encoders."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pix_fmt
        for array in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(array, format="rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


def turned_by_90(mp4: bytes) -> bytes:
    """The same MP4, marked to be shown a quarter turn clockwise, as telephones do."""
    matrix = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    at = mp4.index(b"tkhd") + 4 + 40
    return mp4[:at] + matrix + mp4[at + 36 :]
