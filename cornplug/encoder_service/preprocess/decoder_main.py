"""Main module of a decoding process, which decodes untrusted media items one after another. It does not need
torch, and has no keys.

`DecoderProcess` starts the process with a memory limit in bytes and one end of a socket pair. The process
ends when the other end closes, or when a job exceeds its time limit. Therefore it does not outlive a killed
service.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from PIL import AvifImagePlugin, Image, _imaging

from cornplug.encoder_service.formats import audio, image, sealed_memory, video
from cornplug.encoder_service.formats.video import VideoFrames, VideoHeader, VideoLimits
from cornplug.encoder_service.preprocess import decoders, jail
from cornplug.errors import MediaError

_BAND_BYTES: Final = 256 << 10
"""Bytes of pixels to write at a time. For a JPEG of 1.2 megapixels, this takes 6 % less CPU than 1 MiB."""
_KEPT_BLOCKS: Final = 2
"""Number of 16 MiB blocks that Pillow keeps for the next image."""
_GRACE_S: Final = 2.0
"""Seconds after a job's time limit at which the process ends itself, if the service has not killed it."""


class _JobStopped(Exception):
    """Raised if the service has decided not to decode the media item."""


class DecoderLoop:
    """Receives jobs from a socket and runs them one after another."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def run(self, restrictions: Sequence[str]) -> None:
        """Run jobs until the service disconnects, then raise OSError. `restrictions` are the active
        restrictions, which are reported to the service."""
        decoders.send(self._sock, decoders.DecoderReady(tuple(restrictions)))
        while True:
            job, fd = decoders.receive(self._sock, decoders.ToDecoder)
            if fd is None or isinstance(job, decoders.DecodeGo | decoders.DecodeStop):
                continue  # ignore the decision about a job that has already failed
            signal.setitimer(signal.ITIMER_REAL, job.limit_s + _GRACE_S)
            try:
                self._run_job(job, _read_all(fd))
            except _JobStopped:
                continue
            except MediaError as e:
                decoders.send(self._sock, decoders.DecodeFailed(e.reason, str(e)[:1000]))
            except MemoryError:
                decoders.send(
                    self._sock,
                    decoders.DecodeFailed("too_much_memory", "decoding the medium takes too much memory"),
                )
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

    def _run_job(self, job: decoders.Job, data: bytes) -> None:
        shape, memory = self._decode(job, data)
        try:
            decoders.send(self._sock, decoders.DecodeDone(shape), memory)
        finally:
            os.close(memory)

    def _decode(self, job: decoders.Job, data: bytes) -> tuple[tuple[int, ...], int]:
        """Decode the media item. Return (shape of the result, memfd that contains the result)."""
        match job:
            case decoders.ImageJob():
                rgb = self._decode_image(job, data)
                return (rgb.height, rgb.width, 3), sealed_memory.create_memfd(_iter_bands(rgb))
            case decoders.AudioJob():
                samples = self._decode_audio(job, data)
                return samples.shape, sealed_memory.create_memfd([np.ascontiguousarray(samples).data])
            case decoders.VideoJob():
                limits = VideoLimits(max_s=job.max_s, max_frames=job.max_frames, max_pixels=job.max_pixels)
                frames = video.decode(
                    data, lambda source: self._request_decision(_header_message(source)), limits
                )
            case decoders.FramesJob():
                frames = self._decode_frames(job, data)
        return frames.frames.shape, sealed_memory.create_memfd(
            np.ascontiguousarray(frame).data for frame in frames.frames
        )

    def _decode_image(self, job: decoders.ImageJob, data: bytes) -> Image.Image:
        def before(width: int, height: int) -> None:
            self._request_decision(decoders.DecodeHeader(width=width, height=height))

        decoded = image.decode(data, job.max_pixels, before=before)
        return image.to_engine_rgb(decoded, job.decoding)

    def _decode_audio(self, job: decoders.AudioJob, data: bytes) -> audio.Samples:
        def before(seconds: float, rate: int) -> None:
            self._request_decision(decoders.DecodeHeader(seconds=seconds, rate=rate))

        return audio.decode(data, max_s=job.max_s, before=before).samples

    def _decode_frames(self, job: decoders.FramesJob, data: bytes) -> VideoFrames:
        def before(source: VideoHeader) -> None:
            self._request_decision(_header_message(source))

        ends = np.cumsum(job.sizes).tolist()
        images = [data[end - size : end] for end, size in zip(ends, job.sizes, strict=True)]
        limits = VideoLimits(max_frames=job.max_frames, max_pixels=job.max_pixels)
        return video.decode_frames(images, job.fps, limits, decoding=job.decoding, before=before)

    def _request_decision(self, opened: decoders.DecodeHeader) -> tuple[int, ...]:
        """Send the header to the service, and wait for its decision. Return the numbers of the frames to
        decode. Raises _JobStopped if the service decides not to decode the media item."""
        decoders.send(self._sock, opened)
        decision, fd = decoders.receive(self._sock, decoders.ToDecoder)
        if fd is not None:
            os.close(fd)
        if not isinstance(decision, decoders.DecodeGo):
            raise _JobStopped
        return decision.indices


def _iter_bands(rgb: Image.Image) -> Iterator[bytes]:
    """Yield the pixels a few rows at a time, because a copy of all pixels would double the memory."""
    rows = max(1, _BAND_BYTES // (3 * rgb.width))
    for top in range(0, rgb.height, rows):
        yield rgb.crop((0, top, rgb.width, min(top + rows, rgb.height))).tobytes()


def _header_message(header: VideoHeader) -> decoders.DecodeHeader:
    return decoders.DecodeHeader(width=header.width, height=header.height, total=header.total, fps=header.fps)


def _read_all(fd: int) -> bytes:
    try:
        size = os.fstat(fd).st_size
        if size == 0:
            return b""
        with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as whole:
            return whole[:]
    finally:
        os.close(fd)


def main() -> None:
    """Run jobs until the service disconnects."""
    max_bytes, fd = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Ignore Ctrl-C, because the service ends this process after draining.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Keep an image's memory for the next image, because new pages would take a fifth of a JPEG's decoding
    # time.
    _imaging.set_blocks_max(_KEPT_BLOCKS)
    AvifImagePlugin.DEFAULT_MAX_THREADS = 1  # there is already one process per core
    Image.init()  # imports the decoders while files are readable
    with socket.socket(fileno=fd) as sock:
        try:
            DecoderLoop(sock).run(jail.confine())
        except OSError:
            pass  # the service has disconnected


if __name__ == "__main__":
    main()
