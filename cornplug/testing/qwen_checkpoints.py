"""Tiny Qwens with towers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cornplug.testing import tokenizers
from cornplug.testing.checkpoint_parts import (
    CLIP_PIXELS,
    QWEN2_CHAT,
    QWEN2_SPECIAL,
    Text,
    make_folder,
    token_ids,
    write_json,
    write_weights,
)

TINY_QWEN2_VISION: Final[Mapping[str, Any]] = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2}


def qwen2_vl(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    vision: Mapping[str, Any] = TINY_QWEN2_VISION,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    max_positions: int = 4096,
    max_pixels: int = 28 * 28 * 64,
    dtype: str = "float32",
) -> Path:
    """A Qwen2-VL. Returns `path`. Rows a picture: its pixels after resizing / 28 squared."""
    folder = make_folder(path)
    ids = tokenizers.write(
        folder, special=QWEN2_SPECIAL, eos="<|im_end|>", pad="<|endoftext|>", chat_template=QWEN2_CHAT
    )
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config(
        "qwen2_vl", ids
    )
    half = hidden_size // heads // 2
    # Frequencies for time, height and width, in the published proportion of 1 : 1.5 : 1.5.
    sections = [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]
    config = {
        **text,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": sections},
        "vision_config": {
            **{"model_type": "qwen2_vl", "in_chans": 3, "patch_size": 14, "spatial_patch_size": 14},
            **{"spatial_merge_size": 2, "temporal_patch_size": 2, "hidden_size": hidden_size, **vision},
        },
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        **{k: v for k, v in CLIP_PIXELS.items() if k != "do_center_crop"},
        **{"min_pixels": 56 * 56, "max_pixels": max_pixels},
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    }
    write_json(folder, config=config, preprocessor_config=pixels)
    seeds = {
        "visual.merger.": llm_seed if projector_seed is None else projector_seed,
        "visual.": tower_seed,
        "": llm_seed,
    }
    write_weights(folder, "Qwen2VLForConditionalGeneration", _qwen2_vl_name, seeds, ids, dtype)
    return folder


def _qwen2_vl_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)
