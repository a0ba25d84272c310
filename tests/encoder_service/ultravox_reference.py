"""Ultravox out of transformers' own Whisper and Llama, as vLLM 0.32 puts them together.

transformers has no Ultravox: on the hub it is remote code. Attention is eager, with a mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.whisper.modeling_whisper import WhisperEncoder


class UltravoxConfig(PreTrainedConfig):
    model_type = "ultravox"

    def __init__(
        self, audio_config: Any = None, text_config: Any = None, hidden_size: int = 256, **kwargs: Any
    ) -> None:
        self.hidden_size = hidden_size
        self.stack_factor = kwargs.pop("stack_factor", 8)
        self.projector_act = kwargs.pop("projector_act", "swiglu")
        self.projector_ln_mid = kwargs.pop("projector_ln_mid", False)
        self.audio_config = CONFIG_MAPPING["whisper"](**(audio_config or {}))
        self.text_config = CONFIG_MAPPING["llama"](**(text_config or {}))
        super().__init__(**kwargs)


class Projector(nn.Module):
    def __init__(self, config: UltravoxConfig) -> None:
        super().__init__()
        stacked, out = config.audio_config.d_model * config.stack_factor, config.text_config.hidden_size
        middle = config.hidden_size // 2 if config.projector_act == "swiglu" else config.hidden_size
        self.act = config.projector_act
        self.ln_pre = LlamaRMSNorm(stacked, eps=1e-6)
        self.linear_1 = nn.Linear(stacked, config.hidden_size, bias=False)
        self.linear_2 = nn.Linear(middle, out, bias=False)
        if config.projector_ln_mid:
            self.ln_mid = LlamaRMSNorm(middle, eps=1e-6)
        else:
            self.ln_post = LlamaRMSNorm(out, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear_1(self.ln_pre(x))
        if self.act == "swiglu":
            half = x.shape[-1] // 2
            x = x[..., :half] * nn.functional.silu(x[..., half:])
        else:
            x = nn.functional.gelu(x)
        x = self.linear_2(self.ln_mid(x) if hasattr(self, "ln_mid") else x)
        return self.ln_post(x) if hasattr(self, "ln_post") else x


class UltravoxModel(PreTrainedModel):
    config_class = UltravoxConfig
    _supports_sdpa = True

    def __init__(self, config: UltravoxConfig) -> None:
        super().__init__(config)
        config.audio_config._attn_implementation = "eager"
        self.audio_tower = WhisperEncoder(config.audio_config)
        self.multi_modal_projector = Projector(config)
        self.language_model = LlamaForCausalLM(config.text_config)
        self.post_init()

    def hear(self, made: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(tokens, hidden) of one audio medium."""
        out = []
        for mel, frames in zip(made["audio_features"], made["audio_lens"].tolist(), strict=True):
            rows = self._tower(mel[None], frames)
            stack = self.config.stack_factor
            rows = nn.functional.pad(rows, (0, 0, 0, -rows.shape[1] % stack))
            stacks = rows.reshape(1, rows.shape[1] // stack, -1)
            out.append(self.multi_modal_projector(stacks)[0, : -(-frames // (2 * stack))])
        return torch.cat(out)

    def _tower(self, mel: torch.Tensor, frames: int) -> torch.Tensor:
        """vLLM's UltravoxWhisperEncoder: rows of the audio see each other, and so do rows of filling."""
        tower = self.audio_tower
        hidden = nn.functional.gelu(tower.conv2(nn.functional.gelu(tower.conv1(mel)))).transpose(1, 2)
        hidden = hidden + tower.embed_positions.weight[: hidden.shape[1]]
        own = torch.arange(hidden.shape[1]) < (frames - 1) // 2 + 1
        mask = torch.zeros(len(own), len(own)).masked_fill(own[:, None] != own[None], -torch.inf)
        for layer in tower.layers:
            hidden = layer(hidden, mask[None, None])
        return tower.layer_norm(hidden)
