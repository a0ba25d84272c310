"""Tiny Qwens with towers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from devkit.checkpoints.parts import (
    CLIP_PIXELS,
    Text,
    make_folder,
    qwen2_tokenizer,
    token_ids,
    write_json,
    write_weights,
)

TINY_QWEN2_VISION: Final[Mapping[str, Any]] = {"depth": 2, "embed_dim": 64, "num_heads": 2, "mlp_ratio": 2}
TINY_QWEN2_5_VISION: Final[Mapping[str, Any]] = {
    **{"depth": 3, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2},
    **{"window_size": 56, "fullatt_block_indexes": [1]},
}
"""Windows of 4 x 4 patches, and one block that sees whole frames."""
QWEN2_5_VISION: Final[Mapping[str, Any]] = {
    **{"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
    **{"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
}
"""The shape of Qwen2.5-VL's published towers: 0.6 billion parameters."""
TINY_QWEN3_VISION: Final[Mapping[str, Any]] = {
    **{"depth": 4, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2},
    **{"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]},
}


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
    """A Qwen2-VL. Returns `path`. Rows an image: its pixels after resizing / 28 squared."""
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions)
    return _flat(
        make_folder(path),
        model="Qwen2VL",
        text=text,
        vision={"model_type": "qwen2_vl", "in_chans": 3, "hidden_size": hidden_size, **vision},
        seeds=_seeds(tower_seed, llm_seed, projector_seed),
        max_pixels=max_pixels,
        dtype=dtype,
    )


def qwen2_5_vl(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    vision: Mapping[str, Any] = TINY_QWEN2_5_VISION,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    max_positions: int = 4096,
    max_pixels: int = 28 * 28 * 64,
    dtype: str = "float32",
) -> Path:
    """A Qwen2.5-VL. Returns `path`. Rows an image as in Qwen2-VL."""
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions)
    return _flat(
        make_folder(path),
        model="Qwen2_5_VL",
        text=text,
        vision={"in_chans": 3, "tokens_per_second": 2, "out_hidden_size": hidden_size, **vision},
        seeds=_seeds(tower_seed, llm_seed, projector_seed),
        max_pixels=max_pixels,
        dtype=dtype,
    )


def qwen3_vl(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 3,
    heads: int = 2,
    kv_heads: int | None = None,
    intermediate_size: int | None = None,
    vision: Mapping[str, Any] = TINY_QWEN3_VISION,
    experts: int = 0,
    tower_seed: int = 0,
    llm_seed: int = 1,
    projector_seed: int | None = None,
    max_positions: int = 4096,
    max_pixels: int = 32 * 32 * 64,
    dtype: str = "float32",
) -> Path:
    """A Qwen3-VL, with `experts` a mixture of them. Returns `path`.

    Rows an image: its pixels after resizing / 32 squared, each (1 + levels) * hidden_size wide.
    """
    folder = make_folder(path)
    ids = qwen2_tokenizer(folder)
    kind = "qwen3_vl_moe" if experts else "qwen3_vl"
    text = Text(hidden_size, layers, heads, kv_heads, intermediate_size, max_positions)
    mixture = {
        **{"num_experts": experts, "num_experts_per_tok": 1, "moe_intermediate_size": 2 * hidden_size},
        **{"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    }
    rope = {"mrope_interleaved": True, "mrope_section": _sections(text), "rope_type": "default"}
    architecture = f"Qwen3VL{'Moe' if experts else ''}ForConditionalGeneration"
    config = {
        "model_type": kind,
        "architectures": [architecture],
        "text_config": {
            **text.config(f"{kind}_text", ids),
            **(mixture if experts else {}),
            **{"head_dim": hidden_size // heads, "attention_bias": False},
            **{"rope_theta": 5e6, "rope_scaling": rope, "dtype": dtype},
        },
        "vision_config": {
            **{"model_type": kind, "in_channels": 3, "patch_size": 16, "spatial_merge_size": 2},
            **{"temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh", "out_hidden_size": hidden_size},
            **vision,
        },
        "tie_word_embeddings": False,
        **_media_ids(ids),
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
    }
    plain = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    pixels = {**plain, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2}
    pixel_range = {"shortest_edge": 64 * 64, "longest_edge": max_pixels}
    write_json(
        folder,
        config=config,
        preprocessor_config={
            **pixels,
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "size": pixel_range,
        },
        video_preprocessor_config={
            **pixels,
            **{
                "video_processor_type": "Qwen3VLVideoProcessor",
                "size": {**pixel_range, "shortest_edge": 4096},
            },
        },
    )
    seeds = _seeds(tower_seed, llm_seed, projector_seed, "model.visual.")
    write_weights(folder, architecture, lambda name: name, seeds, ids, dtype, turned=".experts.")
    return folder


def qwen3_vl_moe(path: Path | str, **options: Any) -> Path:
    """A Qwen3-VL of two experts; `options` as `qwen3_vl`. Returns `path`."""
    # Three levels, as the published ones have: SGLang 0.5.23 counts on it.
    vision = {**TINY_QWEN3_VISION, "deepstack_visual_indexes": [0, 1, 2]}
    return qwen3_vl(path, **{"experts": 2, "vision": vision, **options})


def _flat(
    folder: Path,
    *,
    model: str,
    text: Text,
    vision: Mapping[str, Any],
    seeds: Mapping[str, int],
    max_pixels: int,
    dtype: str,
) -> Path:
    """Qwen2-VL and Qwen2.5-VL, whose config.json holds the LLM's fields on top."""
    ids = qwen2_tokenizer(folder)
    architecture = f"{model}ForConditionalGeneration"
    config = {
        **text.config(model.lower().replace("vl", "_vl").replace("__", "_"), ids),
        "architectures": [architecture],
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": _sections(text)},
        "vision_config": {
            **{"patch_size": 14, "spatial_patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
            **vision,
        },
        **_media_ids(ids),
        "vision_token_id": ids["<|vision_pad|>"],
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{model}Processor",
        **{k: v for k, v in CLIP_PIXELS.items() if k != "do_center_crop"},
        **{"min_pixels": 56 * 56, "max_pixels": max_pixels},
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    }
    write_json(folder, config=config, preprocessor_config=pixels)
    write_weights(folder, architecture, _flat_name, seeds, ids, dtype)
    return folder


def _sections(text: Text) -> list[int]:
    """Frequencies for time, height and width, in the published proportion of 1 : 1.5 : 1.5."""
    half = text.hidden_size // text.heads // 2
    return [half - 2 * (half * 3 // 8), half * 3 // 8, half * 3 // 8]


def _media_ids(ids: Mapping[str, int]) -> dict[str, int]:
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _seeds(tower: int, llm: int, projector: int | None, prefix: str = "visual.") -> dict[str, int]:
    merger = llm if projector is None else projector
    return {f"{prefix}merger.": merger, f"{prefix}deepstack_merger_list.": merger, prefix: tower, "": llm}


def _flat_name(name: str) -> str:
    """transformers 5's name in memory -> the published one."""
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    return name.replace("model.language_model.", "model.", 1)
