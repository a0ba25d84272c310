"""LLaVA-1.5: CLIP's layers up to `vision_feature_layer`, then linear, activation, linear.

The tower is built no deeper than its deepest wanted layer; the post layer norm and the
pooled output belong to nobody here. Layers are transformers' own, attention is SDPA.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import nn
from transformers import CLIPVisionConfig, LlavaConfig
from transformers.activations import ACT2FN
from transformers.models.clip.modeling_clip import CLIPEncoderLayer, CLIPVisionEmbeddings

from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service.protocol import Tensor
from cornplug.encoder_service.towers import tensors, weights
from cornplug.encoder_service.towers.base import Item
from cornplug.errors import CheckpointError

_LAYER: Final = re.compile(r"encoder\.layers\.(\d+)\.")


class LlavaClip:
    """Loads both halves of a LLaVA-1.5 checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> ClipTower:
        config = _config(checkpoint)
        vision: CLIPVisionConfig = config.vision_config
        vision._attn_implementation = "sdpa"
        taps = _taps(config)
        depth = max(taps)
        with torch.device("meta"):
            layers = _Layers(vision, depth)
        weights.fill(
            layers,
            checkpoint.locate("tower"),
            dtype=dtype,
            device=device,
            unused=lambda name: _past_the_cut(name, depth),
        )
        # Not a weight, so on the meta device still.
        layers.embeddings.position_ids = torch.arange(layers.embeddings.num_positions, device=device)[None]
        keep_cls = config.vision_feature_select_strategy == "full"
        return ClipTower(layers, taps=taps, keep_cls=keep_cls, dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LlavaProjector:
        config = _config(checkpoint)
        with torch.device("meta"):
            linears = _Linears(
                inner=config.vision_config.hidden_size * len(_taps(config)),
                hidden=config.text_config.hidden_size,
                bias=config.multimodal_projector_bias,
            )
        weights.fill(linears, checkpoint.locate("projector"), dtype=dtype, device=device)
        return LlavaProjector(linears, activation=ACT2FN[config.projector_hidden_act])


class ClipTower:
    """`pixel_values` (3, height, width) of the size CLIP was trained for -> (patches, width).

    Several tapped layers lie side by side in the width; with `keep_cls` the CLS row comes first.
    """

    def __init__(
        self,
        layers: _Layers,
        *,
        taps: Sequence[int],
        keep_cls: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._layers = layers
        self._taps = taps
        self._first_row = 0 if keep_cls else 1
        self._dtype = dtype
        self._device = device

    def prepare(self, inputs: Mapping[str, Tensor]) -> Item:
        tensors.check_names(inputs, ("pixel_values",))
        pixels = tensors.from_wire("pixel_values", inputs["pixel_values"], tensors.FLOATS)
        if pixels.ndim == 4 and pixels.shape[0] == 1:
            pixels = pixels[0]
        embeddings = self._layers.embeddings
        side = embeddings.image_size
        wanted = (embeddings.patch_embedding.in_channels, side, side)
        if tuple(pixels.shape) != wanted:
            raise tensors.bad_input("pixel_values", f"shape {tuple(pixels.shape)}, want {wanted}")
        pixels = pixels.to(self._dtype)
        return Item(tensors=(pixels,), digests=(tensors.digest_of(pixels),), tokens=embeddings.num_positions)

    @torch.inference_mode()
    def encode(self, items: Sequence[Item]) -> list[torch.Tensor]:
        pixels = torch.stack([item.tensors[0] for item in items]).to(self._device)
        tapped = self._layers(pixels, frozenset(self._taps))
        # (items, rows, width * taps)
        features = torch.cat([tapped[tap][:, self._first_row :] for tap in self._taps], dim=-1)
        return [row.contiguous() for row in features]


class LlavaProjector:
    """(rows, width) -> (rows, hidden_size)."""

    def __init__(self, linears: _Linears, *, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._linears = linears
        self._activation = activation

    @property
    def hidden_size(self) -> int:
        return self._linears.linear_2.out_features

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[Item]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._linears.linear_1.weight.device) for f in features])
        out = self._linears.linear_2(self._activation(self._linears.linear_1(rows)))
        return list(out.split([len(f) for f in features]))


class _Layers(nn.Module):
    """Attribute names are the checkpoint's tensor names, `pre_layrnorm` included."""

    def __init__(self, config: CLIPVisionConfig, depth: int) -> None:
        super().__init__()
        self.embeddings = CLIPVisionEmbeddings(config)
        self.pre_layrnorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.encoder = nn.ModuleDict(
            {"layers": nn.ModuleList(CLIPEncoderLayer(config) for _ in range(depth))}
        )

    def forward(self, pixels: torch.Tensor, taps: frozenset[int]) -> dict[int, torch.Tensor]:
        hidden = self.pre_layrnorm(self.embeddings(pixels))
        tapped = {0: hidden}
        for number, layer in enumerate(self.encoder["layers"].children(), start=1):
            hidden = layer(hidden, None)
            if number in taps:
                tapped[number] = hidden
        return tapped


class _Linears(nn.Module):
    def __init__(self, *, inner: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(inner, hidden, bias=bias)
        self.linear_2 = nn.Linear(hidden, hidden, bias=bias)


def _config(checkpoint: Checkpoint) -> LlavaConfig:
    config = LlavaConfig.from_dict(checkpoint.config)
    if config.vision_config.model_type != "clip_vision_model":
        raise CheckpointError(
            f"LLaVA with a {config.vision_config.model_type} tower is not served; want clip_vision_model",
            reason="unknown_family",
        )
    return config


def _taps(config: LlavaConfig) -> list[int]:
    """Number of layers to run for each wanted hidden state: 0 is the input of the first."""
    total = config.vision_config.num_hidden_layers
    chosen = config.vision_feature_layer
    indices = [chosen] if isinstance(chosen, int) else list(chosen)
    out = [index if index >= 0 else total + 1 + index for index in indices]
    if not out or any(not 0 <= tap <= total for tap in out):
        raise CheckpointError(f"vision_feature_layer {chosen} of {total} layers", reason="config")
    return out


def _past_the_cut(name: str, depth: int) -> bool:
    layer = _LAYER.match(name)
    if layer:
        return int(layer[1]) >= depth
    return name.startswith("post_layernorm.") or name == "embeddings.position_ids"
