"""A `Decoder` whose work another process does, for one medium: nothing of it is believed unchecked."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Sequence

import numpy as np
from PIL import Image

from cornplug.encoder_service.media.audio import MAX_SAMPLES, AudioSamples
from cornplug.encoder_service.media.image import COMMON
from cornplug.encoder_service.media.video import VideoFrames, VideoHeader, VideoLimits
from cornplug.encoder_service.preprocess.sandbox import ipc as wire
from cornplug.encoder_service.preprocess.sandbox.decoder_process import AssignedJob, DecoderProcess
from cornplug.encoder_service.preprocess.sandbox.decoders import Heard, MediumHeader, chosen
from cornplug.errors import MediaError


class SandboxedDecoder:
    """For one medium. `limit_s` bounds its decoding; it is ended at `end_s` (by the monotonic clock) too,
    and as soon as nobody wants it."""

    def __init__(
        self, process: DecoderProcess, *, limit_s: float, end_s: float, wanted: Callable[[], bool]
    ) -> None:
        self._process = process
        self._limit_s = limit_s
        self._end_s = end_s
        self._wanted = wanted

    def picture(
        self, data: bytes, max_pixels: int, heard: Heard, formats: Sequence[str] = COMMON
    ) -> Image.Image:
        return self._picture(data, max_pixels, heard, formats, for_sglang=False)

    def picture_for_sglang(
        self, data: bytes, max_pixels: int, heard: Heard, formats: Sequence[str] = COMMON
    ) -> Image.Image:
        return self._picture(data, max_pixels, heard, formats, for_sglang=True)

    def _picture(
        self, data: bytes, max_pixels: int, heard: Heard, formats: Sequence[str], *, for_sglang: bool
    ) -> Image.Image:
        job = wire.PictureJob(
            max_pixels=max_pixels, formats=tuple(formats), for_sglang=for_sglang, limit_s=self._limit()
        )
        asked = self._begin(job, [data])
        opened = _opened(asked)
        if not 0 < opened.width * opened.height <= max_pixels:
            raise _lies(asked)
        _hear(asked, lambda: heard(MediumHeader.of_picture(opened.width, opened.height)))
        # Some formats hold an image of other sides than their header says.
        shape, pixels = _result(asked, lambda s: len(s) == 3 and s[2] == 3 and s[0] * s[1] <= max_pixels)
        flat = np.frombuffer(pixels, np.uint8)
        return Image.frombuffer("RGB", (shape[1], shape[0]), flat, "raw", "RGB", 0, 1)

    def sound(self, data: bytes, max_s: float, heard: Heard) -> AudioSamples:
        asked = self._begin(wire.SoundJob(max_s=max_s, limit_s=self._limit()), [data])
        opened = _opened(asked)
        if opened.rate <= 0 or not 0 <= opened.seconds <= max_s:
            raise _lies(asked)
        _hear(asked, lambda: heard(MediumHeader.of_sound(opened.seconds, opened.rate)))
        most = min(math.floor(max_s * opened.rate), MAX_SAMPLES)
        _, samples = _result(asked, lambda s: len(s) == 1 and s[0] <= most, itemsize=4)
        return AudioSamples(samples=np.frombuffer(samples, np.float32), rate=opened.rate)

    def clip(
        self, data: bytes, choose: Callable[[VideoHeader], Sequence[int]], limits: VideoLimits, heard: Heard
    ) -> VideoFrames:
        job = wire.ClipJob(
            max_s=limits.max_s,
            max_frames=limits.max_frames,
            max_pixels=limits.max_pixels,
            limit_s=self._limit(),
        )
        return self._clip(job, [data], choose, limits, heard)

    def frames(self, pictures: Sequence[bytes], fps: float, limits: VideoLimits, heard: Heard) -> VideoFrames:
        job = wire.FramesJob(
            sizes=tuple(map(len, pictures)),
            fps=fps,
            max_frames=limits.max_frames,
            max_pixels=limits.max_pixels,
            formats=limits.image_formats,
            limit_s=self._limit(),
        )
        return self._clip(job, pictures, lambda source: range(source.total), limits, heard)

    def _clip(
        self,
        job: wire.ClipJob | wire.FramesJob,
        parts: Sequence[bytes],
        choose: Callable[[VideoHeader], Sequence[int]],
        limits: VideoLimits,
        heard: Heard,
    ) -> VideoFrames:
        asked = self._begin(job, parts)
        said = _opened(asked)
        if said.width * said.height <= 0 or said.total < 1 or said.fps <= 0:
            raise _lies(asked)
        source = VideoHeader(total=said.total, fps=said.fps, width=said.width, height=said.height)
        indices: list[int] = []
        _hear(asked, lambda: indices.extend(chosen(source, choose, limits, heard)), indices)
        one = source.width * source.height

        def fits(s: tuple[int, ...]) -> bool:
            return len(s) == 4 and s[0] == len(indices) and s[1] * s[2] == one and s[3] == 3

        shape, pixels = _result(asked, fits)
        taken = np.frombuffer(pixels, np.uint8).reshape(shape)
        return VideoFrames(frames=taken, indices=tuple(indices), source=source)

    def _limit(self) -> float:
        return max(min(self._limit_s, self._end_s - time.monotonic()), 0.01)

    def _begin(self, job: wire.Job, parts: Sequence[bytes]) -> AssignedJob:
        return self._process.begin(job, parts, end_s=self._end_s, limit_s=self._limit_s, wanted=self._wanted)


def _opened(asked: AssignedJob) -> wire.MediumOpened:
    message, fd = asked.answer()
    if fd is not None:
        os.close(fd)
    if not isinstance(message, wire.MediumOpened):
        raise _lies(asked)
    return message


def _hear(asked: AssignedJob, hear: Callable[[], None], indices: Sequence[int] = ()) -> None:
    """Let it decode, unless `hear` objects."""
    going = False
    try:
        hear()
        going = True
    finally:
        asked.tell(wire.DecodeGo(tuple(indices)) if going else wire.DecodeStop())


def _result(
    asked: AssignedJob, fits: Callable[[tuple[int, ...]], bool], *, itemsize: int = 1
) -> tuple[tuple[int, ...], mmap.mmap]:
    message, fd = asked.answer()
    if fd is None:
        raise _lies(asked)
    if (
        not isinstance(message, wire.MediumDecoded)
        or min(message.shape, default=0) < 1
        or not fits(message.shape)
    ):
        os.close(fd)
        raise _lies(asked)
    try:
        return message.shape, wire.sealed(fd, math.prod(message.shape) * itemsize)
    except (OSError, ValueError):
        raise _lies(asked) from None


def _lies(asked: AssignedJob) -> MediaError:
    asked.kill()
    return MediaError("its decoder gave nonsense", reason="crashed")
