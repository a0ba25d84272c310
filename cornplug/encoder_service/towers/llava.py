"""LLaVA families. The tower returns hidden states of CLIP or SigLIP. The projector is linear, activation,
linear.

After projection, LLaVA-NeXT and LLaVA-OneVision assemble an image's tiles, remove the rows of the image's
padding, and end each line with a learned newline.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
from torch import nn
from transformers import LlavaConfig, LlavaNextConfig, LlavaOnevisionConfig
from transformers.activations import ACT2FN
from transformers.models.llava_next.modeling_llava_next import unpad_image

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers import vit
from cornplug.encoder_service.towers.base import TowerItem, fill_weights
from cornplug.encoder_service.towers.tiles import AnyTiles, PinpointTiling, TileTower, TilingRule

L = TypeVar("L", bound="_Linears")
Activation = Callable[[torch.Tensor], torch.Tensor]
_CONFIGS: Final[dict[str, Any]] = {
    "llava": LlavaConfig,
    "llava_next": LlavaNextConfig,
    "llava_onevision": LlavaOnevisionConfig,
}


class Llava:
    """Loader of a LLaVA-1.5 checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileTower:
        return _tower(checkpoint, AnyTiles(most=1), dtype, device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LlavaProjector:
        linears, activation = _linears(checkpoint, _Linears, dtype, device)
        return LlavaProjector(linears, activation=activation)


class LlavaTiles:
    """Loader of a LLaVA-NeXT or LLaVA-OneVision checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileTower:
        config = _config(checkpoint)
        resolutions = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
        tiling = PinpointTiling(resolutions, config.vision_config.image_size)
        return _tower(checkpoint, tiling, dtype, device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileProjector:
        vision = _config(checkpoint).vision_config
        most = checkpoint.family.projector_spec(checkpoint.config).get("most_tiles")
        linears, activation = _linears(checkpoint, _LinearsAndNewline, dtype, device)
        packing = RowPacking(patches_a_side=vision.image_size // vision.patch_size, most_tiles=most)
        return TileProjector(linears, packing, activation=activation)


class LlavaProjector:
    """Projector: (rows, width) -> (rows, hidden_size)."""

    def __init__(self, linears: _Linears, *, activation: Activation) -> None:
        self._linears = linears
        self._activation = activation

    @property
    def hidden_size(self) -> int:
        return self._linears.linear_2.out_features

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._linears.linear_1.weight.device) for f in features])
        out = self._linears.linear_2(self._activation(self._linears.linear_1(rows)))
        return list(out.split([len(f) for f in features]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPacking:
    """Conversion of an image's projected tiles to rows for the LLM: first the rows of the downscaled whole
    image, then the tiles line by line."""

    patches_a_side: int
    most_tiles: int | None
    """Maximum number of tiles. An image with more patches than these tiles contain is downscaled. None means
    no limit."""

    def __call__(self, rows: torch.Tensor, geometry: tuple[int, ...], newline: torch.Tensor) -> torch.Tensor:
        """Return the rows of an image.

        Args:
            rows: Projected rows of all tiles, of shape (tiles * side², hidden).
            geometry: Geometry that `PinpointTiling` returned for the image.
            newline: Row that ends each line, of shape (hidden,).
        """
        tiles, down, across, height, width = geometry
        side = self.patches_a_side
        whole, parts = rows.split([side * side, (tiles - 1) * side * side])
        # (hidden, down * side, across * side): the tiles as one plane
        plane = parts.view(down, across, side, side, -1).permute(4, 0, 2, 1, 3)
        plane = unpad_image(plane.reshape(-1, down * side, across * side), (height, width))
        plane = self._shrunk(plane)
        ends = newline[:, None, None].expand(len(newline), plane.shape[1], 1)
        lines = torch.cat((plane, ends), dim=-1).flatten(1).T
        return torch.cat((whole, lines))

    def _shrunk(self, plane: torch.Tensor) -> torch.Tensor:
        if self.most_tiles is None:
            return plane
        height, width = plane.shape[1:]
        ratio = math.sqrt(height * width / (self.most_tiles * self.patches_a_side**2))
        if ratio <= 1.1:  # transformers' and vLLM's threshold
            return plane
        size = [int(height // ratio), int(width // ratio)]
        return nn.functional.interpolate(plane[None], size, mode="bilinear")[0]


class TileProjector:
    """Projector for images of several tiles: (tiles * side², width) -> (rows of the image, hidden_size)."""

    def __init__(self, linears: _LinearsAndNewline, packing: RowPacking, *, activation: Activation) -> None:
        self._rows = LlavaProjector(linears, activation=activation)
        self._newline = linears.newline
        self._packing = packing

    @property
    def hidden_size(self) -> int:
        return self._rows.hidden_size

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        made = self._rows.project(features, items)
        return [
            self._packing(rows, item.geometry, self._newline) for rows, item in zip(made, items, strict=True)
        ]


class _Linears(nn.Module):
    def __init__(self, inner: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inner, hidden, bias=bias)
        self.linear_2 = nn.Linear(hidden, hidden, bias=bias)


class _LinearsAndNewline(_Linears):
    def __init__(self, inner: int, hidden: int, bias: bool) -> None:
        super().__init__(inner, hidden, bias)
        self.newline = nn.Parameter(torch.empty(hidden))


def _config(checkpoint: Checkpoint) -> Any:
    return _CONFIGS[checkpoint.family.name].from_dict(checkpoint.config)


def _tower(checkpoint: Checkpoint, tiling: TilingRule, dtype: torch.dtype, device: torch.device) -> TileTower:
    cut = checkpoint.family.tower_spec(checkpoint.config)
    vision = _config(checkpoint).vision_config
    vision._attn_implementation = "sdpa"
    first_row = 0 if cut["feature_select"] == "full" else 1
    with torch.device("meta"):
        layers = vit.VitLayers(vision, taps=cut["feature_layers"], first_row=first_row)
    vit.fill(layers, checkpoint, dtype, device)
    return TileTower(layers, tiling, dtype=dtype, device=device)


def _linears(
    checkpoint: Checkpoint, kind: type[L], dtype: torch.dtype, device: torch.device
) -> tuple[L, Activation]:
    config = _config(checkpoint)
    taps = checkpoint.family.tower_spec(checkpoint.config)["feature_layers"]
    with torch.device("meta"):
        linears = kind(
            config.vision_config.hidden_size * len(taps),
            config.text_config.hidden_size,
            config.multimodal_projector_bias,
        )
    fill_weights(linears, checkpoint.locate("projector"), dtype=dtype, device=device)
    return linears, ACT2FN[config.projector_hidden_act]
