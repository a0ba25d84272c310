"""Qwen2-VL. The tower has blocks for media of any resolution, and the projector is the 2x2 merger.

Images and videos of any size are concatenated in a batch without padding. Blocks are transformers' own,
except for attention (`varlen_attention`).
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
from transformers.vision_utils import get_vision_position_ids

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers.base import TowerInput, TowerItem, fill_weights
from cornplug.encoder_service.towers.qwen_patches import (
    PatchInputs,
    RotaryTable,
    embed_patches,
    frames,
    pack_items,
)
from cornplug.encoder_service.towers.varlen_attention import PackedAttention, SegmentOffsets


class Qwen2Vl:
    """Loader of a Qwen2-VL checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen2VlTower:
        config = _vision_config(checkpoint)
        with torch.device("meta"):
            blocks = _Qwen2Blocks(config)
        fill_weights(blocks, checkpoint.locate("tower"), dtype=dtype, device=device)
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
        fill_weights(merger, checkpoint.locate("projector"), dtype=dtype, device=device)
        return Qwen2VlMerger(merger, hidden_size=config.hidden_size, merge=config.spatial_merge_size)


class Qwen2VlTower:
    """Tower for patches of an image or a video (`PatchInputs`) -> (patches, embed_dim)."""

    def __init__(
        self,
        blocks: _Qwen2Blocks,
        rotary: nn.Module,
        config: Qwen2VLVisionConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._blocks = blocks
        self._rotary = RotaryTable(rotary)
        self._inputs = PatchInputs.of(config, dtype)
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        return self._inputs.item(inputs)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        pixels, grids = pack_items(items, self._device)
        hidden = embed_patches(pixels, self._blocks.patch_embed.proj)
        cos_sin = self._rotary(hidden, get_vision_position_ids(grids, self._inputs.merge))
        segments = SegmentOffsets(frames(grids), self._device)
        for block in self._blocks.blocks:
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=cos_sin)
        return list(hidden.split([item.tokens for item in items]))


class Qwen2VlMerger:
    """Projector: (patches, width) -> (patches / merge², hidden_size). Also used by Qwen2.5-VL."""

    def __init__(self, merger: nn.Module, *, hidden_size: int, merge: int) -> None:
        self._merger = merger
        self._device = next(merger.parameters()).device
        self._hidden_size = hidden_size
        self._patches_a_row = merge**2

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._device) for f in features])
        out: torch.Tensor = self._merger(rows)
        return list(out.split([len(f) // self._patches_a_row for f in features]))


class _Qwen2Blocks(nn.Module):
    """Blocks of the tower. Attribute names are the checkpoint's tensor names."""

    def __init__(self, config: Qwen2VLVisionConfig) -> None:
        super().__init__()
        self.patch_embed = PatchEmbed(
            patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size,
            in_channels=config.in_channels,
            embed_dim=config.embed_dim,
        )
        self.blocks = nn.ModuleList(Qwen2VLVisionBlock(config) for _ in range(config.depth))
        for block in self.blocks:
            block.attn = PackedAttention(config.embed_dim, config.num_heads)


def _vision_config(checkpoint: Checkpoint) -> Qwen2VLVisionConfig:
    config = Qwen2VLConfig.from_dict(checkpoint.config)
    return config.vision_config
