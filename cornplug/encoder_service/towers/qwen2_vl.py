"""Qwen2-VL and Qwen2.5-VL. The tower's blocks accept media of any resolution, and the projector is the 2x2
merger. Blocks are transformers' own, except for attention (`varlen_attention`).

The input is an image or a video as rows of patches, and its grid of (frames, height, width). Items of any
size are concatenated in a batch without padding. Patches are ordered by frame. Within a frame, the 2x2
patches that are merged into one row for the LLM are adjacent. In a grid, a frame consists of
`temporal_patch_size` frames of the video. An image is one frame.

Qwen2.5-VL's blocks attend inside windows or inside whole frames. Rows are sorted by window before the first
block, and sorted back after the last block. Torch computes each norm in one kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionPatchEmbed,
    Qwen2_5_VLPatchMerger,
    Qwen2_5_VLVisionBlock,
    Qwen2_5_VLVisionRotaryEmbedding,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import (
    PatchEmbed,
    PatchMerger,
    Qwen2VLVisionBlock,
    Qwen2VLVisionRotaryEmbedding,
)
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.model_family import PIXEL_NORM
from cornplug.encoder_service.towers import base
from cornplug.encoder_service.towers.base import TowerInput, TowerItem, fill_weights
from cornplug.encoder_service.towers.varlen_attention import PackedAttention, SegmentOffsets

_IMAGE_INPUTS: Final = ("pixel_values", "image_grid_thw")
_VIDEO_INPUTS: Final = ("pixel_values_videos", "video_grid_thw")


class Qwen2Vl:
    """Loads a Qwen2-VL checkpoint."""

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
        return Qwen2VlMerger(merger, hidden_size=config.hidden_size, merge_size=config.spatial_merge_size)


class Qwen2VlTower:
    """Tower for the patches of an image or a video (`PatchInputs`). Its output has shape (patches,
    embed_dim)."""

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
        self._inputs = PatchInputs.from_config(config, dtype)
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        return self._inputs.prepare_item(inputs)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        pixels, grids = pack_items(items, self._device, self._inputs.dtype)
        hidden = embed_patches(pixels, self._blocks.patch_embed.proj)
        cos_sin = self._rotary(hidden, get_vision_position_ids(grids, self._inputs.merge_size))
        segments = SegmentOffsets(frame_lengths(grids), self._device)
        for block in self._blocks.blocks:
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=cos_sin)
        return list(hidden.split([item.tokens for item in items]))


class Qwen2VlMerger:
    """Projector: (patches, width) -> (patches / merge², hidden_size). Also used by Qwen2.5-VL."""

    def __init__(self, merger: nn.Module, *, hidden_size: int, merge_size: int) -> None:
        self._merger = merger
        self._device = next(merger.parameters()).device
        self._hidden_size = hidden_size
        self._patches_per_row = merge_size**2

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._device) for f in features])
        out: torch.Tensor = self._merger(rows)
        return list(out.split([len(f) // self._patches_per_row for f in features]))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchInputs:
    """Validates the patches of media items. Thread-safe."""

    values_per_patch: int
    """Number of values per patch: channels * temporal patch * height * width."""
    merge_size: int
    """Number of patches per side of the square that is merged into one row."""
    dtype: torch.dtype

    @classmethod
    def from_config(cls, config: Any, dtype: torch.dtype) -> PatchInputs:
        """Create the validator for a tower with this transformers vision config."""
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return cls(values_per_patch=values, merge_size=config.spatial_merge_size, dtype=dtype)

    def prepare_item(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Validate one media item's inputs and return its `TowerItem`.

        The inputs are `pixel_values` (patches, values) and `image_grid_thw` (3,), or the equivalent fields of
        a video. Pixels are normalised, or uint8 with `pixel_norm` (2, channels): float32 factors and
        summands. The tower then normalises them on its device. Raises EncoderRefused("bad_input")."""
        names = _VIDEO_INPUTS if any(name in inputs for name in _VIDEO_INPUTS) else _IMAGE_INPUTS
        base.check_input_names(inputs, (*names, PIXEL_NORM), optional=(PIXEL_NORM,))
        grid = base.validate_input(names[1], inputs[names[1]], base.INTEGER_DTYPES).to(torch.int64)
        if tuple(grid.shape) not in ((3,), (1, 3)):
            raise base.bad_input(names[1], f"shape must be (3,) for one medium, not {tuple(grid.shape)}")
        t, h, w = grid.reshape(3).tolist()
        if min(t, h, w) <= 0 or h % self.merge_size or w % self.merge_size:
            raise base.bad_input(
                names[1], f"{t, h, w}: height and width must be multiples of {self.merge_size}"
            )
        pixels = base.validate_input(names[0], inputs[names[0]], (*base.FLOAT_DTYPES, "uint8"))
        if tuple(pixels.shape) != (t * h * w, self.values_per_patch):
            raise base.bad_input(
                names[0],
                f"shape must be {(t * h * w, self.values_per_patch)} for grid {t, h, w}, "
                f"not {tuple(pixels.shape)}",
            )
        if pixels.dtype != torch.uint8:
            if PIXEL_NORM in inputs:
                raise base.bad_input(PIXEL_NORM, "only uint8 pixels are normalised")
            return TowerItem(tensors=(pixels.to(self.dtype), grid.reshape(1, 3)), tokens=t * h * w)
        if PIXEL_NORM not in inputs:
            raise base.bad_input(PIXEL_NORM, f"missing; {names[0]} has raw pixels")
        norm = base.validate_input(PIXEL_NORM, inputs[PIXEL_NORM], ("float32",))
        if norm.ndim != 2 or norm.shape[0] != 2 or self.values_per_patch % norm.shape[1]:
            raise base.bad_input(PIXEL_NORM, f"shape must be (2, channels), not {tuple(norm.shape)}")
        return TowerItem(tensors=(pixels, grid.reshape(1, 3), norm), tokens=t * h * w)


def pack_items(
    items: Sequence[TowerItem], device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all patches, normalised and concatenated on the device, and all grids (items, 3) on the CPU."""
    pixels = base.concat_on_device([_normalise(item, device, dtype) for item in items], device)
    return pixels, torch.cat([item.tensors[1] for item in items])


def _normalise(item: TowerItem, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    pixels = item.tensors[0]
    return pixels if pixels.dtype != torch.uint8 else normalise(pixels.to(device), item.tensors[2], dtype)


def normalise(pixels: torch.Tensor, norm: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return uint8 patches (patches, values) as `pixels * factor + summand` for each channel.

    As in vLLM's `FusedMMInputNorm.forward_native`, the product and the sum are each rounded to float32. One
    fused operation would give other bits.
    """
    factors, summands = norm.to(pixels.device).unsqueeze(-1)
    by_channel = pixels.view(len(pixels), len(factors), -1)
    return (by_channel * factors + summands).view(len(pixels), -1).to(dtype)


def frame_lengths(grids: torch.Tensor) -> list[int]:
    """Return the number of patches of each frame. Attention does not cross frames."""
    return [height * width for t, height, width in grids.tolist() for _ in range(t)]


def embed_patches(pixels: torch.Tensor, proj: nn.Conv3d) -> torch.Tensor:
    """Apply the patch embedding `proj` as one matmul, and return (patches, width).

    The kernel of `proj` covers exactly one patch. A convolution over thousands of single patches would take
    longer than a whole block.
    """
    return linear(pixels, proj.weight.flatten(1), proj.bias)


class RotaryTable(nn.Module):
    """Cosines and sines for `apply_rotary`, from the family's rotary module in transformers."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = rotary

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines, each of shape (patches, head_dim / 2), in float32 on `like`'s device.

        `positions` has the row and column of each patch, of shape (patches, 2).
        """
        cos, sin = self._rotary(like, positions.to(like.device))
        # transformers repeats the values for the second half.
        half = cos.shape[-1] // 2
        return cos[:, :half], sin[:, :half]


class Qwen25Vl:
    """Loads a Qwen2.5-VL checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen25VlTower:
        config = _vision_config_2_5(checkpoint)
        with torch.device("meta"):
            blocks = _Qwen25Blocks(config)
        fill_weights(blocks, checkpoint.locate("tower"), dtype=dtype, device=device)
        rotary = Qwen2_5_VLVisionRotaryEmbedding(config).to(device)
        return Qwen25VlTower(blocks, rotary, config, dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen2VlMerger:
        config = _vision_config_2_5(checkpoint)
        merge = config.spatial_merge_size
        with torch.device("meta"):
            merger = Qwen2_5_VLPatchMerger(
                dim=config.out_hidden_size, context_dim=config.hidden_size, spatial_merge_size=merge
            )
        fill_weights(merger, checkpoint.locate("projector"), dtype=dtype, device=device)
        return Qwen2VlMerger(merger, hidden_size=config.out_hidden_size, merge_size=merge)


class Qwen25VlTower:
    """Tower for the patches of an image or a video (`PatchInputs`). Its output has shape (patches,
    hidden_size)."""

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
        self._inputs = PatchInputs.from_config(config, dtype)
        self._patch_size = int(config.patch_size)
        self._window_size = config.window_size
        self._full_attention_blocks = frozenset(config.fullatt_block_indexes)
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        return self._inputs.prepare_item(inputs)

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        pixels, grids = pack_items(items, self._device, self._inputs.dtype)
        order, lengths = self._order_by_window(grids)
        windows = SegmentOffsets(lengths, self._device)
        whole = SegmentOffsets(frame_lengths(grids), self._device)
        # From here on the patches of a window are contiguous. The order of frames does not change.
        hidden = embed_patches(pixels, self._blocks.patch_embed.proj)[order.to(self._device)]
        cos_sin = self._rotary(hidden, get_vision_position_ids(grids, self._inputs.merge_size)[order])
        for number, block in enumerate(self._blocks.blocks):
            segments = whole if number in self._full_attention_blocks else windows
            hidden = block(hidden, cu_seqlens=segments, position_embeddings=cos_sin)
        back = torch.argsort(order).to(self._device)
        return list(hidden[back].split([item.tokens for item in items]))

    def _order_by_window(self, grids: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
        """Return (order that sorts all items' patches by window, number of patches of each window).

        Within a frame, whole windows come before windows that are cut at an edge, so that windows of equal
        size are adjacent.
        """
        merge = self._inputs.merge_size
        groups, ends = get_vision_window_index(
            grids, spatial_merge_size=merge, window_size=self._window_size, patch_size=self._patch_size
        )
        # transformers numbers groups of merge² patches. The patches of a group stay together.
        order = (groups[:, None] * merge**2 + torch.arange(merge**2)).reshape(-1)
        lengths = ends.diff()
        frame = torch.searchsorted(torch.tensor(frame_lengths(grids)).cumsum(0), ends[1:])
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


def _vision_config_2_5(checkpoint: Checkpoint) -> Qwen2_5_VLVisionConfig:
    return Qwen2_5_VLConfig.from_dict(checkpoint.config).vision_config
