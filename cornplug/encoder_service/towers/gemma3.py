"""Gemma 3. The tower is SigLIP with average pooling, and the projector is a norm and one matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import Gemma3Config
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers import vit
from cornplug.encoder_service.towers.base import TowerItem, fill_weights
from cornplug.encoder_service.towers.tiles import AnyTiles, TileTower


class Gemma3:
    """Loader of a Gemma 3 checkpoint. An image is one tile, or several with pan and scan."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> TileTower:
        config = Gemma3Config.from_dict(checkpoint.config)
        config.vision_config._attn_implementation = "sdpa"
        with torch.device("meta"):
            layers = _PooledLayers(config)
        vit.fill(layers, checkpoint, dtype, device)
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


class _PooledLayers(vit.VitLayers):
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
