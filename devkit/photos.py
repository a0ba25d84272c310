"""Real photographs, from packages of the `dev` extra: nothing is downloaded or drawn."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from PIL import Image

# Package (found, not imported) and file in it. Mixed sizes, both containers, one in greyscale.
_FILES = (
    ("skimage", "data/rocket.jpg"),
    ("skimage", "data/ihc.png"),
    ("matplotlib", "mpl-data/sample_data/grace_hopper.jpg"),
    ("skimage", "data/astronaut.png"),
    ("skimage", "data/chelsea.png"),
    ("skimage", "data/coffee.png"),
    ("skimage", "data/motorcycle_right.png"),
    ("skimage", "data/motorcycle_left.png"),
    ("skimage", "data/hubble_deep_field.jpg"),
    ("skimage", "data/camera.png"),
    ("skimage", "data/retina.jpg"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Photo:
    """One photograph as a client sends it."""

    name: str
    data: bytes
    mime: str
    """`image/jpeg` or `image/png`."""
    width: int
    height: int

    def as_png(self) -> bytes:
        """The same pixels in a PNG."""
        out = io.BytesIO()
        with Image.open(io.BytesIO(self.data)) as image:
            image.save(out, "PNG", compress_level=1)
        return out.getvalue()

    def crops(self, width: int, height: int) -> Iterator[bytes]:
        """Distinct images of one size, cut side by side, as PNG: load for benchmarks."""
        with Image.open(io.BytesIO(self.data)) as image:
            for top in range(0, self.height - height + 1, height):
                for left in range(0, self.width - width + 1, width):
                    out = io.BytesIO()
                    part = image.crop((left, top, left + width, top + height))
                    part.save(out, "PNG", compress_level=1)
                    yield out.getvalue()


def photos() -> list[Photo]:
    """All photographs, in a fixed order.

    Raises RuntimeError naming the remedy when a package is missing.
    """
    return [_read(package, file) for package, file in _FILES]


def _read(package: str, file: str) -> Photo:
    spec = find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    path = Path(folders[0]) / file if folders else None
    if path is None or not path.is_file():
        raise RuntimeError(f"{package} with {file} is not installed. Run: pip install 'cornplug[dev]'")
    data = path.read_bytes()
    with Image.open(io.BytesIO(data)) as image:
        mime = Image.MIME[image.format or ""]
        return Photo(name=path.name, data=data, mime=mime, width=image.width, height=image.height)
