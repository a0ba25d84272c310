"""Images good, odd and hostile."""

from __future__ import annotations

import io
import random
import struct
import zlib

import pytest
from PIL import Image

from cornplug.encoder_service.formats.image import decode, digest_image, to_engine_rgb
from cornplug.errors import MediaError
from cornplug.identity import pixels_digest

from ..conftest import png, sample_image
from ..hostile_images import FORMATS

MAX = 1_000_000


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        png(sample_image(1)),
        saved(sample_image(1), "WEBP", lossless=True),
        saved(sample_image(1), "BMP"),
        saved(sample_image(1), "TIFF"),
        saved(sample_image(1), "PPM"),
    ],
)
def test_image_lossless_containers_give_one_digest(data: bytes) -> None:
    image = sample_image(1)
    want = pixels_digest("RGB", 70, 60, image.tobytes())
    assert digest_image(decode(data, MAX, formats=FORMATS)) == want
    assert digest_image(image) == want


def test_image_changed_pixel_or_shape_changes_digest() -> None:
    image = sample_image(1)
    other = image.copy()
    r, g, b = other.getpixel((5, 5))
    other.putpixel((5, 5), (r ^ 1, g, b))
    tall = Image.frombytes("RGB", (60, 70), image.tobytes())
    assert len({digest_image(i) for i in (image, other, tall)}) == 3


def test_image_transparency_becomes_white() -> None:
    clear = Image.new("RGBA", (2, 1), (10, 20, 30, 0))
    clear.putpixel((1, 0), (10, 20, 30, 255))
    assert to_engine_rgb(clear).tobytes() == bytes([255, 255, 255, 10, 20, 30])
    grey = Image.new("LA", (1, 1), (7, 0))
    assert to_engine_rgb(grey).getpixel((0, 0)) == (255, 255, 255)
    assert to_engine_rgb(grey, "sglang-0.5.23").getpixel((0, 0)) == (7, 7, 7)
    palette = sample_image(2).convert("P")
    palette.info["transparency"] = palette.getpixel((0, 0))
    assert to_engine_rgb(palette).getpixel((0, 0)) == (255, 255, 255)


def test_image_rgb_with_transparent_colour_follows_release() -> None:
    image = sample_image(3)
    image.info["transparency"] = image.getpixel((0, 0))
    assert to_engine_rgb(image, "vllm-0.32").tobytes() == sample_image(3).tobytes()
    assert to_engine_rgb(image, "sglang-0.5.23").tobytes() == sample_image(3).tobytes()
    assert to_engine_rgb(image, "vllm-0.33").getpixel((0, 0)) == (255, 255, 255)


@pytest.mark.parametrize("mode", ["L", "1", "CMYK", "I;16", "YCbCr"])
def test_image_other_modes_become_rgb(mode: str) -> None:
    image = (
        sample_image(4).convert("L").convert("I").convert(mode)
        if mode == "I;16"
        else sample_image(4).convert(mode)
    )
    assert to_engine_rgb(image).tobytes() == image.convert("RGB").tobytes()


def test_image_exif_orientation_is_applied_once() -> None:
    turned = sample_image(5, 70, 60)
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(turned, "PNG", exif=exif.tobytes())
    image = decode(data, MAX)
    upright = to_engine_rgb(image)
    assert upright.size == (60, 70)
    assert upright.tobytes() == turned.transpose(Image.Transpose.ROTATE_270).tobytes()
    assert to_engine_rgb(upright).tobytes() == upright.tobytes()
    assert to_engine_rgb(image, "sglang-0.5.23").tobytes() == turned.tobytes()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def bomb(width: int, height: int) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 10_000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\0", "unknown_format"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "unknown_format"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "unknown_format"),
        (b"hello, this is text" * 50, "unknown_format"),
        (png(sample_image(1))[:100], "damaged"),
        (saved(sample_image(1), "JPEG")[:400], "damaged"),
        (saved(sample_image(1), "BMP")[:-100], "damaged"),
        (bomb(5_000, 5_000), "too_many_pixels"),
        (bomb(60_000, 60_000), "too_many_pixels"),
        (bomb(2**31 - 1, 2**31 - 1), "too_many_pixels"),
        (bomb(1000, 1000), "damaged"),
        (png(sample_image(1, 1001, 1000)), "too_many_pixels"),
    ],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_image_bad_files_are_refused_with_reason(data: bytes, reason: str) -> None:
    with pytest.raises(MediaError) as e:
        decode(data, MAX)
    assert e.value.reason == reason


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP", "ICO", "TGA", "JPEG2000"])
def test_image_damaged_file_decodes_or_is_refused(kind: str) -> None:
    """Never another exception: 150 mutations of each format."""
    whole = saved(sample_image(6, 32, 32), kind)
    rng = random.Random(kind)
    refused = 0
    for i in range(150):
        data = bytearray(whole)
        if i % 3 == 0:
            data = data[: rng.randrange(1, len(data))]
        for _ in range(rng.randrange(1, 6)):
            data[rng.randrange(min(len(data), 200 if i % 2 else len(data)))] = rng.randrange(256)
        try:
            decode(bytes(data), MAX)
        except MediaError:
            refused += 1
    assert refused > 0
