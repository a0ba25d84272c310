"""Common interface of the preprocessors for all modalities. From an item's bytes, they compute its digest and
tower inputs, in the same way as the model's engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import torch

from cornplug.config import EncoderConfig
from cornplug.encoder_service.formats.messages import Decoding
from cornplug.encoder_service.formats.video import MAX_FRAMES, VideoLimits
from cornplug.encoder_service.preprocess.decoders import (
    InProcessDecoder,
    MediaDecoder,
    MediaHeader,
    OnHeader,
)
from cornplug.errors import EncoderRefused

Inputs = Mapping[str, torch.Tensor]
"""Inputs of a tower, by the names that the processor uses."""
MediaForm = Literal["file", "images"]
"""Form in which a media item was sent: as a file, or (only a video) as images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaLimits:
    """Maximum sizes of accepted media after decoding."""

    max_pixels: int = 64_000_000
    max_media_s: float = 600.0
    max_frames: int = MAX_FRAMES

    @classmethod
    def from_config(cls, config: EncoderConfig) -> MediaLimits:
        return cls(max_pixels=config.max_pixels, max_media_s=config.max_media_s)

    def video_limits(self) -> VideoLimits:
        return VideoLimits(max_s=self.max_media_s, max_frames=self.max_frames, max_pixels=self.max_pixels)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSampling:
    """Frames of a video to use. The default is the frames that the model's engine uses.

    Raises EncoderRefused("bad_input") if both fields are set, or if a value is 0 or less.
    """

    fps: float | None = None
    num_frames: int | None = None

    def __post_init__(self) -> None:
        if self.fps is not None and self.num_frames is not None:
            raise EncoderRefused("fps, num_frames: set only one of them", reason="bad_input")
        if not (self.fps is None or 0 < self.fps < math.inf):
            raise EncoderRefused(f"fps: must be above 0, not {self.fps}", reason="bad_input")
        if self.num_frames is not None and self.num_frames < 1:
            raise EncoderRefused(f"num_frames: must be at least 1, not {self.num_frames}", reason="bad_input")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedMedia:
    """One decoded media item, before the model's processor runs."""

    digest: bytes
    """Media digest, 32 bytes."""
    shape: tuple[int, ...]
    """Shape of the item (see `preparer.DecodedFile`)."""
    preprocess: Callable[[], Inputs]
    """Function that runs the processor. Raises MediaError("unprocessable") if the processor does not accept
    the item."""


def _admit_any(header: MediaHeader, prepared_bytes: int) -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PreprocessContext:
    """Decoder to use, and a function that checks the header of each media item."""

    decoder: MediaDecoder
    admit: Callable[[MediaHeader, int], None] = _admit_any
    """Function that is called before decoding, with the header and the maximum bytes of the tower's inputs.
    An exception stops the preprocessing."""

    def header_callback(self, prepared_bytes: Callable[[MediaHeader], int]) -> OnHeader:
        """Return a function that calls `admit`, in the form that a decoder expects. `prepared_bytes` returns
        the maximum bytes of the tower's inputs for a header."""
        return lambda header: self.admit(header, prepared_bytes(header))


IN_PROCESS_CONTEXT: Final = PreprocessContext(decoder=InProcessDecoder())
"""Context for decoding in this process, for trusted media."""


class MediaPreprocessor(Protocol):
    """Preprocessor of one model and modality. Thread-safe. Does not run code from checkpoints."""

    def decode(
        self,
        contents: Sequence[bytes],
        form: MediaForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedia:
        """Decode a media item.

        `contents` has the bytes of one file, or of each image of a video. `sampling` applies to videos.
        `decoding` applies to images and to the images of a video. Raises the same MediaErrors as the
        modality's `decode`, and the errors of `context`.
        """

    def decode_spec(self, form: MediaForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        """Return everything that determines the result of `decode`, as JSON values, except the bytes and the
        decoders' versions."""

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        """Return the inputs that depend only on an item's shape: its patch grid, or {} if the model uses no
        grid.

        Returns None if the processor cannot compute the grid without the item.
        """


def grid_of(processor: Callable[..., Mapping[str, Any]], **medium: Any) -> Inputs | None:
    """Return the patch grid of an item on torch's device "meta", which has a shape but no content.

    The processor's own code computes the grid. The grid cannot depend on the content, because reading a value
    on "meta" raises an error. Returns None if the processor fails.
    """
    try:
        made = processor(**medium, return_tensors="pt")
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return None
    found = {name: made[name] for name in made if name.endswith("_grid_thw")}
    return found if all(t.device.type == "cpu" for t in found.values()) else None
