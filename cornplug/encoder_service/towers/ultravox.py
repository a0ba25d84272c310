"""Ultravox. The tower is Whisper's encoder on chunks of up to 30 s, and the projector stacks the chunks'
rows.

    (chunks, bins, frames) ──encoder──> (chunks x rows, width) ──stack 8, SwiGLU──> (tokens, hidden)

As in vLLM 0.32 (vllm/model_executor/models/ultravox.py), audio that fits in one chunk has only the rows of
its own frames, and the last stack is padded with zeros. In longer audio, every chunk is padded to the tower's
context. The rows of the padding attend only to each other, and a chunk's last stack may include some of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional
from transformers.activations import ACT2FN

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers import input_checks
from cornplug.encoder_service.towers.base import TowerInput, TowerItem, fill_weights
from cornplug.encoder_service.towers.log_mel import ChunkedLogMel, LogMelFeatures
from cornplug.encoder_service.towers.whisper import WhisperEncoder, WhisperShape
from cornplug.errors import CheckpointError

_RMS_EPS: Final = 1e-6


class Ultravox:
    """Loader of an Ultravox checkpoint. If the checkpoint has a base checkpoint, the tower is loaded from
    it."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> UltravoxTower:
        encoder = WhisperEncoder.load(checkpoint, dtype, device)
        return UltravoxTower(encoder, WhisperShape.of(checkpoint), dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> StackingProjector:
        spec = checkpoint.family.projector_spec(checkpoint.config)
        # The config with the LLM's width may be in another checkpoint, so use the shape of a tensor.
        out = checkpoint.shapes("projector").get("linear_2.weight", (0,))[0]
        with torch.device("meta"):
            module = _Projector(spec, out)
        fill_weights(module, checkpoint.locate("projector"), dtype=dtype, device=device)
        return StackingProjector(module, int(spec["stack_factor"]))

    @staticmethod
    def feature_extractor(preprocessor: Mapping[str, Any]) -> LogMelFeatures:
        return ChunkedLogMel(preprocessor)


class UltravoxTower:
    """Tower for `audio_features` (chunks, bins, frames) and `audio_lens` (chunks,)
    -> (chunks x rows, width)."""

    def __init__(
        self, encoder: WhisperEncoder, shape: WhisperShape, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._encoder = encoder
        self._shape = shape
        self._dtype = dtype
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        input_checks.check_names(inputs, ("audio_features", "audio_lens"))
        mels = input_checks.checked("audio_features", inputs["audio_features"], input_checks.FLOATS)
        lens = input_checks.checked("audio_lens", inputs["audio_lens"], input_checks.INTEGERS).reshape(-1)
        if mels.ndim != 3 or mels.shape[1] != self._shape.num_mel_bins:
            want = ("chunks", self._shape.num_mel_bins, "frames")
            raise input_checks.bad_input("audio_features", f"shape must be {want}, not {tuple(mels.shape)}")
        chunks, _, frames = mels.shape
        if frames > self._shape.max_frames:
            raise input_checks.bad_input(
                "audio_features", f"{frames} frames exceed the limit of {self._shape.max_frames}"
            )
        if len(lens) != chunks or not 1 <= int(lens.min()) <= int(lens.max()) <= frames:
            raise input_checks.bad_input("audio_lens", f"must have {chunks} lengths of 1 to {frames} frames")
        if chunks == 1:  # an engine pads a chunk to the length of the request's other audio
            frames = int(lens[0])
        mels = mels[:, :, :frames].to(self._dtype).contiguous()
        lens = lens.to(torch.int64)
        rows = _rows(frames)
        return TowerItem(
            tensors=(mels, lens),
            tokens=chunks * rows,
            geometry=(rows, *(_rows(length) for length in lens.tolist())),
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        begun: list[torch.Tensor] = []
        lengths: list[int] = []
        for item in items:
            rows, *valid = item.geometry
            for mel, own in zip(item.tensors[0].to(self._device), valid, strict=True):
                begun.append(self._encoder.rows(mel, rows))
                lengths += [own, rows - own] if own < rows else [rows]
        hidden: torch.Tensor = self._encoder.layer_norm(self._encoder.run(torch.cat(begun), lengths))
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
        stacks = [self._stacked(f.to(device), item) for f, item in zip(features, items, strict=True)]
        out: torch.Tensor = self._module(torch.cat(stacks))
        return list(out.split([len(stack) for stack in stacks]))

    def _stacked(self, features: torch.Tensor, item: TowerItem) -> torch.Tensor:
        """Concatenate every `stack` consecutive rows of an item, and drop the results that contain only
        padding. Returns shape (tokens, width x stack)."""
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
        self._middle = bool(spec["projector_ln_mid"])
        self._act = None if self._gated else ACT2FN[spec["projector_act"]]

    def forward(self, stacks: torch.Tensor) -> torch.Tensor:
        hidden = self.linear_1(self.ln_pre(stacks))
        if self._act is None:
            value, gate = hidden.chunk(2, dim=-1)
            hidden = value * functional.silu(gate)
        else:
            hidden = self._act(hidden)
        if self._middle:
            hidden = self.ln_mid(hidden)
        hidden = self.linear_2(hidden)
        out: torch.Tensor = hidden if self._middle else self.ln_post(hidden)
        return out


def _rows(frames: int) -> int:
    """Return the number of rows after the convolution of stride two."""
    return (frames - 1) // 2 + 1
