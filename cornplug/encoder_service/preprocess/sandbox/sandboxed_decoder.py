"""A `MediumDecoder` that decodes one medium in another process, and validates all of its results."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from cornplug.encoder_service.media.audio import MAX_SAMPLES, AudioSamples
from cornplug.encoder_service.media.image import COMMON, RgbPixels
from cornplug.encoder_service.media.video import VideoFrames, VideoHeader, VideoLimits
from cornplug.encoder_service.preprocess.sandbox import ipc
from cornplug.encoder_service.preprocess.sandbox.decoder_process import AssignedJob, DecoderProcess
from cornplug.encoder_service.preprocess.sandbox.decoders import MediumHeader, OnHeader, choose_frames
from cornplug.encoder_service.wire.decodings import DEFAULT, Decoding
from cornplug.errors import MediaError


class SandboxedDecoder:
    """Decoder for one medium. Its process is killed after `limit_s`, at `end_s` on the monotonic clock, or
    when `wanted` becomes false."""

    def __init__(
        self, process: DecoderProcess, *, limit_s: float, end_s: float, wanted: Callable[[], bool]
    ) -> None:
        self._process = process
        self._limit_s = limit_s
        self._end_s = end_s
        self._wanted = wanted

    def image(
        self,
        data: bytes,
        max_pixels: int,
        on_header: OnHeader,
        formats: Sequence[str] = COMMON,
        *,
        decoding: Decoding = DEFAULT,
    ) -> RgbPixels:
        job = ipc.ImageJob(
            max_pixels=max_pixels, formats=tuple(formats), decoding=decoding, limit_s=self._limit()
        )
        assigned = self._begin(job, [data])
        opened = _read_header(assigned)
        if not 0 < opened.width * opened.height <= max_pixels:
            raise _reject(assigned)
        _decide(assigned, lambda: on_header(MediumHeader.of_image(opened.width, opened.height)))
        # In some formats the image's sides differ from those in the header.
        shape, pixels = _read_result(
            assigned, lambda s: len(s) == 3 and s[2] == 3 and s[0] * s[1] <= max_pixels
        )
        return RgbPixels(shape[1], shape[0], memoryview(pixels))

    def audio(self, data: bytes, max_s: float, on_header: OnHeader) -> AudioSamples:
        assigned = self._begin(ipc.AudioJob(max_s=max_s, limit_s=self._limit()), [data])
        opened = _read_header(assigned)
        if opened.rate <= 0 or not 0 <= opened.seconds <= max_s:
            raise _reject(assigned)
        _decide(assigned, lambda: on_header(MediumHeader.of_audio(opened.seconds, opened.rate)))
        most = min(math.floor(max_s * opened.rate), MAX_SAMPLES)
        _, samples = _read_result(assigned, lambda s: len(s) == 1 and s[0] <= most, itemsize=4)
        return AudioSamples(samples=np.frombuffer(samples, np.float32), rate=opened.rate)

    def video(
        self,
        data: bytes,
        choose: Callable[[VideoHeader], Sequence[int]],
        limits: VideoLimits,
        on_header: OnHeader,
    ) -> VideoFrames:
        job = ipc.VideoJob(
            max_s=limits.max_s,
            max_frames=limits.max_frames,
            max_pixels=limits.max_pixels,
            limit_s=self._limit(),
        )
        return self._video(job, [data], choose, limits, on_header)

    def frames(
        self,
        images: Sequence[bytes],
        fps: float,
        limits: VideoLimits,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT,
    ) -> VideoFrames:
        job = ipc.FramesJob(
            sizes=tuple(map(len, images)),
            fps=fps,
            max_frames=limits.max_frames,
            max_pixels=limits.max_pixels,
            formats=limits.image_formats,
            decoding=decoding,
            limit_s=self._limit(),
        )
        return self._video(job, images, lambda source: range(source.total), limits, on_header)

    def _video(
        self,
        job: ipc.VideoJob | ipc.FramesJob,
        parts: Sequence[bytes],
        choose: Callable[[VideoHeader], Sequence[int]],
        limits: VideoLimits,
        on_header: OnHeader,
    ) -> VideoFrames:
        assigned = self._begin(job, parts)
        header = _read_header(assigned)
        if header.width * header.height <= 0 or header.total < 1 or header.fps <= 0:
            raise _reject(assigned)
        source = VideoHeader(total=header.total, fps=header.fps, width=header.width, height=header.height)
        indices: list[int] = []
        _decide(assigned, lambda: indices.extend(choose_frames(source, choose, limits, on_header)), indices)
        one = source.width * source.height

        def fits(s: tuple[int, ...]) -> bool:
            return len(s) == 4 and s[0] == len(indices) and s[1] * s[2] == one and s[3] == 3

        shape, pixels = _read_result(assigned, fits)
        taken = np.frombuffer(pixels, np.uint8).reshape(shape)
        return VideoFrames(frames=taken, indices=tuple(indices), source=source)

    def _limit(self) -> float:
        return max(min(self._limit_s, self._end_s - time.monotonic()), 0.01)

    def _begin(self, job: ipc.Job, parts: Sequence[bytes]) -> AssignedJob:
        return self._process.begin(job, parts, end_s=self._end_s, limit_s=self._limit_s, wanted=self._wanted)


def _read_header(assigned: AssignedJob) -> ipc.MediumOpened:
    message, fd = assigned.answer()
    if fd is not None:
        os.close(fd)
    if not isinstance(message, ipc.MediumOpened):
        raise _reject(assigned)
    return message


def _decide(assigned: AssignedJob, accept: Callable[[], None], indices: Sequence[int] = ()) -> None:
    """Let the process decode, unless `accept` raises."""
    going = False
    try:
        accept()
        going = True
    finally:
        assigned.tell(ipc.DecodeGo(tuple(indices)) if going else ipc.DecodeStop())


def _read_result(
    assigned: AssignedJob, fits: Callable[[tuple[int, ...]], bool], *, itemsize: int = 1
) -> tuple[tuple[int, ...], mmap.mmap]:
    message, fd = assigned.answer()
    if fd is None:
        raise _reject(assigned)
    if (
        not isinstance(message, ipc.MediumDecoded)
        or min(message.shape, default=0) < 1
        or not fits(message.shape)
    ):
        os.close(fd)
        raise _reject(assigned)
    try:
        return message.shape, ipc.sealed(fd, math.prod(message.shape) * itemsize)
    except (OSError, ValueError):
        raise _reject(assigned) from None


def _reject(assigned: AssignedJob) -> MediaError:
    assigned.kill()
    return MediaError("the decoder sent an invalid result", reason="crashed")
