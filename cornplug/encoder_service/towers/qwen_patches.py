"""Inputs of Qwen's towers: an image or a video as rows of patches, and its grid of (frames, height, width).

Patches are ordered by frame. Within a frame, the 2x2 patches that are merged into one row for the LLM are
adjacent. In a grid, a frame consists of `temporal_patch_size` frames of the video. An image is one frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.nn.functional import linear

from cornplug.encoder_service.towers import input_checks
from cornplug.encoder_service.towers.base import TowerInput, TowerItem

_IMAGE: Final = ("pixel_values", "image_grid_thw")
_VIDEO: Final = ("pixel_values_videos", "video_grid_thw")


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchInputs:
    """Validation of the patches of media. Thread-safe."""

    values: int
    """Number of values per patch: channels * temporal patch * height * width."""
    merge: int
    """Number of patches per side of the square that is merged into one row."""
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype) -> PatchInputs:
        """Create the validation for a tower with this transformers vision config."""
        values = config.in_channels * config.temporal_patch_size * config.patch_size**2
        return cls(values=values, merge=config.spatial_merge_size, dtype=dtype)

    def item(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Validate one medium's inputs and return its item.

        The inputs are `pixel_values` (patches, values) and `image_grid_thw` (3,), or the equivalent fields of
        a video. Raises EncoderRefused("bad_input").
        """
        names = _VIDEO if any(name in inputs for name in _VIDEO) else _IMAGE
        input_checks.check_names(inputs, names)
        grid = input_checks.checked(names[1], inputs[names[1]], input_checks.INTEGERS).to(torch.int64)
        if tuple(grid.shape) not in ((3,), (1, 3)):
            raise input_checks.bad_input(
                names[1], f"shape must be (3,) for one medium, not {tuple(grid.shape)}"
            )
        t, h, w = grid.reshape(3).tolist()
        if min(t, h, w) <= 0 or h % self.merge or w % self.merge:
            raise input_checks.bad_input(
                names[1], f"{t, h, w}: height and width must be multiples of {self.merge}"
            )
        pixels = input_checks.checked(names[0], inputs[names[0]], input_checks.FLOATS)
        if tuple(pixels.shape) != (t * h * w, self.values):
            raise input_checks.bad_input(
                names[0],
                f"shape must be {(t * h * w, self.values)} for grid {t, h, w}, not {tuple(pixels.shape)}",
            )
        pixels, grid = pixels.to(self.dtype), grid.reshape(1, 3)
        return TowerItem(
            tensors=(pixels, grid),
            tokens=t * h * w,
        )


def pack_items(items: Sequence[TowerItem], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all patches concatenated on the device, and all grids (items, 3) on the CPU."""
    pixels = input_checks.concat_on_device([item.tensors[0] for item in items], device)
    return pixels, torch.cat([item.tensors[1] for item in items])


def frames(grids: torch.Tensor) -> list[int]:
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
