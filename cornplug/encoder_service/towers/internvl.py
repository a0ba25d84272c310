"""InternVL. The tower is a ViT whose output joins 2x2 neighbours. The projector is a norm and two linear
layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import InternVLConfig
from transformers.activations import ACT2FN
from transformers.models.internvl.modeling_internvl import InternVLVisionEmbeddings, InternVLVisionLayer

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers.base import TowerItem, fill_weights
from cornplug.encoder_service.towers.tiles import AnyTiles, TileTower


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
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> InternVlProjector:
        config = InternVLConfig.from_dict(checkpoint.config)
        with torch.device("meta"):
            linears = _NormAndLinears(
                config.vision_config.hidden_size * _fold_factor(config) ** 2, config.text_config.hidden_size
            )
        fill_weights(linears, checkpoint.locate("projector"), dtype=dtype, device=device)
        return InternVlProjector(linears, activation=ACT2FN[config.projector_hidden_act])


class InternVlProjector:
    """Projector: (rows, 4 * width) -> (rows, hidden_size)."""

    def __init__(
        self, linears: _NormAndLinears, *, activation: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self._linears = linears
        self._activation = activation

    @property
    def hidden_size(self) -> int:
        return self._linears.linear_2.out_features

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._linears.linear_1.weight.device) for f in features])
        inner = self._linears.linear_1(self._linears.layer_norm(rows))
        return list(self._linears.linear_2(self._activation(inner)).split([len(f) for f in features]))


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


class _NormAndLinears(nn.Module):
    def __init__(self, inner: int, hidden: int) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(inner)
        self.linear_1 = nn.Linear(inner, hidden)
        self.linear_2 = nn.Linear(hidden, hidden)


def _fold_factor(config: InternVLConfig) -> int:
    return int(1 / config.downsample_ratio)
