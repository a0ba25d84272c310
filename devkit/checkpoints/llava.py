"""Tiny LLaVAs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from devkit import tokenizers
from devkit.checkpoints.parts import (
    CLIP_PIXELS,
    Text,
    make_folder,
    nested_llm_name,
    token_ids,
    write_json,
    write_weights,
)

TINY_CLIP: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "projection_dim": 32,
}
CLIP_L_336: Final[Mapping[str, Any]] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
    "projection_dim": 768,
}
"""The shape of LLaVA-1.5's tower: 0.3 billion parameters, 576 rows an image."""

LLAVA_CHAT: Final = (
    "{% for m in messages %}{{ m['role'] | upper }}: "
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<image>\n"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def llava(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    vision: Mapping[str, Any] = TINY_CLIP,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    max_positions: int = 4096,
    config: Mapping[str, Any] = MappingProxyType({}),
    dtype: str = "float32",
) -> Path:
    """A LLaVA-1.5: CLIP tower, two-layer projector, Llama. Returns `path`.

    `vision` holds CLIPVisionConfig fields (`TINY_CLIP`, `CLIP_L_336`, or `{**TINY_CLIP, ...}`).
    The projector has `llm_seed` unless `projector_seed` is given. Rows an image:
    (image_size / patch_size) squared. `config` overrides fields of config.json.
    """
    folder = make_folder(path)
    ids = tokenizers.write(
        folder,
        special=("<s>", "</s>", "<pad>", "<image>"),
        eos="</s>",
        pad="<pad>",
        chat_template=LLAVA_CHAT,
    )
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("llama", ids)
    whole = {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": ids["<image>"],
        "image_seq_length": (vision["image_size"] // vision["patch_size"]) ** 2,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "clip_vision_model", **vision},
        "text_config": text,
        **token_ids(ids, "<s>", "</s>", "<pad>"),
        "torch_dtype": dtype,
        **config,
    }
    edge = vision["image_size"]
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        **CLIP_PIXELS,
        "size": {"shortest_edge": edge},
        "crop_size": {"height": edge, "width": edge},
    }
    processor = {
        "processor_class": "LlavaProcessor",
        "patch_size": vision["patch_size"],
        "vision_feature_select_strategy": "default",
        "image_token": "<image>",
        "num_additional_image_tokens": 1,
    }
    write_json(folder, config=whole, preprocessor_config=pixels, processor_config=processor)
    seeds = {
        "vision_tower.": tower_seed,
        "multi_modal_projector.": llm_seed if projector_seed is None else projector_seed,
        "": llm_seed,
    }
    write_weights(folder, "LlavaForConditionalGeneration", published_llava_name, seeds, ids, dtype)
    return folder


def published_llava_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    name = nested_llm_name(name)
    if name.startswith("vision_tower."):
        return "vision_tower.vision_model." + name.removeprefix("vision_tower.").removeprefix("vision_model.")
    return name
