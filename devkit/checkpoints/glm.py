"""Tiny GLM-4.1Vs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from devkit import tokenizers
from devkit.checkpoints.parts import CLIP_PIXELS, Text, make_folder, token_ids, write_json, write_weights

TINY_GLM_VISION: Final[Mapping[str, Any]] = {
    **{"depth": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "image_size": 112},
    **{"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3},
    **{"hidden_act": "silu", "rms_norm_eps": 1e-5, "attention_bias": False},
}
_CHAT: Final = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|begin_of_image|><|image|><|end_of_image|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_SPECIAL: Final = (
    "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|begin_of_image|>", "<|end_of_image|>",
    "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>",
)  # fmt: skip


def glm4v(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    vision: Mapping[str, Any] = TINY_GLM_VISION,
    tower_seed: int = 0,
    llm_seed: int = 1,
    max_pixels: int = 28 * 28 * 64,
    dtype: str = "float32",
) -> Path:
    """A GLM-4.1V. Returns `path`. Rows an image: its pixels after resizing / 28 squared."""
    folder = make_folder(path)
    ids = tokenizers.write(
        folder, special=_SPECIAL, eos="<|endoftext|>", pad="<|endoftext|>", chat_template=_CHAT
    )
    text = Text(hidden_size, layers, heads, None, None, 4096)
    architecture = "Glm4vForConditionalGeneration"
    frequencies = hidden_size // heads // 4  # of half of a head
    wide = frequencies * 3 // 8
    config = {
        **text.config("glm4v", ids),
        "architectures": [architecture],
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "default", "mrope_section": [frequencies - 2 * wide, wide, wide]},
        "vision_config": {"model_type": "glm4v", "out_hidden_size": hidden_size, **vision},
        "image_token_id": ids["<|image|>"],
        "video_token_id": ids["<|video|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_end_token_id": ids["<|end_of_image|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
        **token_ids(ids, "<|endoftext|>", "<|endoftext|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    pixels = {
        "image_processor_type": "Glm4vImageProcessor",
        "processor_class": "Glm4vProcessor",
        **{k: v for k, v in CLIP_PIXELS.items() if k != "do_center_crop"},
        # Of the two frames that an image stands for.
        "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * max_pixels},
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    }
    write_json(folder, config=config, preprocessor_config=pixels)
    seeds = {"model.visual.": tower_seed, "": llm_seed}
    write_weights(folder, architecture, lambda name: name, seeds, ids, dtype)
    return folder
