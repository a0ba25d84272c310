"""Images: decoded by vLLM's rule (`media.image`), through the checkpoint's image processor."""

from __future__ import annotations

from typing import Any, Final

from PIL import Image
from transformers import AutoImageProcessor

from cornplug.encoder_service.media.image import digest_rgb
from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.preprocess.preprocessor import (
    IN_PROCESS,
    FrameSampling,
    MediumLimits,
    PreprocessContext,
    PreprocessorOutput,
)
from cornplug.encoder_service.preprocess.sandbox.decoders import MediumHeader
from cornplug.errors import CheckpointError, MediaError

_SIDES: Final = (64, 1024)
"""Of the images that show how large a processor's outputs are, for small and for large images."""
_MOST_A_PIXEL: Final = 24
"""Bytes of inputs a pixel, of families that resize nothing: float32, and each frame twice."""
_PIXELS_NOT_SIDES: Final = 100_000
"""A "longest_edge" above this is a number of pixels, as in the Qwen families."""


class ImagePreprocessor:
    """Preprocesses images for one model. Raises CheckpointError("bad_config") without an image processor."""

    def __init__(self, loaded: LoadedModel, limits: MediumLimits) -> None:
        path = loaded.checkpoint.path
        self._max_pixels = limits.max_pixels
        self._probes: tuple[int, int] | None = None
        self._formats = limits.image_formats
        self._asked = loaded.checkpoint.family.processor_defaults.get("image", {})
        try:
            self._processor: Any = AutoImageProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, ImportError) as e:
            raise CheckpointError(f"{path}: no image processor: {e}", reason="bad_config") from e

    def read(
        self, data: bytes, sampling: FrameSampling, context: PreprocessContext = IN_PROCESS
    ) -> PreprocessorOutput:
        on_header = context.on_header(self._prepared_bytes)
        return self._preprocess(context.decoder.image(data, self._max_pixels, on_header, self._formats))

    def read_for_sglang(self, data: bytes, context: PreprocessContext = IN_PROCESS) -> PreprocessorOutput:
        """`read`, with the pixels that an SGLang server would receive."""
        on_header = context.on_header(self._prepared_bytes)
        return self._preprocess(
            context.decoder.image_for_sglang(data, self._max_pixels, on_header, self._formats)
        )

    def _prepared_bytes(self, header: MediumHeader) -> int:
        small, large = self._probed()
        most = _most_pixels(self._processor)
        pixels = header.pixels if most is None else min(header.pixels, most)
        return small if small == large else max(small, large * max(pixels, _SIDES[1] ** 2) // _SIDES[1] ** 2)

    def _probed(self) -> tuple[int, int]:
        if self._probes is None:
            small, large = (self._bytes_of(Image.new("RGB", (side, side))) for side in _SIDES)
            self._probes = small, large
        return self._probes

    def _bytes_of(self, image: Image.Image) -> int:
        try:
            return sum(t.nbytes for t in self._preprocess(image).inputs.values())
        except MediaError:
            return _MOST_A_PIXEL * image.width * image.height

    def _preprocess(self, image: Image.Image) -> PreprocessorOutput:
        try:
            made = self._processor(images=image, return_tensors="pt", **self._asked)
        except ValueError as e:
            # So processors refuse some shapes, e.g. an aspect ratio of over 200 to 1.
            raise MediaError(f"the model's processor refuses this image: {e}", reason="unprocessable") from e
        return PreprocessorOutput(digest=digest_rgb(image), inputs=dict(made))


def _most_pixels(processor: Any) -> int | None:
    """Most pixels of an image after resizing, where the processor's settings say so."""
    size: Any = getattr(processor, "size", None) or {}
    longest = size.get("longest_edge")
    return longest if isinstance(longest, int) and longest > _PIXELS_NOT_SIDES else None
