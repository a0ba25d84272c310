"""Whisper's encoder for audio of any length, with the projectors of Qwen2-Audio and Ultravox.

The rows of all items in a batch are concatenated without padding. Qwen2-Audio averages pairs of rows. A
processor adds silence to fill 30 seconds. This silence is not computed if the reference implementation masks
it out.

Ultravox splits audio into chunks of up to 30 s:

    (chunks, bins, frames) ──encoder──> (chunks x rows, width) ──stack 8, SwiGLU──> (tokens, hidden)

As in vLLM 0.32 (vllm/model_executor/models/ultravox.py), audio that fits in one chunk has only the rows of
its own frames, and the last stack is padded with zeros. In longer audio, every chunk is padded to the tower's
context. The padding rows attend only to each other, and a chunk's last stack may include some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers import base, varlen_attention
from cornplug.encoder_service.towers.base import TowerInput, TowerItem, fill_weights
from cornplug.encoder_service.towers.log_mel import ChunkedLogMel, LogMelFeatures, PaddedLogMel
from cornplug.errors import CheckpointError

_RMS_EPS: Final = 1e-6


class Ultravox:
    """Loads an Ultravox checkpoint. If the checkpoint has a base checkpoint, the tower is loaded from the
    base."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> UltravoxTower:
        return UltravoxTower.load(checkpoint, dtype, device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> StackingProjector:
        spec = checkpoint.family.projector_spec(checkpoint.config)
        # The config with the LLM's width may be in another checkpoint, so use the shape of a tensor.
        out = checkpoint.tensor_shapes("projector").get("linear_2.weight", (0,))[0]
        with torch.device("meta"):
            module = _Projector(spec, out)
        fill_weights(module, checkpoint.locate("projector"), dtype=dtype, device=device)
        return StackingProjector(module, int(spec["stack_factor"]))

    @staticmethod
    def feature_extractor(preprocessor: Mapping[str, Any]) -> LogMelFeatures:
        return ChunkedLogMel(preprocessor)


class _WhisperTower:
    """Whisper's encoder on one device, the common part of the towers."""

    def __init__(
        self, encoder: WhisperEncoder, shape: WhisperShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._encoder = encoder
        self._shape = shape
        self._dtype = dtype
        self._device = device

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Self:
        encoder = WhisperEncoder.load(checkpoint, dtype, device)
        return cls(encoder, WhisperShape.from_checkpoint(checkpoint), dtype=dtype, device=device)


class UltravoxTower(_WhisperTower):
    """Tower for `audio_features` (chunks, bins, frames) and `audio_lens` (chunks,)
    -> (chunks x rows, width)."""

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        base.check_input_names(inputs, ("audio_features", "audio_lens"))
        mels = base.validate_input("audio_features", inputs["audio_features"], base.FLOAT_DTYPES)
        lens = base.validate_input("audio_lens", inputs["audio_lens"], base.INTEGER_DTYPES).reshape(-1)
        if mels.ndim != 3 or mels.shape[1] != self._shape.num_mel_bins:
            want = ("chunks", self._shape.num_mel_bins, "frames")
            raise base.bad_input("audio_features", f"shape must be {want}, not {tuple(mels.shape)}")
        chunks, _, frames = mels.shape
        if frames > self._shape.max_frames:
            raise base.bad_input(
                "audio_features", f"{frames} frames exceed the limit of {self._shape.max_frames}"
            )
        if len(lens) != chunks or not 1 <= int(lens.min()) <= int(lens.max()) <= frames:
            raise base.bad_input("audio_lens", f"must have {chunks} lengths of 1 to {frames} frames")
        if chunks == 1:  # an engine pads a chunk to the length of the request's other audio
            frames = int(lens[0])
        mels = mels[:, :, :frames].to(self._dtype).contiguous()
        lens = lens.to(torch.int64)
        rows = _rows_after_convolution(frames)
        return TowerItem(
            tensors=(mels, lens),
            tokens=chunks * rows,
            geometry=(rows, *(_rows_after_convolution(length) for length in lens.tolist())),
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        begun: list[torch.Tensor] = []
        lengths: list[int] = []
        for item in items:
            rows, *valid = item.geometry
            for mel, own in zip(item.tensors[0].to(self._device), valid, strict=True):
                begun.append(self._encoder.embed_mel(mel, rows))
                lengths += [own, rows - own] if own < rows else [rows]
        hidden: torch.Tensor = self._encoder.layer_norm(self._encoder.run_layers(torch.cat(begun), lengths))
        return list(hidden.split([item.tokens for item in items]))


class StackingProjector:
    """Projector: (chunks x rows, width) -> (tokens, hidden_size)."""

    def __init__(self, module: _Projector, stack: int) -> None:
        self._module = module
        self._stack = stack

    @property
    def hidden_size(self) -> int:
        return int(self._module.linear_2.out_features)

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        device = self._module.ln_pre.weight.device
        stacks = [self._stack_rows(f.to(device), item) for f, item in zip(features, items, strict=True)]
        out: torch.Tensor = self._module(torch.cat(stacks))
        return list(out.split([len(stack) for stack in stacks]))

    def _stack_rows(self, features: torch.Tensor, item: TowerItem) -> torch.Tensor:
        """Concatenate every `stack` consecutive rows of an item, and drop results that contain only padding.
        Return shape (tokens, width x stack)."""
        rows, *valid = item.geometry
        chunks = functional.pad(features.unflatten(0, (-1, rows)), (0, 0, 0, -rows % self._stack))
        stacks = chunks.unflatten(1, (-1, self._stack)).flatten(2)
        return torch.cat([chunk[: -(-own // self._stack)] for chunk, own in zip(stacks, valid, strict=True)])


class _Projector(nn.Module):
    """Layers of the projector. Attribute names are the checkpoint's tensor names."""

    def __init__(self, spec: Mapping[str, Any], out: int) -> None:
        super().__init__()
        stacked, hidden = spec["d_model"] * spec["stack_factor"], spec["hidden_size"]
        self._gated = spec["projector_act"] == "swiglu"
        if not self._gated and spec["projector_act"] not in ACT2FN:
            raise CheckpointError(f"projector_act {spec['projector_act']!r} is unknown", reason="bad_config")
        middle = hidden // 2 if self._gated else hidden
        self.ln_pre = nn.RMSNorm(stacked, eps=_RMS_EPS)
        self.linear_1 = nn.Linear(stacked, hidden, bias=False)
        self.linear_2 = nn.Linear(middle, out, bias=False)
        # The norm is last up to v0.4.1, and in the middle from v0.5.
        if spec["projector_ln_mid"]:
            self.ln_mid = nn.RMSNorm(middle, eps=_RMS_EPS)
        else:
            self.ln_post = nn.RMSNorm(out, eps=_RMS_EPS)
        self._has_middle_norm = bool(spec["projector_ln_mid"])
        self._act = None if self._gated else ACT2FN[spec["projector_act"]]

    def forward(self, stacks: torch.Tensor) -> torch.Tensor:
        hidden = self.linear_1(self.ln_pre(stacks))
        if self._act is None:
            value, gate = hidden.chunk(2, dim=-1)
            hidden = value * functional.silu(gate)
        else:
            hidden = self._act(hidden)
        if self._has_middle_norm:
            hidden = self.ln_mid(hidden)
        hidden = self.linear_2(hidden)
        out: torch.Tensor = hidden if self._has_middle_norm else self.ln_post(hidden)
        return out


def _rows_after_convolution(frames: int) -> int:
    """Return the number of rows after the convolution of stride two."""
    return (frames - 1) // 2 + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WhisperShape:
    """Fields of a family's tower spec (`checkpoints/whisper_families.py`) that determine the encoder's
    shape."""

    num_mel_bins: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    d_model: int
    activation_function: str
    max_source_positions: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> WhisperShape:
        spec = checkpoint.family.tower_spec(checkpoint.config)
        shape = cls(**{name: spec[name] for name in cls.__slots__})
        if shape.d_model % shape.encoder_attention_heads or shape.activation_function not in ACT2FN:
            raise CheckpointError(
                f"audio_config: {shape.encoder_attention_heads} heads in {shape.d_model}, "
                f"{shape.activation_function}",
                reason="bad_config",
            )
        return shape

    @property
    def max_frames(self) -> int:
        return 2 * self.max_source_positions


class WhisperEncoder(nn.Module):
    """Whisper's encoder. Attribute names are the checkpoint's tensor names."""

    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        width = shape.d_model
        self.conv1 = nn.Conv1d(shape.num_mel_bins, width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(width, width, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(shape.max_source_positions, width)
        self.layers = nn.ModuleList(_Layer(shape) for _ in range(shape.encoder_layers))
        self.layer_norm = nn.LayerNorm(width)

    @classmethod
    def load(cls, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> WhisperEncoder:
        with torch.device("meta"):
            encoder = cls(WhisperShape.from_checkpoint(checkpoint))
        fill_weights(encoder, checkpoint.locate("tower"), dtype=dtype, device=device)
        return encoder

    def embed_mel(self, mel: torch.Tensor, count: int) -> torch.Tensor:
        """Return the first `count` rows of the layers' input for one mel spectrogram (bins, frames)."""
        hidden = functional.gelu(self.conv1(mel[None]))
        hidden = functional.gelu(self.conv2(hidden))[0, :, :count]
        return hidden.T + self.embed_positions.weight[:count]

    def run_layers(self, hidden: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """Run the layers without the final norm. `lengths` has the number of rows of each segment, and
        attention does not cross segments."""
        segments = varlen_attention.SegmentOffsets(lengths, hidden.device)
        for layer in self.layers:
            hidden = layer(hidden, segments)
        return hidden


class _Layer(nn.Module):
    def __init__(self, shape: WhisperShape) -> None:
        super().__init__()
        width = shape.d_model
        self.self_attn = _WhisperAttention(width, shape.encoder_attention_heads)
        self.self_attn_layer_norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, shape.encoder_ffn_dim)
        self.fc2 = nn.Linear(shape.encoder_ffn_dim, width)
        self.final_layer_norm = nn.LayerNorm(width)
        self._activation = ACT2FN[shape.activation_function]

    def forward(self, hidden: torch.Tensor, segments: varlen_attention.SegmentOffsets) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), segments)
        hidden = hidden + self.fc2(self._activation(self.fc1(self.final_layer_norm(hidden))))
        if hidden.dtype == torch.float16:  # as in transformers, because float16 may overflow
            most = torch.finfo(torch.float16).max - 1000
            hidden = hidden.clamp(-most, most)
        return hidden


class _WhisperAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, segments: varlen_attention.SegmentOffsets) -> torch.Tensor:
        q, k, v = (p(hidden).unflatten(1, (self._heads, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        out: torch.Tensor = self.out_proj(varlen_attention.attention(q, k, v, segments).flatten(1))
        return out


class Qwen2Audio:
    """Loads a Qwen2-Audio checkpoint."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Qwen2AudioTower:
        return Qwen2AudioTower.load(checkpoint, dtype, device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> LinearProjector:
        hidden = checkpoint.tensor_shapes("projector").get("linear.bias", (0,))[0]
        with torch.device("meta"):
            module = nn.ModuleDict(
                {"linear": nn.Linear(WhisperShape.from_checkpoint(checkpoint).d_model, hidden)}
            )
        fill_weights(module, checkpoint.locate("projector"), dtype=dtype, device=device)
        return LinearProjector(module)

    @staticmethod
    def feature_extractor(preprocessor: Mapping[str, Any]) -> LogMelFeatures:
        return PaddedLogMel(preprocessor)


class Qwen2AudioTower(_WhisperTower):
    """Tower for `input_features` (bins, frames) and `feature_attention_mask` (frames,)
    -> (rows / 2, width)."""

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        base.check_input_names(inputs, ("input_features", "feature_attention_mask"))
        mel = base.validate_input("input_features", inputs["input_features"], base.FLOAT_DTYPES)
        mask = base.validate_input(
            "feature_attention_mask", inputs["feature_attention_mask"], base.INTEGER_DTYPES
        ).reshape(-1)
        want = (self._shape.num_mel_bins, self._shape.max_frames)
        if tuple(mel.shape) not in (want, (1, *want)):
            raise base.bad_input("input_features", f"shape must be {want}, not {tuple(mel.shape)}")
        frames = int(mask.sum())
        if len(mask) != want[1] or not bool((mask[:frames] == 1).all()):
            raise base.bad_input("feature_attention_mask", f"must have {want[1]} values: ones, then zeros")
        rows = (frames - 1) // 2 + 1
        if rows < 2:
            raise base.bad_input("feature_attention_mask", f"{frames} frames are too few for a row")
        # The convolutions for the last row read the row's own two frames and the next frame.
        mel = mel.reshape(want)[:, : 2 * rows + 1].to(self._dtype).contiguous()
        length = torch.tensor([rows])
        return TowerItem(
            tensors=(mel, length),
            tokens=rows,
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        lengths = [item.tokens for item in items]
        begun = [self._encoder.embed_mel(item.tensors[0].to(self._device), item.tokens) for item in items]
        hidden = self._encoder.run_layers(torch.cat(begun), lengths)
        # Average pairs of rows. An odd last row is dropped, as in average pooling.
        pairs = [part[: len(part) // 2 * 2].unflatten(0, (-1, 2)).mean(1) for part in hidden.split(lengths)]
        normed: torch.Tensor = self._encoder.layer_norm(torch.cat(pairs))
        return list(normed.split([len(pair) for pair in pairs]))


class LinearProjector:
    """Projector: (rows, width) -> (rows, hidden_size)."""

    def __init__(self, module: nn.ModuleDict) -> None:
        self._linear = module["linear"]

    @property
    def hidden_size(self) -> int:
        return int(self._linear.out_features)

    @torch.inference_mode()
    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        rows = torch.cat([f.to(self._linear.weight.device) for f in features])
        out: torch.Tensor = self._linear(rows)
        return list(out.split([len(f) for f in features]))
