"""Decodes image files to the pixels that a processor receives, and computes the digest of the pixels.

The rules are the engines' rules, so that an engine and the service compute the same digest for an image. Only
the first frame of an animation is used, and colour profiles are ignored. The engines' rules differ in two
points:

| rule (`formats.messages.Decoding`) | EXIF orientation | images with transparency |
|---|---|---|
| `vllm-0.32` | applied | laid on white, unless the mode is "RGB" |
| `vllm-0.33` | applied | laid on white |
| `sglang-0.5.23` | ignored | the transparency is dropped |

Transparency is an alpha channel (RGBA, LA, PA), or a transparent colour of a palette, grey or RGB image. All
other images go through Pillow's `convert("RGB")`.

The digest covers the RGB pixels. Therefore a PNG, a lossless WebP and a BMP of the same image have the same
digest. An image that the caller has already converted by these rules also has this digest.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from cornplug.encoder_service.formats.messages import DEFAULT_DECODING, Decoding
from cornplug.errors import MediaError
from cornplug.identity import pixels_digest

DEFAULT_FORMATS: Final = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Accepted formats. Each additional format would need a decoder, which can have vulnerabilities."""

MAX_SCANS: Final = 100
"""Maximum number of scans in a JPEG. A progressive JPEG has about ten scans. Each scan requires a pass over
all pixels."""
MAX_SEGMENTS: Final = 4096
"""Maximum number of segments in a JPEG, including its scans."""

_ROTATED_ORIENTATIONS: Final = frozenset(range(2, 9))
"""EXIF orientations other than upright."""
_WHITE: Final = (255, 255, 255)
_MARKER: Final = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
"""Pattern of a JPEG marker. Inside a scan's data, 0xFF is followed by 0 or a restart marker's number."""
_START_OF_SCAN: Final = 0xDA
_END_OF_IMAGE: Final = 0xD9
_WITHOUT_LENGTH: Final = frozenset({0x01, *range(0xD0, 0xD9)})

BeforeDecode = Callable[[int, int], None]
"""Function that is called with the width and height before decoding. An exception stops the decoding."""

# Exceptions that Pillow's readers raise for corrupt files.
DECODE_ERRORS: Final = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    EOFError,
    OverflowError,
    NotImplementedError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True, eq=False)
class RgbPixels:
    """Decoded RGB image as raw bytes."""

    width: int
    height: int
    data: bytes | memoryview
    """Row-major pixels of three bytes."""

    @classmethod
    def from_image(cls, image: Image.Image) -> RgbPixels:
        """Copy the pixels of an image of mode "RGB"."""
        return cls(image.width, image.height, image.tobytes())

    def digest(self) -> bytes:
        """Return the media digest (32 bytes) of the pixels."""
        return pixels_digest("RGB", self.width, self.height, self.data)

    def to_image(self) -> Image.Image:
        """Return the image as a Pillow object."""
        flat = np.frombuffer(self.data, np.uint8)
        return Image.frombuffer("RGB", (self.width, self.height), flat, "raw", "RGB", 0, 1)


def accept_any_size(width: int, height: int) -> None:
    """Accept every image."""


def decode(
    data: bytes,
    max_pixels: int,
    *,
    before: BeforeDecode = accept_any_size,
    formats: Sequence[str] = DEFAULT_FORMATS,
) -> Image.Image:
    """Decode one image without converting it.

    The number of pixels is checked and `before` is called before decoding. For a decompression bomb, only the
    header is read.

    Raises MediaError: "empty" (no bytes), "unknown_format", "too_many_pixels", "too_many_scans", or "damaged"
    (truncated or inconsistent).
    """
    if not data:
        raise MediaError("the image has no bytes", reason="empty")
    check_scans(data)
    try:
        image = Image.open(io.BytesIO(data), formats=list(formats))
    except UnidentifiedImageError as e:
        raise MediaError(
            f"not an accepted image format ({len(data)} bytes); send one of {', '.join(formats)}",
            reason="unknown_format",
        ) from e
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise MediaError(str(e), reason="too_many_pixels") from e
    except DECODE_ERRORS as e:
        raise MediaError(f"the image's header is damaged: {e}", reason="damaged") from e
    width, height = image.size
    if width * height > max_pixels:
        raise MediaError(
            f"{width} x {height} pixels exceed the limit of {max_pixels}", reason="too_many_pixels"
        )
    if width * height == 0:
        raise MediaError("the image has no pixels", reason="damaged")
    before(width, height)
    try:
        image.load()
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as e:
        raise MediaError(str(e), reason="too_many_pixels") from e
    except DECODE_ERRORS as e:
        raise MediaError(f"the {image.format} image is truncated or damaged: {e}", reason="damaged") from e
    return image


def check_scans(data: bytes) -> None:
    """Check that a JPEG does not have so many scans or segments that decoding could take hours.

    Raises MediaError("too_many_scans").
    """
    if data[:2] != b"\xff\xd8":
        return
    scans, at = 0, 2
    for _ in range(MAX_SEGMENTS):
        found = _MARKER.search(data, at)
        if found is None or (kind := data[found.start() + 1]) == _END_OF_IMAGE:
            return
        at = found.end()
        if kind not in _WITHOUT_LENGTH:
            # Skip the segment by its length, like a decoder, even if the length is wrong.
            at += int.from_bytes(data[at : at + 2], "big")
        scans += kind == _START_OF_SCAN
        if scans > MAX_SCANS:
            break
    else:
        raise MediaError(f"the JPEG has more than {MAX_SEGMENTS} segments", reason="too_many_scans")
    if scans > MAX_SCANS:
        raise MediaError(
            f"the JPEG has more than {MAX_SCANS} scans; save it with fewer scans, or as a baseline JPEG",
            reason="too_many_scans",
        )


def to_engine_rgb(image: Image.Image, decoding: Decoding = DEFAULT_DECODING) -> Image.Image:
    """Return the RGB image that an engine passes to its processor, by one of this module's rules."""
    if decoding != "sglang-0.5.23":
        image = _rotate_upright(image)
        if _is_transparent(image) and not (image.mode == "RGB" and decoding == "vllm-0.32"):
            rgba = image if image.mode == "RGBA" else image.convert("RGBA")
            flat = Image.new("RGB", rgba.size, _WHITE)
            flat.paste(rgba, mask=rgba.getchannel("A"))
            return flat
    return image if image.mode == "RGB" else image.convert("RGB")


def digest_image(image: Image.Image) -> bytes:
    """Return the media digest (32 bytes) of an image of mode "RGB"."""
    return pixels_digest("RGB", image.width, image.height, image.tobytes())


def _is_transparent(image: Image.Image) -> bool:
    return image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info


def _rotate_upright(image: Image.Image) -> Image.Image:
    try:
        image.load()  # some formats store EXIF after the pixels
        # Without this check, `exif_transpose` copies an upright image.
        turned = image.getexif().get(ExifTags.Base.Orientation, 1) in _ROTATED_ORIENTATIONS
        return ImageOps.exif_transpose(image) if turned else image
    except DECODE_ERRORS:
        # If the EXIF data is corrupt, ignore the orientation, like vLLM.
        return image
