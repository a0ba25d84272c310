"""Tiny models whose images are several tiles: LLaVA-NeXT, LLaVA-OneVision, InternVL; and Gemma 3."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from devkit import tokenizers
from devkit.checkpoints.llava import LLAVA_CHAT, TINY_CLIP, published_llava_name
from devkit.checkpoints.parts import (
    CLIP_PIXELS,
    QWEN2_CHAT,
    QWEN2_SPECIAL,
    Text,
    make_folder,
    token_ids,
    write_json,
    write_weights,
)

TINY_SIGLIP: Final[Mapping[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
    "vision_use_head": False,
}
TINY_INTERNVL: Final[Mapping[str, Any]] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True},
}
_HALF_PIXELS: Final[Mapping[str, Any]] = {
    **{k: v for k, v in CLIP_PIXELS.items() if k != "do_center_crop"},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}
_PIXELS: Final = {k: v for k, v in CLIP_PIXELS.items() if k != "do_center_crop"}
_INTERNVL_TOKENS: Final = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_GEMMA_TOKENS: Final = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}


def llava_next(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    vision: Mapping[str, Any] = TINY_CLIP,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    dtype: str = "float32",
) -> Path:
    """A LLaVA-NeXT (1.6): CLIP over an image's tiles, linears and a newline, Llama. Returns `path`."""
    folder, side = make_folder(path), vision["image_size"]
    ids = _tokenizer(folder, ("<s>", "</s>", "<pad>", "<image>"), "</s>", "<pad>", LLAVA_CHAT)
    pinpoints = [[side, 2 * side], [2 * side, side], [2 * side] * 2, [3 * side, side], [side, 3 * side]]
    config: dict[str, Any] = {
        "model_type": "llava_next",
        "architectures": ["LlavaNextForConditionalGeneration"],
        "image_token_index": ids["<image>"],
        "image_grid_pinpoints": pinpoints,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "clip_vision_model", **vision},
        "text_config": Text(hidden_size, layers, heads, None, None, 4096).config("llama", ids),
        **token_ids(ids, "<s>", "</s>", "<pad>"),
        "torch_dtype": dtype,
    }
    pixels = {
        "image_processor_type": "LlavaNextImageProcessor",
        **CLIP_PIXELS,
        **{"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}},
        **{"do_pad": True, "image_grid_pinpoints": pinpoints},
    }
    processor = {
        "processor_class": "LlavaNextProcessor",
        **{"patch_size": vision["patch_size"], "image_token": "<image>"},
        **{"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    }
    write_json(folder, config=config, preprocessor_config=pixels, processor_config=processor)
    seeds = _seeds(tower_seed, llm_seed, projector_seed)
    write_weights(folder, config["architectures"][0], published_llava_name, seeds, ids, dtype)
    return folder


def llava_onevision(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    vision: Mapping[str, Any] = TINY_SIGLIP,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    dtype: str = "float32",
) -> Path:
    """A LLaVA-OneVision: SigLIP over an image's tiles (up to 6 x 6), Qwen2. Returns `path`."""
    folder, side = make_folder(path), vision["image_size"]
    special = (*QWEN2_SPECIAL, "<image>", "<video>")
    ids = _tokenizer(folder, special, "<|im_end|>", "<|endoftext|>", _with_image_token("<image>"))
    pinpoints = [[side * down, side * across] for down, across in product(range(1, 7), range(1, 7))]
    config: dict[str, Any] = {
        "model_type": "llava_onevision",
        "architectures": ["LlavaOnevisionForConditionalGeneration"],
        "image_token_index": ids["<image>"],
        "video_token_index": ids["<video>"],
        "image_grid_pinpoints": pinpoints,
        "vision_aspect_ratio": "anyres_max_9",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "siglip_vision_model", **vision},
        "text_config": Text(hidden_size, layers, heads, None, None, 4096).config("qwen2", ids),
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    size = {"height": side, "width": side}
    pixels = {
        "image_processor_type": "LlavaOnevisionImageProcessor",
        **{**_HALF_PIXELS, "size": size, "do_pad": True, "image_grid_pinpoints": pinpoints},
    }
    videos = {"video_processor_type": "LlavaOnevisionVideoProcessor", **_HALF_PIXELS, "size": size}
    processor = {
        "processor_class": "LlavaOnevisionProcessor",
        **{"num_image_tokens": (side // vision["patch_size"]) ** 2, "vision_aspect_ratio": "anyres_max_9"},
        **{"vision_feature_select_strategy": "full", "image_token": "<image>", "video_token": "<video>"},
    }
    write_json(
        folder,
        config=config,
        preprocessor_config=pixels,
        processor_config=processor,
        video_preprocessor_config=videos,
    )
    seeds = _seeds(tower_seed, llm_seed, projector_seed)
    write_weights(folder, config["architectures"][0], published_llava_name, seeds, ids, dtype)
    return folder


def internvl(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    vision: Mapping[str, Any] = TINY_INTERNVL,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    dtype: str = "float32",
) -> Path:
    """An InternVL in the "-hf" layout: ViT over up to 4 tiles and a thumbnail, Qwen2. Returns `path`."""
    folder, side = make_folder(path), vision["image_size"][0]
    special = (*QWEN2_SPECIAL, *_INTERNVL_TOKENS.values())
    chat = _with_image_token("<IMG_CONTEXT>")
    ids = _tokenizer(folder, special, "<|im_end|>", "<|endoftext|>", chat, _INTERNVL_TOKENS)
    rows = (side // vision["patch_size"][0] // 2) ** 2
    config: dict[str, Any] = {
        "model_type": "internvl",
        "architectures": ["InternVLForConditionalGeneration"],
        "image_token_id": ids["<IMG_CONTEXT>"],
        "image_seq_length": rows,
        "downsample_ratio": 0.5,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "internvl_vision", **vision},
        "text_config": Text(hidden_size, layers, heads, None, None, 4096).config("qwen2", ids),
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    # As published: the file says no crops, and the processor class asks for them all the same.
    size = {"height": side, "width": side}
    crops = {"crop_to_patches": False, "min_patches": 1, "max_patches": 4}
    pixels = {"image_processor_type": "GotOcr2ImageProcessor", **_PIXELS, "size": size, **crops}
    videos = {"video_processor_type": "InternVLVideoProcessor", **_PIXELS, "size": size}
    processor = {"processor_class": "InternVLProcessor", "image_seq_length": rows}
    write_json(
        folder,
        config=config,
        preprocessor_config=pixels,
        processor_config=processor,
        video_preprocessor_config=videos,
    )
    seeds = _seeds(tower_seed, llm_seed, projector_seed)
    write_weights(folder, config["architectures"][0], _internvl_name, seeds, ids, dtype)
    return folder


def gemma3(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    vision: Mapping[str, Any] = TINY_SIGLIP,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    dtype: str = "float32",
) -> Path:
    """A Gemma 3: SigLIP, 2 x 2 pooling, Gemma. Its head is tied to its embeddings, so that, unlike the
    others, it may say anything. Returns `path`."""
    folder, side = make_folder(path), vision["image_size"]
    special = ("<pad>", "<eos>", "<bos>", "<end_of_turn>", *_GEMMA_TOKENS.values())
    # Single tokens in Gemma's vocabulary, which vLLM looks up.
    newlines = tuple("\n" * n for n in (1, 2, 3, 4))
    # No newline behind an image, as in Gemma's own: vLLM 0.32 then fails to find its image again.
    chat = LLAVA_CHAT.replace("<image>\n", "<start_of_image>")
    ids = _tokenizer(folder, (*special, *newlines), "<eos>", "<pad>", chat, _GEMMA_TOKENS)
    rows = (side // vision["patch_size"] // 2) ** 2
    text = Text(hidden_size, layers, heads, None, None, 4096).config("gemma3_text", ids)
    config: dict[str, Any] = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "image_token_index": ids["<image_soft_token>"],
        "mm_tokens_per_image": rows,
        "tie_word_embeddings": True,
        "vision_config": {"model_type": "siglip_vision_model", **vision},
        "text_config": {
            **{k: v for k, v in text.items() if k not in ("hidden_act", "tie_word_embeddings")},
            **{"head_dim": hidden_size // heads, "query_pre_attn_scalar": hidden_size // heads},
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 1024,
        },
        **token_ids(ids, "<bos>", "<eos>", "<pad>"),
        "torch_dtype": dtype,
    }
    pixels = {
        "image_processor_type": "Gemma3ImageProcessor",
        **{**_HALF_PIXELS, "resample": 2, "do_convert_rgb": None, "do_pan_and_scan": None},
        **{"size": {"height": side, "width": side}, "image_seq_length": rows},
    }
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": rows}
    write_json(folder, config=config, preprocessor_config=pixels, processor_config=processor)
    seeds = _seeds(tower_seed, llm_seed, projector_seed)
    write_weights(folder, config["architectures"][0], published_llava_name, seeds, ids, dtype)
    return folder


def _seeds(tower: int, llm: int, projector: int | None) -> dict[str, int]:
    between = llm if projector is None else projector
    return {"vision_tower.": tower, "multi_modal_projector.": between, "image_newline": between, "": llm}


def _tokenizer(
    folder: Path,
    special: tuple[str, ...],
    eos: str,
    pad: str,
    chat: str,
    named: Mapping[str, str] | None = None,
) -> Mapping[str, int]:
    """`named`: special tokens that the model's processor asks its tokenizer for by attribute."""
    ids = tokenizers.write(folder, special=special, eos=eos, pad=pad, chat_template=chat)
    if named:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "extra_special_tokens": named}, indent=1))
    return ids


def _with_image_token(token: str) -> str:
    return QWEN2_CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", token)


def _internvl_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    return name.removeprefix("model.") if "vision_tower." in name else published_llava_name(name)
