"""Tower for images that consist of one or several square tiles. The tiles of a batch are concatenated.

pixel_values (tiles, 3, side, side) ──layers──> (tiles, rows, width) ──> (tiles * rows, width) per item
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from transformers.image_processing_utils import select_best_resolution

from cornplug.encoder_service.towers import base
from cornplug.encoder_service.towers.base import TowerInput, TowerItem

_MAX_SIDE: Final = 1 << 24


class TileLayers(Protocol):
    """Layers of a tower: (tiles, channels, height, width) -> (tiles, rows, width)."""

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of a tile."""

    @property
    def num_positions(self) -> int:
        """Number of rows per tile that attention processes."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor: ...


class TilingRule(Protocol):
    """Rule that determines an image's number of tiles, and the geometry that the projector needs."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the tower's inputs under this rule."""

    def compute_geometry(self, inputs: Mapping[str, TowerInput], tiles: int) -> tuple[int, ...]:
        """Return the number of tiles to compute, out of `tiles`, followed by the values that the projector
        needs.

        Raises EncoderRefused("bad_input") if the inputs do not follow the rule.
        """


@dataclass(frozen=True, slots=True)
class AnyTiles:
    """Rule that uses all tiles of the input, and rejects an input with more than `max_tiles` tiles."""

    max_tiles: int | None = None
    input_names: tuple[str, ...] = ("pixel_values",)

    def compute_geometry(self, inputs: Mapping[str, TowerInput], tiles: int) -> tuple[int, ...]:
        if self.max_tiles is not None and tiles > self.max_tiles:
            raise base.bad_input(
                "pixel_values", f"shape: at most {self.max_tiles} tiles are allowed, not {tiles}"
            )
        return (tiles,)


@dataclass(frozen=True, slots=True)
class PinpointTiling:
    """Rule for inputs with one tile for the whole image, followed by the tiles of the best of several
    resolutions.

    The geometry is (tiles, down, across, height, width). The input may end with empty tiles, because
    processors pad all images in a batch to the largest number of tiles.
    """

    resolutions: tuple[tuple[int, int], ...]
    """Supported resolutions as (height, width), both multiples of `side`."""
    side: int
    input_names: tuple[str, ...] = ("pixel_values", "image_sizes")

    def compute_geometry(self, inputs: Mapping[str, TowerInput], tiles: int) -> tuple[int, ...]:
        size = base.validate_input("image_sizes", inputs["image_sizes"], base.INTEGER_DTYPES)
        if tuple(size.shape) not in ((2,), (1, 2)):
            raise base.bad_input("image_sizes", f"shape must be (2,) for one image, not {tuple(size.shape)}")
        height, width = (int(side) for side in size.reshape(2).tolist())
        if not (0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE):
            raise base.bad_input("image_sizes", f"{height} x {width} is not a valid image size")
        best = select_best_resolution((height, width), self.resolutions)
        down, across = best[0] // self.side, best[1] // self.side
        wanted = 1 + down * across
        if tiles < wanted:
            raise base.bad_input(
                "pixel_values", f"shape: must have {wanted} tiles for {height} x {width}, not {tiles}"
            )
        return (wanted, down, across, height, width)


class TileTower:
    """Tower for `pixel_values` (tiles, 3, side, side) or (3, side, side), and the tiling's other inputs."""

    def __init__(
        self, layers: TileLayers, tiling: TilingRule, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._layers = layers
        self._tiling = tiling
        self._dtype = dtype
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        base.check_input_names(inputs, self._tiling.input_names)
        pixels = base.validate_input("pixel_values", inputs["pixel_values"], base.FLOAT_DTYPES)
        wanted = self._layers.tile_shape
        if pixels.ndim == 5 and pixels.shape[0] == 1:
            pixels = pixels[0]
        if pixels.ndim == 3:
            pixels = pixels[None]
        if pixels.ndim != 4 or tuple(pixels.shape[1:]) != wanted:
            raise base.bad_input(
                "pixel_values",
                f"shape must be (tiles, {', '.join(map(str, wanted))}), not {tuple(pixels.shape)}",
            )
        geometry = self._tiling.compute_geometry(inputs, len(pixels))
        pixels = pixels[: geometry[0]].to(self._dtype).contiguous()
        return TowerItem(
            tensors=(pixels,),
            tokens=len(pixels) * self._layers.num_positions,
            geometry=geometry,
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        pixels = base.concat_on_device([item.tensors[0] for item in items], self._device)
        tiles = self._layers(pixels).split([len(item.tensors[0]) for item in items])
        # Copy each item. Otherwise a cached item would keep the tensor of its whole batch in memory.
        return [item.flatten(0, 1).clone() for item in tiles]
