"""Checkpoints with random weights, made on the spot: a few MB for tests, any size for timing.

Weights are drawn tensor by tensor from (seed of the part, name), so two checkpoints of one
`tower_seed` hold the same tower bit for bit, with any language models. Names,
configs and tokenizers are in the published form, which vLLM and SGLang load unchanged.

Greedy decoding says printable text and never stops early: the rows of `lm_head` for
special and unprintable tokens are zero, so that others always win.

One module a group of families (`llava_checkpoints`, `qwen_checkpoints`, ...); all recipes are named here.
"""

from __future__ import annotations

from devkit.checkpoints.any_families import ANY_FAMILIES
from devkit.checkpoints.any_family import any_family
from devkit.checkpoints.audio import TINY_WHISPER, qwen2_audio, ultravox
from devkit.checkpoints.drafts import eagle3_head, eagle_head
from devkit.checkpoints.glm import TINY_GLM_VISION, glm4v
from devkit.checkpoints.hybrids import (
    falcon_h1,
    gemma3n_text,
    gpt_oss,
    lfm2,
    llama4_text,
    llama_windowed,
    mamba2,
)
from devkit.checkpoints.internvl_chat import TINY_INTERN_VIT, internvl_chat
from devkit.checkpoints.llava import CLIP_L_336, TINY_CLIP, llava
from devkit.checkpoints.majority import majority, majority_head
from devkit.checkpoints.qwen import (
    QWEN2_5_VISION,
    TINY_QWEN2_5_VISION,
    TINY_QWEN2_VISION,
    TINY_QWEN3_VISION,
    qwen2_5_vl,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
)
from devkit.checkpoints.text import deepseek_v2, mellum, qwen2_eagle, qwen2_text, qwen3_5_text
from devkit.checkpoints.tiles import TINY_INTERNVL, TINY_SIGLIP, gemma3, internvl, llava_next, llava_onevision

__all__ = [
    "ANY_FAMILIES",
    "CLIP_L_336",
    "QWEN2_5_VISION",
    "TINY_CLIP",
    "TINY_GLM_VISION",
    "TINY_INTERNVL",
    "TINY_INTERN_VIT",
    "TINY_QWEN2_5_VISION",
    "TINY_QWEN2_VISION",
    "TINY_QWEN3_VISION",
    "TINY_SIGLIP",
    "TINY_WHISPER",
    "any_family",
    "deepseek_v2",
    "eagle3_head",
    "eagle_head",
    "falcon_h1",
    "gemma3",
    "gemma3n_text",
    "glm4v",
    "gpt_oss",
    "internvl",
    "internvl_chat",
    "lfm2",
    "llama4_text",
    "llama_windowed",
    "llava",
    "llava_next",
    "llava_onevision",
    "majority",
    "majority_head",
    "mamba2",
    "mellum",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_eagle",
    "qwen2_text",
    "qwen2_vl",
    "qwen3_5_text",
    "qwen3_vl",
    "qwen3_vl_moe",
    "ultravox",
]
