"""Qwen3-VL. The tower has learned positions and blocks. The projector has a merger for the last layer, and
mergers for some earlier layers (deepstack).

    features   (patches, width * (1 + levels)):  last layer | level 1 | level 2 | ...
    embedding  (rows, hidden * (1 + levels)):    merged, in the same order

Embedding rows have the layout of vLLM 0.32 (Qwen3_VisionTransformer.forward). The LLM adds the levels to the
outputs of its first layers. Blocks are transformers' own, except for attention (`varlen_attention`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import Qwen3VLConfig
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import (
    Qwen3VLVisionBlock,
    Qwen3VLVisionPatchEmbed,
    Qwen3VLVisionPatchMerger,
    Qwen3VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers.base import TowerInput, TowerItem, fill_weights
from cornplug.encoder_service.towers.qwen2_vl import (
    PatchInputs,
    RotaryTable,
    embed_patches,
    frame_lengths,
    pack_items,
)
from cornplug.encoder_service.towers.varlen_attention import PackedAttention, SegmentOffsets


class Qwen3Vl:
    """Loads a Qwen3-VL checkpoint, dense or with a mixture of experts."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen3VlTower:
        config = _vision_config(checkpoint)
        with torch.device("meta"):
            blocks = _Qwen3Blocks(config)
        fill_weights(blocks, checkpoint.locate("tower"), dtype=dtype, device=device)
        rotary = Qwen3VLVisionRotaryEmbedding(config).to(device)
        return Qwen3VlTower(blocks, rotary, config, dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen3VlMergers:
        config = _vision_config(checkpoint)
        with torch.device("meta"):
            mergers = _Mergers(config)
        located = {_merger_name(name): where for name, where in checkpoint.locate("projector").items()}
        fill_weights(mergers, located, dtype=dtype, device=device)
        return Qwen3VlMergers(mergers, config)


class Qwen3VlTower:
    """Tower for the patches of an image or a video (`PatchInputs`). Output: (patches, width * (1 +
    levels))."""

    def __init__(
        self,
        blocks: _Qwen3Blocks,
        rotary: nn.Module,
        config: Qwen3VLVisionConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._blocks = blocks
        self._rotary = RotaryTable(rotary)
        self._inputs = PatchInputs.from_config(config, dtype)
        self._levels = frozenset(config.deepstack_visual_indexes)
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        return self._inputs.prepare_item(inputs)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        pixels, grids = pack_items(items, self._device, self._inputs.dtype)
        hidden = embed_patches(pixels, self._blocks.patch_embed.proj)
        hidden = hidden + self._blocks.interpolate_positions(grids, self._inputs.merge_size).to(hidden.dtype)
        cos_sin = self._rotary(hidden, get_vision_position_ids(grids, self._inputs.merge_size))
        segments = SegmentOffsets(frame_lengths(grids), self._device)
        levels = []
        for number, block in enumerate(self._blocks.blocks):
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=cos_sin)
            if number in self._levels:
                levels.append(hidden)
        return list(torch.cat([hidden, *levels], dim=-1).split([item.tokens for item in items]))


class Qwen3VlMergers:
    """Projector: (patches, width * (1 + levels)) -> (patches / merge², hidden * (1 + levels))."""

    def __init__(self, mergers: _Mergers, config: Qwen3VLVisionConfig) -> None:
        self._mergers = mergers
        self._device = next(mergers.parameters()).device
        self._hidden_size = config.out_hidden_size * (1 + len(config.deepstack_visual_indexes))
        self._patches_per_row = config.spatial_merge_size**2

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._device) for f in features])
        mergers = [self._mergers.last, *self._mergers.deepstack]
        layers = rows.chunk(len(mergers), dim=-1)
        merged = [merger(layer.contiguous()) for merger, layer in zip(mergers, layers, strict=True)]
        return list(torch.cat(merged, dim=-1).split([len(f) // self._patches_per_row for f in features]))


class _Qwen3Blocks(nn.Module):
    """Blocks of the tower. Attribute names are the checkpoint's tensor names."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.patch_embed = Qwen3VLVisionPatchEmbed(config=config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(Qwen3VLVisionBlock(config) for _ in range(config.depth))
        for block in self.blocks:
            block.attn = PackedAttention(config.hidden_size, config.num_heads)

    def interpolate_positions(self, grids: torch.Tensor, merge: int) -> torch.Tensor:
        """Return the learned position table, which is square, interpolated to each grid. The result has shape
        (patches, width) and is float32."""
        table = self.pos_embed.weight
        rows, shares = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=int(len(table) ** 0.5),
            mode="bilinear",
            align_corners=True,
            spatial_merge_size=merge,
        )
        rows, shares = rows.to(table.device), shares.to(table.device)
        # Add one neighbour at a time. A tensor of shape (patches, 4, width) would be the largest tensor of
        # the batch.
        out = table[rows[:, 0]] * shares[:, :1]
        for neighbour in range(1, rows.shape[1]):
            out += table[rows[:, neighbour]] * shares[:, neighbour, None]
        return out


class _Mergers(nn.Module):
    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.last = Qwen3VLVisionPatchMerger(config)
        self.deepstack = nn.ModuleList(
            Qwen3VLVisionPatchMerger(config, use_postshuffle_norm=True)
            for _ in config.deepstack_visual_indexes
        )


def _merger_name(name: str) -> str:
    """Return the name of a merger's tensor in `_Mergers`. Without the published prefixes, only the names for
    the mergers of deepstack levels begin with a number."""
    return f"deepstack.{name}" if name[0].isdigit() else f"last.{name}"


def _vision_config(checkpoint: Checkpoint) -> Qwen3VLVisionConfig:
    # Mixture-of-experts checkpoints have another config class, but the same vision config.
    config = Qwen3VLConfig(
        vision_config={**(checkpoint.config.get("vision_config") or {}), "model_type": "qwen3_vl"}
    )
    vision: Qwen3VLVisionConfig = config.vision_config
    return vision
