"""Qwen2-VL: native-resolution blocks (the tower), then the 2x2 merger (the projector).

Pictures of any size lie one behind another in a batch, without padding; `cu_seqlens` keeps
attention inside each. Blocks are transformers' own, attention is SDPA.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    PatchEmbed,
    PatchMerger,
    Qwen2VLVisionBlock,
    Qwen2VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids

from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service.protocol import Tensor
from cornplug.encoder_service.towers import tensors, weights
from cornplug.encoder_service.towers.base import Item


class Qwen2Vl:
    """Loads both halves of a Qwen2-VL checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen2VlTower:
        config = _vision_config(checkpoint)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            blocks = _Blocks(config)
        weights.fill(blocks, checkpoint.locate("tower"), dtype=dtype, device=device)
        rotary = Qwen2VLVisionRotaryEmbedding(config).to(device)
        return Qwen2VlTower(blocks, rotary, config, dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen2VlMerger:
        config = _vision_config(checkpoint)
        with torch.device("meta"):
            merger = PatchMerger(
                dim=config.hidden_size,
                context_dim=config.embed_dim,
                spatial_merge_size=config.spatial_merge_size,
            )
        weights.fill(merger, checkpoint.locate("projector"), dtype=dtype, device=device)
        return Qwen2VlMerger(merger, config)


class Qwen2VlTower:
    """`pixel_values` (patches, values) and `image_grid_thw` (3,) -> (patches, embed_dim)."""

    def __init__(
        self,
        blocks: _Blocks,
        rotary: nn.Module,
        config: Qwen2VLVisionConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._blocks = blocks
        self._rotary = rotary
        self._merge = config.spatial_merge_size
        self._values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        self._dtype = dtype
        self._device = device

    def prepare(self, inputs: Mapping[str, Tensor]) -> Item:
        tensors.check_names(inputs, ("pixel_values", "image_grid_thw"))
        grid = tensors.from_wire("image_grid_thw", inputs["image_grid_thw"], tensors.INTEGERS).to(torch.int64)
        if tuple(grid.shape) not in ((3,), (1, 3)):
            raise tensors.bad_input("image_grid_thw", f"shape {tuple(grid.shape)}, want (3,) for one picture")
        t, h, w = grid.reshape(3).tolist()
        if min(t, h, w) <= 0 or h % self._merge or w % self._merge:
            raise tensors.bad_input(
                "image_grid_thw", f"{t, h, w}: height and width must be multiples of {self._merge}"
            )
        pixels = tensors.from_wire("pixel_values", inputs["pixel_values"], tensors.FLOATS)
        if tuple(pixels.shape) != (t * h * w, self._values):
            raise tensors.bad_input(
                "pixel_values",
                f"shape {tuple(pixels.shape)}, want {(t * h * w, self._values)} for grid {t, h, w}",
            )
        pixels, grid = pixels.to(self._dtype), grid.reshape(1, 3)
        return Item(
            tensors=(pixels, grid),
            digests=(tensors.digest_of(pixels), tensors.digest_of(grid)),
            tokens=t * h * w,
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        pixels = torch.cat([item.tensors[0] for item in items]).to(self._device)
        grids = torch.cat([item.tensors[1] for item in items]).to(self._device)
        hidden = self._blocks.patch_embed(pixels)
        turns = self._rotary(hidden, get_vision_position_ids(grids, self._merge))
        seqlens = get_vision_cu_seqlens(grids)
        for block in self._blocks.blocks:
            hidden = block(hidden, cu_seqlens=seqlens, position_embeddings=turns)
        return list(hidden.split([item.tokens for item in items]))


class Qwen2VlMerger:
    """(patches, embed_dim) -> (patches / merge², hidden_size)."""

    def __init__(self, merger: PatchMerger, config: Qwen2VLVisionConfig) -> None:
        self._merger = merger
        self._hidden_size: int = config.hidden_size
        self._patches_a_row: int = config.spatial_merge_size**2

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[Item]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._merger.ln_q.weight.device) for f in features])
        out: torch.Tensor = self._merger(rows)
        return list(out.split([len(f) // self._patches_a_row for f in features]))


class _Blocks(nn.Module):
    """Attribute names are the checkpoint's tensor names."""

    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(
            patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size,
            in_channels=config.in_channels,
            embed_dim=config.embed_dim,
        )
        self.blocks = nn.ModuleList(Qwen2VLVisionBlock(config) for _ in range(config.depth))


def _vision_config(checkpoint: Checkpoint) -> Qwen2VLVisionConfig:
    config = Qwen2VLConfig.from_dict(checkpoint.config)
    return config.vision_config
