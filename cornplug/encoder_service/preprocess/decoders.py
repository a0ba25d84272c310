"""Interface between preprocessors and the sandbox that decodes untrusted bytes, and a decoder without a
sandbox.

Service and decoding process exchange msgpack messages on a SOCK_SEQPACKET pair, and media in memfds:

    ImageJob, AudioJob, VideoJob, FramesJob + a memfd of the bytes ──>
                         <── DecodeHeader: the header
    DecodeGo, or DecodeStop ──>
                         <── DecodeDone + a memfd of the result,  or DecodeFailed, at any time

The service seals the memfd of a result. The decoding process can then neither change nor shorten bytes that
the service has checked.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from cornplug.encoder_service.formats import audio, image, video
from cornplug.encoder_service.formats.audio import AudioSamples
from cornplug.encoder_service.formats.image import RgbPixels
from cornplug.encoder_service.formats.messages import DEFAULT_DECODING, Decoding
from cornplug.encoder_service.formats.video import VideoFrames, VideoHeader, VideoLimits

_RGB_BYTES: Final = 3 + 4
"""Bytes per pixel in the decoder's output, plus bytes per pixel in Pillow's memory."""
_FRAME_BYTES: Final = 3
_SAMPLE_BYTES: Final = 4 + 4
"""Bytes per sample at the original rate, plus bytes per sample at the model's rate."""
_SAMPLE_WORK: Final = 1.0
"""Work to decode one sample, in pixels. A codec uses a few bytes for a sample as well as for a pixel."""
MAX_MESSAGE_BYTES: Final = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaHeader:
    """Size of a decoded media item, computed from its header."""

    decoded_bytes: int
    """Bytes of memory for the decoded pixels or samples that are used."""
    work: float
    """Number of pixels or samples that must be decoded. For a video, all frames up to the last sampled frame
    are counted."""
    pixels: int = 0
    """Number of pixels of all sampled frames."""
    seconds: float = 0.0

    @classmethod
    def for_image(cls, width: int, height: int) -> MediaHeader:
        pixels = width * height
        return cls(decoded_bytes=_RGB_BYTES * pixels, work=pixels, pixels=pixels)

    @classmethod
    def for_video(cls, source: VideoHeader, indices: Sequence[int]) -> MediaHeader:
        frame = source.width * source.height
        pixels = len(indices) * frame
        made = (max(indices, default=-1) + 1) * frame
        return cls(decoded_bytes=_FRAME_BYTES * pixels, work=made, pixels=pixels, seconds=source.duration_s)

    @classmethod
    def for_audio(cls, seconds: float, rate: int) -> MediaHeader:
        samples = round(seconds * rate)
        return cls(decoded_bytes=_SAMPLE_BYTES * samples, work=_SAMPLE_WORK * samples, seconds=seconds)


OnHeader = Callable[[MediaHeader], None]
"""Function that is called with the header before decoding. An exception stops the decoding."""


class MediaDecoder(Protocol):
    """Decoder of media. Methods raise the same MediaErrors as `formats.image`, `formats.audio` and
    `formats.video`, and the errors of `on_header`."""

    def decode_image(
        self,
        data: bytes,
        max_pixels: int,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> RgbPixels:
        """Return the pixels of an image, decoded by one of `formats.image`'s rules."""

    def decode_audio(self, data: bytes, max_s: float, on_header: OnHeader) -> AudioSamples: ...

    def decode_video(
        self,
        data: bytes,
        choose: Callable[[VideoHeader], Sequence[int]],
        limits: VideoLimits,
        on_header: OnHeader,
    ) -> VideoFrames: ...

    def decode_frames(
        self,
        images: Sequence[bytes],
        fps: float,
        limits: VideoLimits,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> VideoFrames:
        """Return the frames of a video that was sent as images."""


class InProcessDecoder:
    """Decoder in this process, for trusted media."""

    def decode_image(
        self,
        data: bytes,
        max_pixels: int,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> RgbPixels:
        before = _image_callback(on_header)
        decoded = image.decode(data, max_pixels, before=before)
        return RgbPixels.from_image(image.to_engine_rgb(decoded, decoding))

    def decode_audio(self, data: bytes, max_s: float, on_header: OnHeader) -> AudioSamples:
        return audio.decode(
            data, max_s=max_s, before=lambda s, rate: on_header(MediaHeader.for_audio(s, rate))
        )

    def decode_video(
        self,
        data: bytes,
        choose: Callable[[VideoHeader], Sequence[int]],
        limits: VideoLimits,
        on_header: OnHeader,
    ) -> VideoFrames:
        return video.decode(data, lambda source: choose_frames(source, choose, limits, on_header), limits)

    def decode_frames(
        self,
        images: Sequence[bytes],
        fps: float,
        limits: VideoLimits,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> VideoFrames:
        def before(source: VideoHeader) -> None:
            on_header(MediaHeader.for_video(source, range(source.total)))

        return video.decode_frames(images, fps, limits, decoding=decoding, before=before)


def choose_frames(
    header: VideoHeader,
    choose: Callable[[VideoHeader], Sequence[int]],
    limits: VideoLimits,
    on_header: OnHeader,
) -> tuple[int, ...]:
    """Return the numbers of the sampled frames, ascending. Calls `on_header` with the resulting size first.

    Raises MediaError("unprocessable"), ("too_many_frames") or ("too_many_pixels"), and the errors of both
    functions.
    """
    indices = video.check_chosen_frames(header, choose(header), limits)
    on_header(MediaHeader.for_video(header, indices))
    return indices


def accept_any_header(header: MediaHeader) -> None:
    """Accept every header."""


class ImageJob(msgspec.Struct, frozen=True, tag="image"):
    max_pixels: int
    decoding: Decoding
    limit_s: float


class AudioJob(msgspec.Struct, frozen=True, tag="audio"):
    max_s: float
    limit_s: float


class VideoJob(msgspec.Struct, frozen=True, tag="video"):
    max_s: float
    max_frames: int
    max_pixels: int
    limit_s: float


class FramesJob(msgspec.Struct, frozen=True, tag="frames"):
    """Job to decode a video that was sent as images. The memfd contains the images, one after another."""

    sizes: tuple[int, ...]
    fps: float
    max_frames: int
    max_pixels: int
    decoding: Decoding
    limit_s: float


class DecodeGo(msgspec.Struct, frozen=True, tag="go"):
    """Request to decode the media item. For a video file, only the frames with these numbers."""

    indices: tuple[int, ...] = ()


class DecodeStop(msgspec.Struct, frozen=True, tag="stop"):
    """Request to end the job without decoding the media item."""


class DecoderReady(msgspec.Struct, frozen=True, tag="ready"):
    """Report that the process has started. `bars` are the active restrictions (`jail.RESTRICTIONS`)."""

    bars: tuple[str, ...]


class DecodeHeader(msgspec.Struct, frozen=True, tag="opened"):
    """Report of the media item's header. Fields that do not apply to the modality are 0."""

    width: int = 0
    height: int = 0
    total: int = 0
    """Number of frames in the video file."""
    fps: float = 0.0
    seconds: float = 0.0
    rate: int = 0


class DecodeDone(msgspec.Struct, frozen=True, tag="decoded"):
    """Report that the media item was decoded. The shape is (height, width, 3), (frames, height, width, 3) or
    (samples,)."""

    shape: tuple[int, ...]


class DecodeFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Report that decoding failed, with the reason and message of the MediaError."""

    reason: str
    message: str


Job = ImageJob | AudioJob | VideoJob | FramesJob


ToDecoder = Job | DecodeGo | DecodeStop


FromDecoder = DecoderReady | DecodeHeader | DecodeDone | DecodeFailed


def send(sock: socket.socket, message: ToDecoder | FromDecoder, fd: int | None = None) -> None:
    """Send a message. Raises OSError if the other side has disconnected."""
    body = msgspec.msgpack.encode(message)
    socket.send_fds(sock, [body], [] if fd is None else [fd])


def receive(sock: socket.socket, kind: Any) -> tuple[Any, int | None]:
    """Return (next message, its descriptor or None). The caller must close the descriptor.

    Raises ConnectionResetError if the other side has disconnected, and TimeoutError after the socket's
    timeout.
    """
    body, fds, _, _ = socket.recv_fds(sock, MAX_MESSAGE_BYTES, 1)
    fd = fds[0] if fds else None
    if not body:
        raise ConnectionResetError("the other side has ended")
    try:
        return msgspec.msgpack.decode(body, type=kind), fd
    except (msgspec.DecodeError, msgspec.ValidationError):
        if fd is not None:
            os.close(fd)
        raise


def _image_callback(on_header: OnHeader) -> image.BeforeDecode:
    return lambda width, height: on_header(MediaHeader.for_image(width, height))
