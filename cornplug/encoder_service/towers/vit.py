"""Layers of CLIP and SigLIP up to the required depth. They are transformers' own layers, with SDPA as
attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import nn
from transformers import CLIPVisionConfig, SiglipVisionConfig
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionEmbeddings
from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer, SiglipVisionEmbeddings

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers.base import fill_weights

VitConfig: TypeAlias = CLIPVisionConfig | SiglipVisionConfig


class VitLayers(nn.Module):
    """Layers of a tower: (tiles, 3, side, side) -> (tiles, rows, width). Attribute names are the checkpoint's
    tensor names.

    The output concatenates the hidden states after the layers in `taps` along the width. Layers are numbered
    from 1, and tap 0 is the input of the first layer. `first_row` 1 drops CLIP's class row.
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
    def positions(self) -> int:
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


def fill(layers: VitLayers, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Load the tower's weights into layers that were created on the meta device. Raises the same
    errors as `fill_weights`.
    """
    fill_weights(layers, checkpoint.locate("tower"), dtype=dtype, device=device)
    # `position_ids` is not a weight, so it is still on the meta device.
    layers.embeddings.position_ids = torch.arange(layers.positions, device=device)[None]


def _norm(config: VitConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
