"""Checkpoints with random weights, made on the spot: a few MB for tests, any size for timing.

Weights are drawn tensor by tensor from (seed of the part, name), so two checkpoints of one
`tower_seed` hold the same tower bit for bit whatever their language models are. Names,
configs and tokenizers are in the published form, which vLLM and SGLang load unchanged.

Greedy decoding says printable text and never stops early: the rows of `lm_head` for
special and unprintable tokens are zero, so that others always win.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from cornplug.testing import tokenizers
from cornplug.testing.checkpoint_parts import (
    QWEN2_CHAT,
    QWEN2_SPECIAL,
    Text,
    make_folder,
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
"""The shape of LLaVA-1.5's tower: 0.3 billion parameters, 576 rows a picture."""
TINY_QWEN2_VISION: Final[Mapping[str, Any]] = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2}

_CLIP_PIXELS: Final[Mapping[str, Any]] = {
    "do_resize": True,
    "resample": 3,
    "do_center_crop": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "do_convert_rgb": True,
}
_LLAVA_CHAT: Final = (
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
    dtype: str = "float32",
) -> Path:
    """A LLaVA-1.5: CLIP tower, two-layer projector, Llama. Returns `path`.

    `vision` holds CLIPVisionConfig fields (`TINY_CLIP`, `CLIP_L_336`, or `{**TINY_CLIP, ...}`).
    The projector has `llm_seed` unless it is given one of its own. Rows a picture:
    (image_size / patch_size) squared.
    """
    folder = make_folder(path)
    ids = tokenizers.write(
        folder,
        special=("<s>", "</s>", "<pad>", "<image>"),
        eos="</s>",
        pad="<pad>",
        chat_template=_LLAVA_CHAT,
    )
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("llama", ids)
    config = {
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
    }
    edge = vision["image_size"]
    pixels = {
        "image_processor_type": "CLIPImageProcessor",
        "processor_class": "LlavaProcessor",
        **_CLIP_PIXELS,
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
    write_json(folder, config=config, preprocessor_config=pixels, processor_config=processor)
    seeds = {
        "vision_tower.": tower_seed,
        "multi_modal_projector.": llm_seed if projector_seed is None else projector_seed,
        "": llm_seed,
    }
    write_weights(folder, "LlavaForConditionalGeneration", _llava_name, seeds, ids, dtype)
    return folder


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
        **{k: v for k, v in _CLIP_PIXELS.items() if k != "do_center_crop"},
        **{"min_pixels": 56 * 56, "max_pixels": max_pixels},
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    }
    write_json(folder, config=config, preprocessor_config=pixels)
    seeds = {"visual.merger.": llm_seed, "visual.": tower_seed, "": llm_seed}
    write_weights(folder, "Qwen2VLForConditionalGeneration", _qwen2_vl_name, seeds, ids, dtype)
    return folder


def qwen2_text(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    llm_seed: int = 1,
    max_positions: int = 4096,
    dtype: str = "float32",
) -> Path:
    """A Qwen2 without a tower. Returns `path`."""
    folder = make_folder(path)
    ids = tokenizers.write(
        folder, special=QWEN2_SPECIAL, eos="<|im_end|>", pad="<|endoftext|>", chat_template=QWEN2_CHAT
    )
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions).config("qwen2", ids)
    config = {
        **text,
        "architectures": ["Qwen2ForCausalLM"],
        "rope_theta": 1e6,
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    write_json(folder, config=config)
    write_weights(folder, "Qwen2ForCausalLM", lambda name: name, {"": llm_seed}, ids, dtype)
    return folder


def deepseek_v2(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_lora_rank: int = 64,
    rope_dim: int = 32,
    head_dim: int = 32,
    llm_seed: int = 1,
    max_positions: int = 4096,
    dtype: str = "float32",
) -> Path:
    """A DeepSeek-V2 of dense layers: multi-head latent attention (MLA). Returns `path`.

    An engine caches `kv_lora_rank + rope_dim` numbers a token and layer, whatever `heads`.
    """
    folder = make_folder(path)
    ids = tokenizers.write(
        folder, special=QWEN2_SPECIAL, eos="<|im_end|>", pad="<|endoftext|>", chat_template=QWEN2_CHAT
    )
    text = Text(hidden_size, layers, heads, None, None, max_positions).config("deepseek_v2", ids)
    # SGLang's CPU path takes no other rope than the published one.
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": max_positions // 4}
    config = {
        **text,
        "architectures": ["DeepseekV2ForCausalLM"],
        **{"q_lora_rank": None, "kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": rope_dim},
        **{"qk_nope_head_dim": head_dim, "v_head_dim": head_dim},
        # Experts are declared, as the config class wants, and start after the last layer.
        **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
        **{"first_k_dense_replace": layers, "moe_layer_freq": 1, "moe_intermediate_size": hidden_size},
        **{"topk_method": "greedy", "n_group": 1, "topk_group": 1, "scoring_func": "softmax"},
        **{"norm_topk_prob": False, "routed_scaling_factor": 1.0, "attention_bias": False},
        "rope_theta": 1e4,
        "rope_scaling": {**rope, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707},
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    write_json(folder, config=config)
    write_weights(folder, "DeepseekV2ForCausalLM", lambda name: name, {"": llm_seed}, ids, dtype)
    return folder


def _llava_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    name = name.removeprefix("model.")
    if name.startswith("vision_tower."):
        return "vision_tower.vision_model." + name.removeprefix("vision_tower.").removeprefix("vision_model.")
    if name.startswith("language_model."):
        return "language_model.model." + name.removeprefix("language_model.")
    return "language_model." + name if name.startswith("lm_head.") else name


def _qwen2_vl_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)
