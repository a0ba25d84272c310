"""Interface between preprocessors and the sandbox that decodes untrusted bytes, and a decoder without a
sandbox."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from cornplug.encoder_service.media import audio, image, video
from cornplug.encoder_service.media.audio import AudioSamples
from cornplug.encoder_service.media.image import RgbPixels
from cornplug.encoder_service.media.video import VideoFrames, VideoHeader, VideoLimits
from cornplug.encoder_service.wire.messages import DEFAULT_DECODING, Decoding

_RGB_BYTES: Final = 3 + 4
"""Bytes per pixel in the decoder's output, plus bytes per pixel in Pillow's memory."""
_FRAME_BYTES: Final = 3
_SAMPLE_BYTES: Final = 4 + 4
"""Bytes per sample at the original rate, plus bytes per sample at the model's rate."""
_SAMPLE_WORK: Final = 1.0
"""Work to decode one sample, in pixels. A codec uses a few bytes for a sample as well as for a pixel."""


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
    """Decoder of media. Methods raise the same MediaErrors as `media.image`, `media.audio` and `media.video`,
    and the errors of `on_header`."""

    def decode_image(
        self,
        data: bytes,
        max_pixels: int,
        on_header: OnHeader,
        *,
        decoding: Decoding = DEFAULT_DECODING,
    ) -> RgbPixels:
        """Return the pixels of an image, decoded by one of `media.image`'s rules."""

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


def _image_callback(on_header: OnHeader) -> image.BeforeDecode:
    return lambda width, height: on_header(MediaHeader.for_image(width, height))


def accept_any_header(header: MediaHeader) -> None:
    """Accept every header."""
