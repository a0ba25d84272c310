"""CLIP and SigLIP towers (the LLaVA families and Gemma 3), and InternVL's tower. The layers are transformers'
own, with SDPA attention.

LLaVA's projector consists of a linear layer, an activation and a linear layer. After projection, LLaVA-NeXT
and LLaVA-OneVision assemble an image's tiles, remove the rows of the image's padding, and end each line with
a learned newline. Gemma 3 averages patches, and its projector is a norm and one matrix. InternVL's tower is a
ViT whose output joins 2x2 neighbours, and its projector is a norm and two linear layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    Gemma3Config,
    InternVLConfig,
    LlavaConfig,
    LlavaNextConfig,
    LlavaOnevisionConfig,
    SiglipVisionConfig,
)
from transformers.activations import ACT2FN
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionEmbeddings
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.internvl.modeling_internvl import InternVLVisionEmbeddings, InternVLVisionLayer
from transformers.models.llava_next.modeling_llava_next import unpad_image
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer, SiglipVisionEmbeddings

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers.base import TowerItem, fill_weights
from cornplug.encoder_service.towers.tiles import AnyTiles, PinpointTiling, TileTower, TilingRule

LinearsT = TypeVar("LinearsT", bound="_Linears")
Activation = Callable[[torch.Tensor], torch.Tensor]
_CONFIGS: Final[dict[str, Any]] = {
    "llava": LlavaConfig,
    "llava_next": LlavaNextConfig,
    "llava_onevision": LlavaOnevisionConfig,
}
VitConfig: TypeAlias = CLIPVisionConfig | SiglipVisionConfig


class Llava:
    """Loads a LLaVA-1.5 checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileTower:
        return _load_tile_tower(checkpoint, AnyTiles(max_tiles=1), dtype, device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LlavaProjector:
        linears, activation = _load_linears(checkpoint, _Linears, dtype, device)
        return LlavaProjector(linears, activation=activation)


class LlavaTiles:
    """Loads a LLaVA-NeXT or LLaVA-OneVision checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileTower:
        config = _config(checkpoint)
        resolutions = tuple((int(height), int(width)) for height, width in config.image_grid_pinpoints)
        tiling = PinpointTiling(resolutions, config.vision_config.image_size)
        return _load_tile_tower(checkpoint, tiling, dtype, device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileProjector:
        vision = _config(checkpoint).vision_config
        most = checkpoint.family.projector_spec(checkpoint.config).get("most_tiles")
        linears, activation = _load_linears(checkpoint, _LinearsAndNewline, dtype, device)
        packing = RowPacking(patches_per_side=vision.image_size // vision.patch_size, max_tiles=most)
        return TileProjector(linears, packing, activation=activation)


class LlavaProjector:
    """Projector of LLaVA and InternVL: (rows, width) -> (rows, hidden_size)."""

    def __init__(self, linears: _Linears, *, activation: Activation) -> None:
        self._linears = linears
        self._activation = activation

    @property
    def hidden_size(self) -> int:
        return self._linears.linear_2.out_features

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._linears.linear_1.weight.device) for f in features])
        out = self._linears(rows, self._activation)
        return list(out.split([len(f) for f in features]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPacking:
    """Converts an image's projected tiles to rows for the LLM: first the rows of the downscaled whole image,
    then the tiles line by line."""

    patches_per_side: int
    max_tiles: int | None
    """Maximum number of tiles, or None for no limit. An image with more patches than these tiles contain is
    downscaled."""

    def __call__(self, rows: torch.Tensor, geometry: tuple[int, ...], newline: torch.Tensor) -> torch.Tensor:
        """Return the rows of an image.

        Args:
            rows: Projected rows of all tiles, of shape (tiles * side², hidden).
            geometry: Geometry that `PinpointTiling` returned for the image.
            newline: Row that ends each line, of shape (hidden,).
        """
        tiles, down, across, height, width = geometry
        side = self.patches_per_side
        whole, parts = rows.split([side * side, (tiles - 1) * side * side])
        # (hidden, down * side, across * side): the tiles as one plane
        plane = parts.view(down, across, side, side, -1).permute(4, 0, 2, 1, 3)
        plane = unpad_image(plane.reshape(-1, down * side, across * side), (height, width))
        plane = self._downscale(plane)
        ends = newline[:, None, None].expand(len(newline), plane.shape[1], 1)
        lines = torch.cat((plane, ends), dim=-1).flatten(1).T
        return torch.cat((whole, lines))

    def _downscale(self, plane: torch.Tensor) -> torch.Tensor:
        if self.max_tiles is None:
            return plane
        height, width = plane.shape[1:]
        ratio = math.sqrt(height * width / (self.max_tiles * self.patches_per_side**2))
        if ratio <= 1.1:  # transformers' and vLLM's threshold
            return plane
        size = [int(height // ratio), int(width // ratio)]
        return nn.functional.interpolate(plane[None], size, mode="bilinear")[0]


class TileProjector:
    """Projector for images of several tiles: (tiles * side², width) -> (rows of the image, hidden_size)."""

    def __init__(self, linears: _LinearsAndNewline, packing: RowPacking, *, activation: Activation) -> None:
        self._row_projector = LlavaProjector(linears, activation=activation)
        self._newline = linears.newline
        self._packing = packing

    @property
    def hidden_size(self) -> int:
        return self._row_projector.hidden_size

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        made = self._row_projector.project(features, items)
        return [
            self._packing(rows, item.geometry, self._newline) for rows, item in zip(made, items, strict=True)
        ]


class _Linears(nn.Module):
    def __init__(self, inner: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inner, hidden, bias=bias)
        self.linear_2 = nn.Linear(hidden, hidden, bias=bias)

    def forward(self, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
        out: torch.Tensor = self.linear_2(activation(self.linear_1(rows)))
        return out


class _LinearsAndNewline(_Linears):
    def __init__(self, inner: int, hidden: int, bias: bool) -> None:
        super().__init__(inner, hidden, bias)
        self.newline = nn.Parameter(torch.empty(hidden))


def _config(checkpoint: Checkpoint) -> Any:
    return _CONFIGS[checkpoint.family.name].from_dict(checkpoint.config)


def _load_tile_tower(
    checkpoint: Checkpoint, tiling: TilingRule, dtype: torch.dtype, device: torch.device
) -> TileTower:
    cut = checkpoint.family.tower_spec(checkpoint.config)
    vision = _config(checkpoint).vision_config
    vision._attn_implementation = "sdpa"
    first_row = 0 if cut["feature_select"] == "full" else 1
    with torch.device("meta"):
        layers = VitLayers(vision, taps=cut["feature_layers"], first_row=first_row)
    fill_vit_weights(layers, checkpoint, dtype, device)
    return TileTower(layers, tiling, dtype=dtype, device=device)


def _load_linears(
    checkpoint: Checkpoint, kind: type[LinearsT], dtype: torch.dtype, device: torch.device
) -> tuple[LinearsT, Activation]:
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


class VitLayers(nn.Module):
    """Layers of a tower: (tiles, 3, side, side) -> (tiles, rows, width). Attribute names are the checkpoint's
    tensor names.

    The output concatenates the hidden states after the layers in `taps` along the width. Layers are numbered
    from 1, and tap 0 is the input of the first layer. If `first_row` is 1, CLIP's class row is dropped.
    """

    def __init__(
        self, config: VitConfig, *, taps: Sequence[int], first_row: int = 0, final_norm: bool = False
    ) -> None:
        super().__init__()
        clip = isinstance(config, CLIPVisionConfig)
        self.embeddings = (CLIPVisionEmbeddings if clip else SiglipVisionEmbeddings)(config)
        self.pre_layrnorm = _norm(config) if clip else None  # spelled as in the checkpoints
        layer = CLIPEncoderLayer if clip else SiglipEncoderLayer
        layers = nn.ModuleList(layer(config) for _ in range(max(taps)))
        self.encoder = nn.ModuleDict({"layers": layers})
        self.post_layernorm = _norm(config) if final_norm else None
        self._taps = tuple(taps)
        self._first_row = first_row

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        side = self.embeddings.image_size
        return (self.embeddings.patch_embedding.in_channels, side, side)

    @property
    def num_positions(self) -> int:
        return int(self.embeddings.num_positions)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.embeddings(pixels)
        if self.pre_layrnorm is not None:
            hidden = self.pre_layrnorm(hidden)
        tapped = {0: hidden}
        for number, layer in enumerate(self.encoder["layers"].children(), start=1):
            hidden = layer(hidden, None)
            if number in self._taps:
                tapped[number] = hidden
        out = torch.cat([tapped[tap][:, self._first_row :] for tap in self._taps], dim=-1)
        return out if self.post_layernorm is None else self.post_layernorm(out)


def fill_vit_weights(
    layers: VitLayers, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> None:
    """Load the tower's weights into layers that were created on the meta device. Raises the same errors as
    `fill_weights`.
    """
    fill_weights(layers, checkpoint.locate("tower"), dtype=dtype, device=device)
    # `position_ids` is not a weight, so it is still on the meta device.
    layers.embeddings.position_ids = torch.arange(layers.num_positions, device=device)[None]


def _norm(config: VitConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


class Gemma3:
    """Loads a Gemma 3 checkpoint. An image is one tile, or several tiles with pan and scan."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileTower:
        config = Gemma3Config.from_dict(checkpoint.config)
        config.vision_config._attn_implementation = "sdpa"
        with torch.device("meta"):
            layers = _PooledLayers(config)
        fill_vit_weights(layers, checkpoint, dtype, device)
        return TileTower(layers, AnyTiles(), dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Gemma3Projector:
        with torch.device("meta"):
            projection = _Projection(Gemma3Config.from_dict(checkpoint.config))
        fill_weights(projection, checkpoint.locate("projector"), dtype=dtype, device=device)
        return Gemma3Projector(projection)


class Gemma3Projector:
    """Projector: (rows, width) -> (rows, hidden_size)."""

    def __init__(self, projection: _Projection) -> None:
        self._projection = projection

    @property
    def hidden_size(self) -> int:
        return self._projection.mm_input_projection_weight.shape[1]

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        device = self._projection.mm_input_projection_weight.device
        out: torch.Tensor = self._projection(torch.cat([f.to(device) for f in features]))
        return list(out.split([len(f) for f in features]))


class _PooledLayers(VitLayers):
    """SigLIP's layers and average pooling: (tiles, 3, side, side) -> (tiles, pooled rows, width)."""

    def __init__(self, config: Gemma3Config) -> None:
        vision = config.vision_config
        super().__init__(vision, taps=[vision.num_hidden_layers], final_norm=True)
        self._side = vision.image_size // vision.patch_size
        self._pool = self._side // int(config.mm_tokens_per_image**0.5)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        rows = super().forward(pixels).transpose(1, 2)
        plane = rows.reshape(len(rows), -1, self._side, self._side)
        return nn.functional.avg_pool2d(plane, self._pool).flatten(2).transpose(1, 2)


class _Projection(nn.Module):
    def __init__(self, config: Gemma3Config) -> None:
        super().__init__()
        vision = config.vision_config
        self.mm_input_projection_weight = nn.Parameter(
            torch.empty(vision.hidden_size, config.text_config.hidden_size)
        )
        self.mm_soft_emb_norm = Gemma3RMSNorm(vision.hidden_size, eps=vision.layer_norm_eps)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.mm_soft_emb_norm(rows) @ self.mm_input_projection_weight


class InternVl:
    """Loads an InternVL checkpoint in transformers' layout ("-hf")."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileTower:
        config = InternVLConfig.from_dict(checkpoint.config)
        config.vision_config._attn_implementation = "sdpa"
        # The mask token is used only in training. It is not loaded.
        config.vision_config.use_mask_token = False
        with torch.device("meta"):
            layers = _Layers(config)
        fill_weights(layers, checkpoint.locate("tower"), dtype=dtype, device=device)
        return TileTower(layers, AnyTiles(), dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LlavaProjector:
        config = InternVLConfig.from_dict(checkpoint.config)
        with torch.device("meta"):
            linears = _NormAndLinears(
                config.vision_config.hidden_size * _fold_factor(config) ** 2, config.text_config.hidden_size
            )
        fill_weights(linears, checkpoint.locate("projector"), dtype=dtype, device=device)
        return LlavaProjector(linears, activation=ACT2FN[config.projector_hidden_act])


class _Layers(nn.Module):
    """Tower: (tiles, 3, side, side) -> (tiles, rows / 4, 4 * width). Attribute names are the checkpoint's
    tensor names."""

    def __init__(self, config: InternVLConfig) -> None:
        super().__init__()
        vision = config.vision_config
        self.embeddings = InternVLVisionEmbeddings(vision)
        layers = nn.ModuleList(InternVLVisionLayer(vision) for _ in range(vision.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})
        norm = nn.LayerNorm(vision.hidden_size, eps=vision.layer_norm_eps)
        self.layernorm = None if vision.use_mean_pooling else norm
        self._fold = _fold_factor(config)

    @property
    def tile_shape(self) -> tuple[int, int, int]:
        patches = self.embeddings.patch_embeddings
        height, width = patches.image_size
        return (patches.num_channels, height, width)

    @property
    def num_positions(self) -> int:
        return int(self.embeddings.patch_embeddings.num_patches) + 1

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        hidden = self.embeddings(pixels)
        for layer in self.encoder["layer"].children():
            hidden = layer(hidden)
        if self.layernorm is not None:
            hidden = self.layernorm(hidden)
        return self._fold_rows(hidden[:, 1:])

    def _fold_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows with neighbours concatenated along the width, in the same order as transformers'
        `pixel_shuffle`."""
        fold = self._fold
        down, across = self.embeddings.patch_embeddings.patch_shape
        # (tiles, down/fold, fold, across/fold, fold, width): the row within a fold precedes its column
        cells = rows.reshape(len(rows), down // fold, fold, across // fold, fold, -1)
        return cells.permute(0, 1, 3, 2, 4, 5).reshape(len(rows), down * across // fold**2, -1)


class _NormAndLinears(_Linears):
    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__(inner, hidden, bias=True)
        self.layer_norm = nn.LayerNorm(inner)

    def forward(self, rows: torch.Tensor, activation: Activation) -> torch.Tensor:
        return super().forward(self.layer_norm(rows), activation)


def _fold_factor(config: InternVLConfig) -> int:
    return int(1 / config.downsample_ratio)
