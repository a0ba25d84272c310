"""Guesses the cost of decoding a medium before its header is read, so that it can be queued.

An image's first bytes give its number of pixels; other media are guessed by their length, and
`Batcher.raise_cost` corrects it once the header is read. The guess decides only the order in the queue.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Final

from PIL import Image

from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.media.image import BROKEN
from cornplug.encoder_service.preprocess.decode_lanes import work_of
from cornplug.encoder_service.preprocess.sandbox.decoders import MediumHeader

_FORMATS: Final = ("BMP", "GIF", "JPEG", "PNG")
"""Formats whose header Pillow reads in Python and within the first bytes: no decoder runs."""
_HEAD_BYTES: Final = 64 << 10
_WORK_A_BYTE: Final[Mapping[Modality, float]] = {"image": 8.0, "video": 50.0, "audio": 3.0}
"""Pixels or samples a byte of a usual file."""


def guessed_cost(modality: Modality, parts: Sequence[bytes]) -> int:
    """Cost in the units of `DecodeLanes.submit`; `parts` are the medium, or a video's images."""
    pixels = _pixels(parts[0]) if modality == "image" and parts else None
    work = _WORK_A_BYTE[modality] * sum(map(len, parts)) if pixels is None else float(pixels)
    return work_of(MediumHeader(held_bytes=0, work=work))


def _pixels(data: bytes) -> int | None:
    try:
        with Image.open(io.BytesIO(data[:_HEAD_BYTES]), formats=_FORMATS) as image:
            return image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None
    except BROKEN:
        return None
