"""Images odd and hostile, made by code: no file has to be trusted."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from PIL import Image, ImageCms, PngImagePlugin

FORMATS: Final = (
    "AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""Formats of still images that Pillow decodes without another program."""
SIDE: Final = (70, 60)


def sample_image(seed: int, width: int = SIDE[0], height: int = SIDE[1]) -> Image.Image:
    """An image of coarse random patches: it survives resizing, unlike noise."""
    small = np.random.default_rng(seed).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height))


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The bytes of a file of that kind."""
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    """A PNG chunk."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width: int, height: int, *extra: bytes, rows: bytes = b"\0" * 10_000) -> bytes:
    """A PNG that claims these sides, with any rows."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (chunk(b"IHDR", header), *extra, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def tiff_of(width: int, height: int, *, compression: int = 1, strip: bytes = b"\0" * 100) -> bytes:
    """A one-strip RGB TIFF that claims these sides."""
    tags = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, 1, 8),
        (259, 3, 1, compression),
        (262, 3, 1, 2),
        (273, 4, 1, 8),
        (277, 3, 1, 3),
        (278, 4, 1, height),
        (279, 4, 1, len(strip)),
    ]
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<I", 8 + len(strip)) + strip + directory + b"\0\0\0\0"


def tiff_that_loops() -> bytes:
    """A TIFF whose directory says that the next one is itself."""
    data = bytearray(saved(sample_image(1), "TIFF"))
    (first,) = struct.unpack_from("<I", data, 4)
    (tags,) = struct.unpack_from("<H", data, first)
    struct.pack_into("<I", data, first + 2 + 12 * tags, first)
    return bytes(data)


def webp_of(width: int, height: int) -> bytes:
    """An extended WebP of that canvas with one frame of a pixel."""
    inner = saved(Image.new("RGB", (1, 1)), "WEBP", lossless=True)[12:]
    sides = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    frame = b"\0" * 12 + b"\x64\0\0\0" + inner
    body = b"VP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + sides
    body += b"ANIM" + struct.pack("<I", 6) + b"\0" * 6
    body += b"ANMF" + struct.pack("<I", len(frame)) + frame
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def bmp_of(width: int, height: int) -> bytes:
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0)
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info


def jpeg_of(width: int, height: int) -> bytes:
    """A JPEG whose frame header claims these sides."""
    data = bytearray(saved(sample_image(1), "JPEG"))
    at = data.index(b"\xff\xc0")
    struct.pack_into(">HH", data, at + 5, height, width)
    return bytes(data)


def gif_of(width: int, height: int) -> bytes:
    data = bytearray(saved(sample_image(1).convert("P"), "GIF"))
    struct.pack_into("<HH", data, 6, width, height)
    return bytes(data)


def ico_around(inner: bytes) -> bytes:
    """An icon of 16 x 16, by its directory, that holds this image."""
    return (
        struct.pack("<HHH", 0, 1, 1) + struct.pack("<BBBBHHII", 16, 16, 0, 0, 1, 32, len(inner), 22) + inner
    )


_ZEROS: Final = zlib.compress(b"\0" * (100 << 20), 1)


def _text_bomb(kind: bytes) -> bytes:
    return chunk(kind, (b"k\0\1\0\0\0" if kind == b"iTXt" else b"k\0\0") + _ZEROS)


def _exif(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


def _exif_loop() -> bytes:
    """EXIF whose sub-directory is itself."""
    entry = struct.pack("<HHII", 0x8769, 4, 1, 8)
    return b"Exif\0\0II*\0" + struct.pack("<IH", 8, 1) + entry + struct.pack("<I", 8)


_WHOLE: Final = {
    "png": saved(sample_image(1), "PNG"),
    "jpeg": saved(sample_image(1), "JPEG"),
    "webp": saved(sample_image(1), "WEBP"),
    "gif": saved(sample_image(1).convert("P"), "GIF"),
    "tiff": saved(sample_image(1), "TIFF"),
    "bmp": saved(sample_image(1), "BMP"),
    "ico": saved(sample_image(1), "ICO"),
    "avif": saved(sample_image(1), "AVIF"),
    "jp2": saved(sample_image(1), "JPEG2000"),
    "tga": saved(sample_image(1), "TGA"),
    "qoi": saved(sample_image(1), "QOI"),
    "ppm": saved(sample_image(1), "PPM"),
}


def many_scans(width: int, height: int, scans: int) -> bytes:
    """A grey progressive JPEG whose last scan comes so often: 90 bytes and a pass over all pixels each."""
    whole = saved(Image.new("L", (width, height), 128), "JPEG", progressive=True, quality=50)
    last = whole.rindex(b"\xff\xda")
    scan = whole[last:-2]
    return whole[:last] + scan * scans + whole[-2:]


def hostile() -> Mapping[str, tuple[bytes, str]]:
    """Name -> (bytes, the reason that they are refused for; "" where any will do)."""
    huge = (50_000, 50_000)
    deflated = zlib.compress(b"\0" * 10**7)
    return {
        "nothing": (b"", "empty"),
        "one zero": (b"\0", "unknown_format"),
        "many zeros": (b"\0" * 100_000, ""),
        "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", ""),
        "pdf": (b"%PDF-1.7\n1 0 obj<</Type/Catalog>>endobj\n%%EOF", "unknown_format"),
        "eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n", "unknown_format"),
        "eps in binary": (b"\xc5\xd0\xd3\xc6" + b"\0" * 28 + b"%!PS-Adobe-3.0 EPSF-3.0\n", "unknown_format"),
        "html": (b"<html><img src=x></html>", "unknown_format"),
        "zip": (b"PK\x03\x04" + b"\0" * 100, "unknown_format"),
        "gzip": (b"\x1f\x8b\x08" + zlib.compress(b"\0" * 1000), "unknown_format"),
        "elf": (b"\x7fELF\x02\x01\x01" + b"\0" * 100, "unknown_format"),
        "psd": (b"8BPS\0\1" + b"\0" * 6 + struct.pack(">HIIHH", 3, 9, 9, 8, 3), "unknown_format"),
        "wmf": (b"\xd7\xcd\xc6\x9a\0\0" + b"\0" * 60, "unknown_format"),
        "gif that is a script": (b"GIF89a/*" + b"\0" * 20 + b"*/=1;alert(1)", ""),
        **{f"{kind} cut short": (data[: len(data) * 2 // 3], "") for kind, data in _WHOLE.items()},
        **{f"{kind}, header only": (data[:24], "") for kind, data in _WHOLE.items()},
        "png of 50k x 50k": (png_of(*huge), "too_many_pixels"),
        "png of 2**31 squared": (png_of(2**31 - 1, 2**31 - 1), "too_many_pixels"),
        "png, one row": (png_of(2_000_000_000, 1), "too_many_pixels"),
        "png of no pixels": (png_of(0, 10), ""),
        "png bomb under the limit": (png_of(1900, 1900, rows=b"\0" * 1_000_000), "damaged"),
        "png over the limit": (saved(Image.new("1", (2100, 2000)), "PNG"), "too_many_pixels"),
        "png with a wrong checksum": (_WHOLE["png"].replace(b"IDAT", b"IDAU", 1), ""),
        "tiff of 50k x 50k": (tiff_of(*huge), "too_many_pixels"),
        "tiff of 50k x 50k, deflated": (tiff_of(*huge, compression=8, strip=deflated), "too_many_pixels"),
        "webp of 16k x 16k": (webp_of(16_384, 16_384), "too_many_pixels"),
        "bmp of 50k x 50k": (bmp_of(*huge), "too_many_pixels"),
        "bmp of a negative width": (bmp_of(-50_000, 50_000), ""),
        "bmp of 2**31": (bmp_of(2**31 - 1, -(2**31)), "too_many_pixels"),
        "jpeg of 65k x 65k": (jpeg_of(65_500, 65_500), "too_many_pixels"),
        "gif of 50k x 50k": (gif_of(*huge), "too_many_pixels"),
        "ppm of 50k x 50k": (b"P6 50000 50000 255\n" + b"\0" * 100, "too_many_pixels"),
        "ppm of many digits": (b"P6 " + b"9" * 5000 + b" 1 255\n", ""),
        "qoi of 50k x 50k": (b"qoif" + struct.pack(">IIBB", *huge, 3, 0) + b"\xfd" * 100, "too_many_pixels"),
        "tga of 65k x 65k": (
            struct.pack("<BBBHHBHHHHBB", 0, 0, 10, 0, 0, 0, 0, 0, 65_000, 65_000, 24, 0) + b"\xff\0\0\0" * 50,
            "too_many_pixels",
        ),
        "ico around a png of 50k x 50k": (ico_around(png_of(*huge)), "too_many_pixels"),
        "ico around a png over the limit": (
            ico_around(saved(Image.new("RGBA", (2100, 2000)), "PNG")),
            "too_many_pixels",
        ),
        "ico around itself": (ico_around(ico_around(_WHOLE["png"])), ""),
        "png with 100 MB of zTXt": (png_of(9, 9, _text_bomb(b"zTXt")), "damaged"),
        "png with 100 MB of iTXt": (png_of(9, 9, _text_bomb(b"iTXt")), "damaged"),
        "png with 100 MB of iCCP": (png_of(9, 9, _text_bomb(b"iCCP")), "damaged"),
    }


def odd() -> Mapping[str, tuple[bytes, Image.Image]]:
    """Name -> (bytes, the RGB image that they stand for)."""
    base, other = sample_image(1), sample_image(2)
    palette = base.quantize(16)
    clear = palette.copy()
    clear.info["transparency"] = palette.getpixel((0, 0))
    shaded = palette.copy()
    shaded.info["transparency"] = bytes(range(0, 256, 16))
    clear_gif = saved(clear, "GIF")
    clear_grey = base.convert("L")
    clear_grey.info["transparency"] = clear_grey.getpixel((0, 0))
    hole = base.convert("RGBA")
    hole.paste((0, 0, 0, 0), (0, 0, 20, 20))
    white = base.copy()
    white.paste((255, 255, 255), (0, 0, 20, 20))
    cmyk = Image.open(io.BytesIO(saved(base.convert("CMYK"), "JPEG"))).convert("RGB")
    grey = base.convert("L")
    sheer = Image.merge("LA", (grey, other.convert("L")))
    deep = Image.fromarray(np.arange(70 * 60, dtype=np.uint16).reshape(60, 70) * 15)
    turned = {
        3: Image.Transpose.ROTATE_180,
        6: Image.Transpose.ROTATE_270,
        8: Image.Transpose.ROTATE_90,
        5: Image.Transpose.TRANSPOSE,
    }
    animated = {"save_all": True, "append_images": [other], "duration": 50}
    described = PngImagePlugin.PngInfo()
    described.add_text("parameters", "a photograph " * 100, zip=True)
    jpeg = Image.open(io.BytesIO(saved(base, "JPEG"))).convert("RGB")
    return {
        "animated gif": (
            saved(palette, "GIF", **{**animated, "append_images": [other.quantize(16)]}),
            palette.convert("RGB"),
        ),
        "animated webp": (saved(base, "WEBP", lossless=True, **animated), base),
        "animated png": (saved(base, "PNG", **animated), base),
        "tiff of two pages": (saved(base, "TIFF", save_all=True, append_images=[other]), base),
        "cmyk jpeg": (saved(base.convert("CMYK"), "JPEG"), cmyk),
        "16-bit png": (saved(deep, "PNG"), deep.convert("RGB")),
        "16-bit tiff": (saved(deep, "TIFF"), deep.convert("RGB")),
        "grey": (saved(base.convert("L"), "PNG"), base.convert("L").convert("RGB")),
        "one bit": (saved(base.convert("1"), "PNG"), base.convert("1").convert("RGB")),
        "palette": (saved(palette, "PNG"), palette.convert("RGB")),
        "palette with a clear colour": (saved(clear, "PNG"), _on_white(clear)),
        "palette with some of each": (
            saved(palette, "PNG", transparency=bytes(range(0, 256, 16))),
            _on_white(shaded),
        ),
        "gif with a clear colour": (clear_gif, _on_white(Image.open(io.BytesIO(clear_gif)))),
        "grey with a clear colour": (
            saved(grey, "PNG", transparency=grey.getpixel((0, 0))),
            _on_white(clear_grey),
        ),
        "grey with alpha": (saved(sheer, "PNG"), _on_white(sheer)),
        "alpha": (saved(hole, "PNG"), white),
        "alpha in webp": (saved(hole, "WEBP", lossless=True, exact=True), white),
        "colour profile": (saved(base, "PNG", icc_profile=_profile()), base),
        **{
            f"turned by exif {n}": (saved(base, "PNG", exif=_exif(n)), base.transpose(t))
            for n, t in turned.items()
        },
        "exif of no sense": (saved(base, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff"), base),
        "exif that loops": (saved(base, "PNG", exif=_exif_loop()), base),
        "tiff, 50 MB for 100 pixels": (
            tiff_of(10, 10, compression=8, strip=zlib.compress(b"\0" * (50 << 20))),
            Image.new("RGB", (10, 10)),
        ),
        "tiff that loops": (tiff_that_loops(), base),
        "colour profile of no sense": (saved(base, "JPEG", icc_profile=b"\xff" * 5000), jpeg),
        "bytes after its end": (_WHOLE["png"] + b"<script>" * 100, base),
        "a described png": (saved(base, "PNG", pnginfo=described), base),
        "progressive jpeg": (
            saved(base, "JPEG", progressive=True),
            Image.open(io.BytesIO(saved(base, "JPEG", progressive=True))).convert("RGB"),
        ),
    }


def clear_rgb() -> bytes:
    """An RGB PNG that names a transparent colour: that of its first pixel. Engines disagree about it."""
    image = sample_image(1)
    return saved(image, "PNG", transparency=image.getpixel((0, 0)))


def _profile() -> bytes:
    """A colour profile other than sRGB: an engine that applied it would change the pixels."""
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()


def _on_white(image: Image.Image) -> Image.Image:
    rgba = image.convert("RGBA")
    flat = Image.new("RGB", rgba.size, (255, 255, 255))
    flat.paste(rgba, mask=rgba.getchannel("A"))
    return flat
