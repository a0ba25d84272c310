"""Decodes video files to sampled RGB frames with their times, and computes the digest of both.

The rules are the same as in vLLM 0.32 (vllm/multimodal/video.py and video_decoders/opencv.py), so that
engines and the service compute the same digest for a video:

1. The first video stream is used. Frames are numbered in display order. A frame's time is its number divided
   by the stream's frame rate. Time stamps in the file are ignored.
2. The model (`preprocess.prepared_media`) and the request determine which frames are sampled.
3. Pixels are converted in the same way as by OpenCV with FFmpeg, and rotated upright as the file's metadata
   specifies.

The digest covers the sampled frames and their times, not the sampling options.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cornplug.encoder_service.formats import image
from cornplug.encoder_service.formats.audio import (
    DECODE_ERRORS,
    announced_duration_s,
    iter_frames,
    open_container,
)
from cornplug.encoder_service.formats.messages import DEFAULT_DECODING, Decoding
from cornplug.errors import MediaError
from cornplug.identity import frames_digest

Frames = npt.NDArray[np.uint8]
MAX_FRAMES: Final = 768
"""Maximum number of frames that are sampled from a video."""
_MAX_MISSING_FRACTION: Final = 0.02
"""Fraction of the announced frames that may be missing. If more are missing, the file counts as truncated."""
_MAX_FPS: Final = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoHeader:
    """Properties of a video before decoding."""

    total: int
    """Number of frames in the video stream."""
    fps: float
    width: int
    height: int

    @property
    def duration_s(self) -> float:
        return self.total / self.fps


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VideoFrames:
    """Sampled frames of one video."""

    frames: Frames
    """RGB frames of shape (sampled, height, width, 3)."""
    indices: tuple[int, ...]
    """Numbers of the sampled frames, ascending. The first frame of the video has number 0."""
    header: VideoHeader

    @property
    def times_s(self) -> list[float]:
        """Times of the sampled frames in seconds from the start of the video."""
        return [index / self.header.fps for index in self.indices]

    def digest(self) -> bytes:
        """Return the media digest (32 bytes) of the frames and their times."""
        height, width = self.frames.shape[1:3]
        return frames_digest(width, height, self.times_s, (frame.tobytes() for frame in self.frames))


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLimits:
    """Limits of one video."""

    max_s: float = 600.0
    max_frames: int = MAX_FRAMES
    max_pixels: int = 64_000_000
    """Maximum number of pixels per frame. All sampled frames together may have four times as many."""


def decode(data: bytes, choose: Callable[[VideoHeader], Sequence[int]], limits: VideoLimits) -> VideoFrames:
    """Decode the frames whose numbers `choose` returns. Duration and size are checked before decoding.

    Raises MediaError: "empty", "unknown_format", "no_video", "too_long", "too_many_pixels",
    "too_many_frames", "too_slow", or "damaged" (truncated or inconsistent). Also raises the errors of
    `choose`.
    """
    source = _read_header(data, limits)
    indices = check_chosen_frames(source, choose(source), limits)
    wanted, taken = frozenset(indices), []
    with open_container(data, "video", max_pixels=str(limits.max_pixels)) as container:
        for index, frame in enumerate(iter_frames(container, container.streams.video[0], "video")):
            if index in wanted:
                taken.append(_to_rgb(frame, source))
            if index == indices[-1]:
                break
    if len(taken) < len(indices):
        raise MediaError(f"the video ends after {len(taken)} of {len(indices)} frames", reason="damaged")
    return VideoFrames(frames=np.stack(taken), indices=indices, header=source)


def _accept_any_header(source: VideoHeader) -> None:
    pass


def decode_frames(
    images: Sequence[bytes],
    fps: float,
    limits: VideoLimits,
    *,
    decoding: Decoding = DEFAULT_DECODING,
    before: Callable[[VideoHeader], None] = _accept_any_header,
) -> VideoFrames:
    """Decode all frames of a video that was sent as images of one size, at `fps` frames per second.

    `before` is called with the header before decoding. An exception stops the decoding.

    Raises the same MediaErrors as `image.decode`, and "too_many_frames", "too_many_pixels" and "frame_size".
    """
    if not images:
        raise MediaError("the video has no frames", reason="empty")
    if not 0 < fps <= _MAX_FPS:
        raise MediaError(f"fps: must be above 0 and at most {_MAX_FPS:g}, not {fps}", reason="frame_rate")
    taken: list[Frames] = []

    def first(width: int, height: int) -> None:
        check_frame_limits(len(images), width, height, limits)
        before(VideoHeader(total=len(images), fps=fps, width=width, height=height))

    for encoded in images:
        before_frame: image.BeforeDecode = image.accept_any_size if taken else first
        decoded = image.decode(encoded, limits.max_pixels, before=before_frame)
        frame = image.to_engine_rgb(decoded, decoding)
        if taken and frame.size != (taken[0].shape[1], taken[0].shape[0]):
            raise MediaError(f"frame {len(taken)} differs in size from the first frame", reason="frame_size")
        taken.append(np.asarray(frame))
    height, width = taken[0].shape[:2]
    source = VideoHeader(total=len(taken), fps=fps, width=width, height=height)
    return VideoFrames(frames=np.stack(taken), indices=tuple(range(len(taken))), header=source)


def check_chosen_frames(header: VideoHeader, chosen: Sequence[int], limits: VideoLimits) -> tuple[int, ...]:
    """Return the chosen frame numbers, ascending and without duplicates.

    Raises MediaError("unprocessable") if no frame is chosen or a number is out of range, and the same errors
    as `check_frame_limits`.
    """
    indices = tuple(sorted({int(index) for index in chosen}))
    if not indices:
        raise MediaError("no frame of this video was selected", reason="unprocessable")
    if indices[0] < 0 or indices[-1] >= header.total:
        raise MediaError(
            f"the selected frames {indices[0]} to {indices[-1]} are out of range: the video has "
            f"{header.total} frames",
            reason="unprocessable",
        )
    check_frame_limits(len(indices), header.width, header.height, limits)
    return indices


def _read_header(data: bytes, limits: VideoLimits) -> VideoHeader:
    """Return the video's properties from the header. The number of frames is checked against the packets."""
    with open_container(data, "video", max_pixels=str(limits.max_pixels)) as container:
        if not container.streams.video or container.streams.video[0].codec_context is None:
            raise MediaError("the file has no video stream of a known codec", reason="no_video")
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > limits.max_pixels:
            raise MediaError(
                f"{width} x {height} pixels exceed the limit of {limits.max_pixels}",
                reason="too_many_pixels",
            )
        fps = float(stream.guessed_rate or stream.average_rate or 0)
        if min(width, height) <= 0 or not 0 < fps <= _MAX_FPS:
            raise MediaError(f"the video has {width} x {height} pixels at {fps} fps", reason="damaged")
        announced_s = announced_duration_s(container, stream)
        if announced_s is not None and announced_s > limits.max_s:
            raise MediaError(
                f"{announced_s:.0f} s of video exceed the limit of {limits.max_s:g} s", reason="too_long"
            )
        # As in OpenCV, use the frame count in the header. If it has none, use duration times frame rate.
        announced = stream.frames or (int(announced_s * fps + 0.5) if announced_s else 0)
        present = _count_frames(container, stream)
    if present < announced * (1 - _MAX_MISSING_FRACTION) - 1:
        raise MediaError(f"the video is truncated: {present} of {announced} frames", reason="damaged")
    total = min(announced or present, present)
    if total < 1:
        raise MediaError("the video has no frames", reason="empty")
    if total / fps > limits.max_s:
        raise MediaError(f"more than {limits.max_s:g} s of video", reason="too_long")
    return VideoHeader(total=total, fps=fps, width=width, height=height)


def _count_frames(container: Any, stream: Any) -> int:
    """Return the number of frames in the file, counted without decoding."""
    try:
        return sum(1 for packet in container.demux(stream) if packet.size and not packet.is_discard)
    except DECODE_ERRORS as e:
        raise MediaError(f"the video is damaged: {e}", reason="damaged") from e


def check_frame_limits(count: int, width: int, height: int, limits: VideoLimits) -> None:
    """Check that `count` frames of this size do not exceed the limits.

    Raises MediaError("too_many_frames", "too_many_pixels").
    """
    if count > limits.max_frames:
        raise MediaError(f"{count} frames exceed the limit of {limits.max_frames}", reason="too_many_frames")
    if count * width * height > 4 * limits.max_pixels:
        raise MediaError(
            f"{count} frames of {width} x {height} pixels exceed the limit of {4 * limits.max_pixels}; "
            "sample fewer frames",
            reason="too_many_pixels",
        )


def _to_rgb(frame: Any, header: VideoHeader) -> Frames:
    """Return one decoded frame, upright, of shape (height, width, 3)."""
    if (frame.width, frame.height) != (header.width, header.height):
        raise MediaError("the video changes its size within the stream", reason="damaged")
    try:
        bgr: Frames = frame.reformat(format="bgr24", interpolation="BICUBIC").to_ndarray()
    except DECODE_ERRORS as e:
        raise MediaError(f"the video's pixels cannot be read: {e}", reason="damaged") from e
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(bgr[:, :, ::-1], turns))
