"""Image preprocessing: decoding by an engine's rule (`media.image`), and the checkpoint's image processor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import torch
from PIL import Image
from transformers import AutoImageProcessor

from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.preprocess.preprocessor import (
    DecodedMedium,
    FrameSampling,
    Inputs,
    MediumForm,
    MediumLimits,
    PreprocessContext,
    grid_of,
)
from cornplug.encoder_service.preprocess.sandbox.decoders import MediumHeader
from cornplug.encoder_service.preprocess.whole_processor import WholeProcessor, check_encodes
from cornplug.encoder_service.wire.decodings import Decoding
from cornplug.errors import CheckpointError, MediaError

_SIDES: Final = (64, 1024)
"""Sides in pixels of two square test images. They show how large a processor's outputs are for small and
large images.
"""
_MOST_A_PIXEL: Final = 24
"""Maximum bytes of inputs per pixel. Families that do not resize need this many: three float32 values, stored
twice, as two frames."""
_SHAPES: Final = 4096
"""Maximum number of shapes whose grid is cached."""
_PIXELS_NOT_SIDES: Final = 100_000
"""A "longest_edge" above this value is a number of pixels, as in the Qwen families, instead of a side."""


class ImagePreprocessor:
    """Image preprocessor of one model.

    Raises CheckpointError("bad_config") if the checkpoint has no image processor that loads.
    """

    def __init__(self, loaded: LoadedModel, limits: MediumLimits) -> None:
        self._max_pixels = limits.max_pixels
        self._probes: tuple[int, int] | None = None
        self._asked = loaded.checkpoint.family.processor_defaults.get("image", {})
        self._wanted = loaded.checkpoint.family.inputs["image"]
        self._grid = lru_cache(_SHAPES)(self._grid_of)
        self._processor: Any = _processor(loaded)
        if isinstance(self._processor, WholeProcessor):
            self._wanted = self._processor.names
            check_encodes(loaded, self._processor)

    def decode(
        self,
        parts: Sequence[bytes],
        form: MediumForm,
        sampling: FrameSampling,
        decoding: Decoding,
        context: PreprocessContext,
    ) -> DecodedMedium:
        on_header = context.on_header(self._prepared_bytes)
        pixels = context.decoder.image(parts[0], self._max_pixels, on_header, decoding=decoding)
        return DecodedMedium(
            digest=pixels.digest(),
            shape=(pixels.height, pixels.width),
            preprocess=lambda: self._preprocess(pixels.image()),
        )

    def decode_spec(self, form: MediumForm, sampling: FrameSampling, decoding: Decoding) -> Mapping[str, Any]:
        rule = {"modality": "image", "form": form, "mode": "RGB", "rule": decoding}
        return {**rule, "max_pixels": self._max_pixels}

    def shape_inputs(self, shape: tuple[int, ...]) -> Inputs | None:
        return self._grid(shape)

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
            return sum(t.nbytes for t in self._preprocess(image).values())
        except MediaError:
            return _MOST_A_PIXEL * image.width * image.height

    def _grid_of(self, shape: tuple[int, ...]) -> Inputs | None:
        if "image_grid_thw" not in self._wanted:
            return {}
        nothing = torch.empty((3, *shape), dtype=torch.uint8, device="meta")
        return grid_of(self._processor, images=nothing, **self._asked)

    def _preprocess(self, image: Image.Image) -> Inputs:
        try:
            made = self._processor(images=image, return_tensors="pt", **self._asked)
        except ValueError as e:
            # Processors reject some shapes, for example an aspect ratio above 200 to 1.
            raise MediaError(f"the model's processor rejected this image: {e}", reason="unprocessable") from e
        return dict(made)


def _processor(loaded: LoadedModel) -> Any:
    checkpoint = loaded.checkpoint
    if checkpoint.family.generic:
        return WholeProcessor(loaded, "image")
    try:
        return AutoImageProcessor.from_pretrained(
            checkpoint.path, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError) as e:
        raise CheckpointError(
            f"{checkpoint.path}: the image processor does not load: {e}", reason="bad_config"
        ) from e


def _most_pixels(processor: Any) -> int | None:
    """Return the maximum number of pixels of an image after resizing, or None if the processor's settings do
    not limit it.
    """
    size: Any = getattr(processor, "size", None) or {}
    longest = size.get("longest_edge")
    return longest if isinstance(longest, int) and longest > _PIXELS_NOT_SIDES else None
