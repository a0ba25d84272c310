"""What turns a stranger's bytes into pixels and samples: the seam between readers and the jail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from PIL import Image

from cornplug.encoder_service.media import audio as sounds
from cornplug.encoder_service.media import image as media
from cornplug.encoder_service.media import video as clips
from cornplug.encoder_service.media.audio import AudioSamples
from cornplug.encoder_service.media.image import COMMON
from cornplug.encoder_service.media.video import VideoFrames, VideoHeader, VideoLimits

_RGB_BYTES: Final = 3 + 4
"""A pixel as it comes from the decoder, and as Pillow has it."""
_FRAME_BYTES: Final = 3
_SAMPLE_BYTES: Final = 4 + 4
"""At its own rate, and at the model's."""
_SAMPLE_WORK: Final = 1.0
"""A sample costs about as much as a pixel: both are some bytes through a codec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediumHeader:
    """What a medium will be once decoded."""

    held_bytes: int
    """Of the pixels or samples that are wanted of it."""
    work: float
    """Pixels (of every frame up to the last that is wanted) or samples that a decoder has to make."""
    pixels: int = 0
    """Of all that is wanted of it."""
    seconds: float = 0.0

    @classmethod
    def of_picture(cls, width: int, height: int) -> MediumHeader:
        pixels = width * height
        return cls(held_bytes=_RGB_BYTES * pixels, work=pixels, pixels=pixels)

    @classmethod
    def of_clip(cls, source: VideoHeader, indices: Sequence[int]) -> MediumHeader:
        frame = source.width * source.height
        pixels = len(indices) * frame
        made = (max(indices, default=-1) + 1) * frame
        return cls(held_bytes=_FRAME_BYTES * pixels, work=made, pixels=pixels, seconds=source.duration_s)

    @classmethod
    def of_sound(cls, seconds: float, rate: int) -> MediumHeader:
        samples = round(seconds * rate)
        return cls(held_bytes=_SAMPLE_BYTES * samples, work=_SAMPLE_WORK * samples, seconds=seconds)


Heard = Callable[[MediumHeader], None]
"""Hears a header before anything is decoded; what it raises ends the decoding."""


class MediumDecoder(Protocol):
    """Raises MediaError as `media`, `sounds` and `clips` do, and what `heard` raises."""

    def picture(
        self, data: bytes, max_pixels: int, heard: Heard, formats: Sequence[str] = COMMON
    ) -> Image.Image:
        """RGB, as the rule of `media` has it."""

    def picture_for_sglang(
        self, data: bytes, max_pixels: int, heard: Heard, formats: Sequence[str] = COMMON
    ) -> Image.Image:
        """RGB, as SGLang receives it."""

    def sound(self, data: bytes, max_s: float, heard: Heard) -> AudioSamples: ...

    def clip(
        self, data: bytes, choose: Callable[[VideoHeader], Sequence[int]], limits: VideoLimits, heard: Heard
    ) -> VideoFrames: ...

    def frames(self, pictures: Sequence[bytes], fps: float, limits: VideoLimits, heard: Heard) -> VideoFrames:
        """A video given as its images."""


class InProcessDecoder:
    """Decodes right here: for media that are no stranger's."""

    def picture(
        self, data: bytes, max_pixels: int, heard: Heard, formats: Sequence[str] = COMMON
    ) -> Image.Image:
        before = _picture(heard)
        return media.as_received(media.decode(data, max_pixels, before=before, formats=formats))

    def picture_for_sglang(
        self, data: bytes, max_pixels: int, heard: Heard, formats: Sequence[str] = COMMON
    ) -> Image.Image:
        return media.as_sglang_receives(data, max_pixels, before=_picture(heard), formats=formats)

    def sound(self, data: bytes, max_s: float, heard: Heard) -> AudioSamples:
        return sounds.decode(data, max_s=max_s, before=lambda s, rate: heard(MediumHeader.of_sound(s, rate)))

    def clip(
        self, data: bytes, choose: Callable[[VideoHeader], Sequence[int]], limits: VideoLimits, heard: Heard
    ) -> VideoFrames:
        return clips.decode(data, lambda source: chosen(source, choose, limits, heard), limits)

    def frames(self, pictures: Sequence[bytes], fps: float, limits: VideoLimits, heard: Heard) -> VideoFrames:
        def before(source: VideoHeader) -> None:
            heard(MediumHeader.of_clip(source, range(source.total)))

        return clips.decode_frames(pictures, fps, limits, before=before)


def chosen(
    source: VideoHeader, choose: Callable[[VideoHeader], Sequence[int]], limits: VideoLimits, heard: Heard
) -> tuple[int, ...]:
    """The frames that are wanted, rising, once `heard` has been told of them.

    Raises MediaError("unprocessable", "too_many_frames", "too_many_pixels"), and as `choose` and `heard`.
    """
    indices = clips.sampled(source, choose(source), limits)
    heard(MediumHeader.of_clip(source, indices))
    return indices


def _picture(heard: Heard) -> media.Before:
    return lambda width, height: heard(MediumHeader.of_picture(width, height))


def anything(header: MediumHeader) -> None:
    """Objects to nothing."""
