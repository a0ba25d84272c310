"""Qwen2.5-VL. The tower has blocks with attention inside windows or inside whole frames. The projector is a
merger like that of Qwen2-VL.

Rows are sorted by window before the first block, and sorted back after the last block. Blocks are
transformers' own, except for attention (`varlen_attention`) and norms, which torch computes in one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLPatchMerger,
    Qwen2_5_VLVisionBlock,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers.base import TowerInput, TowerItem, fill_weights
from cornplug.encoder_service.towers.qwen2_vl import Qwen2VlMerger
from cornplug.encoder_service.towers.qwen_patches import (
    PatchInputs,
    RotaryTable,
    embed_patches,
    frames,
    pack_items,
)
from cornplug.encoder_service.towers.varlen_attention import PackedAttention, SegmentOffsets


class Qwen25Vl:
    """Loader of a Qwen2.5-VL checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen25VlTower:
        config = _vision_config(checkpoint)
        with torch.device("meta"):
            blocks = _Qwen25Blocks(config)
        fill_weights(blocks, checkpoint.locate("tower"), dtype=dtype, device=device)
        rotary = Qwen2_5_VLVisionRotaryEmbedding(config).to(device)
        return Qwen25VlTower(blocks, rotary, config, dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen2VlMerger:
        config = _vision_config(checkpoint)
        merge = config.spatial_merge_size
        with torch.device("meta"):
            merger = Qwen2_5_VLPatchMerger(
                dim=config.out_hidden_size, context_dim=config.hidden_size, spatial_merge_size=merge
            )
        fill_weights(merger, checkpoint.locate("projector"), dtype=dtype, device=device)
        return Qwen2VlMerger(merger, hidden_size=config.out_hidden_size, merge=merge)


class Qwen25VlTower:
    """Tower for patches of an image or a video (`PatchInputs`) -> (patches, hidden_size)."""

    def __init__(
        self,
        blocks: _Qwen25Blocks,
        rotary: nn.Module,
        config: Qwen2_5_VLVisionConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._blocks = blocks
        self._rotary = RotaryTable(rotary)
        self._inputs = PatchInputs.of(config, dtype)
        self._patch_size = int(config.patch_size)
        self._window_size = config.window_size
        self._whole_frames = frozenset(config.fullatt_block_indexes)
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        return self._inputs.item(inputs)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        pixels, grids = pack_items(items, self._device)
        order, lengths = self._windows(grids)
        windows = SegmentOffsets(lengths, self._device)
        whole = SegmentOffsets(frames(grids), self._device)
        # From here on the patches of a window are contiguous. The order of frames does not change.
        hidden = embed_patches(pixels, self._blocks.patch_embed.proj)[order.to(self._device)]
        cos_sin = self._rotary(hidden, get_vision_position_ids(grids, self._inputs.merge)[order])
        for number, block in enumerate(self._blocks.blocks):
            segments = whole if number in self._whole_frames else windows
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=cos_sin)
        back = torch.argsort(order).to(self._device)
        return list(hidden[back].split([item.tokens for item in items]))

    def _windows(self, grids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return the order that sorts all items' patches by window, and the number of patches of each window.

        Within a frame, whole windows come before windows that are cut at an edge, so that windows of equal
        size are adjacent.
        """
        merge = self._inputs.merge
        groups, ends = get_vision_window_index(
            grids, spatial_merge_size=merge, window_size=self._window_size, patch_size=self._patch_size
        )
        # transformers numbers groups of merge² patches. The patches of a group stay together.
        order = (groups[:, None] * merge**2 + torch.arange(merge**2)).reshape(-1)
        lengths = ends.diff()
        frame = torch.searchsorted(torch.tensor(frames(grids)).cumsum(0), ends[1:])
        longest = int(lengths.max())
        ranks = torch.argsort(frame * (longest + 1) + longest - lengths, stable=True)
        windows = order.split(lengths.tolist())
        return torch.cat([windows[rank] for rank in ranks.tolist()]), lengths[ranks].tolist()


class _Qwen25Blocks(nn.Module):
    """Blocks of the tower. Attribute names are the checkpoint's tensor names."""

    def __init__(self, config: Qwen2_5_VLVisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.patch_embed = Qwen2_5_VisionPatchEmbed(
            patch_size=config.patch_size,
            temporal_patch_size=config.temporal_patch_size,
            in_channels=config.in_channels,
            embed_dim=width,
        )
        self.blocks = nn.ModuleList(Qwen2_5_VLVisionBlock(config) for _ in range(config.depth))
        for block in self.blocks:
            block.attn = PackedAttention(width, config.num_heads)
            block.norm1 = nn.RMSNorm(width, eps=block.norm1.variance_epsilon)
            block.norm2 = nn.RMSNorm(width, eps=block.norm2.variance_epsilon)


def _vision_config(checkpoint: Checkpoint) -> Qwen2_5_VLVisionConfig:
    return Qwen2_5_VLConfig.from_dict(checkpoint.config).vision_config
