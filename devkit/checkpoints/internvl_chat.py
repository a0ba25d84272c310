"""Tiny InternVLs as their makers publish them, for engines that have a class of their own for these."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from devkit import tokenizers
from devkit.checkpoints.parts import (
    QWEN2_CHAT,
    QWEN2_SPECIAL,
    Text,
    make_folder,
    token_ids,
    write_json,
    write_tensors,
)

TINY_INTERN_VIT: Final[Mapping[str, Any]] = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    # SGLang's tiles have this side, whatever the config says.
    **{"image_size": 448, "patch_size": 56},
}
_SPECIAL: Final = (*QWEN2_SPECIAL, "<image>", "<img>", "</img>", "<IMG_CONTEXT>")
_CHAT: Final = QWEN2_CHAT.replace("<|vision_start|><|image_pad|><|vision_end|>", "<image>")


def internvl_chat(
    path: Path | str,
    *,
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 2,
    vision: Mapping[str, Any] = TINY_INTERN_VIT,
    tower_seed: int = 0,
    llm_seed: int = 1,
    dtype: str = "float32",
) -> Path:
    """An InternVL over Qwen2. Returns `path`. Rows a tile: its patches / 4."""
    folder = make_folder(path)
    ids = tokenizers.write(
        folder, special=_SPECIAL, eos="<|im_end|>", pad="<|endoftext|>", chat_template=_CHAT
    )
    text = Text(hidden_size, layers, heads, None, None, 4096).config("qwen2", ids)
    config = {
        "model_type": "internvl_chat",
        "architectures": ["InternVLChatModel"],
        "vision_config": {
            **vision,
            "model_type": "intern_vit_6b",
            "architectures": ["InternVisionModel"],
            "norm_type": "layer_norm",
            "qkv_bias": True,
            "qk_normalization": False,
            "use_flash_attn": False,
        },
        "llm_config": {**text, "architectures": ["Qwen2ForCausalLM"], "torch_dtype": dtype},
        "downsample_ratio": 0.5,
        "force_image_size": vision["image_size"],
        "ps_version": "v2",
        "select_layer": -1,
        "template": "internvl2_5",
        "use_thumbnail": True,
        "dynamic_image_size": True,
        **token_ids(ids, "<|endoftext|>", "<|im_end|>", "<|endoftext|>"),
        "torch_dtype": dtype,
    }
    pixels = {
        "feature_extractor_type": "CLIPFeatureExtractor",
        **{"do_resize": True, "do_normalize": True, "do_center_crop": True, "resample": 3},
        **{"size": vision["image_size"], "crop_size": vision["image_size"]},
        **{"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]},
    }
    write_json(folder, config=config, preprocessor_config=pixels)
    shapes = {**_tower(vision, hidden_size), **_language_model(text)}
    seeds = {"language_model.": llm_seed, "mlp1.": llm_seed, "vision_model.": tower_seed}
    write_tensors(folder, shapes, seeds, ids, dtype)
    return folder


def _tower(vision: Mapping[str, Any], llm_width: int) -> dict[str, tuple[int, ...]]:
    width, inner, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    patches = (vision["image_size"] // patch) ** 2
    at, four = "vision_model.embeddings.", 4 * width
    shapes: dict[str, tuple[int, ...]] = {
        f"{at}class_embedding": (1, 1, width),
        f"{at}position_embedding": (1, patches + 1, width),
        f"{at}patch_embedding.weight": (width, 3, patch, patch),
        f"{at}patch_embedding.bias": (width,),
        **{"mlp1.0.weight": (four,), "mlp1.0.bias": (four,)},
        **{"mlp1.1.weight": (llm_width, four), "mlp1.1.bias": (llm_width,)},
        **{"mlp1.3.weight": (llm_width, llm_width), "mlp1.3.bias": (llm_width,)},
    }
    for layer in range(vision["num_hidden_layers"]):
        at = f"vision_model.encoder.layers.{layer}."
        shapes |= {
            f"{at}{name}.{form}": (width,) for name in ("norm1", "norm2") for form in ("weight", "bias")
        }
        shapes |= {f"{at}ls1": (width,), f"{at}ls2": (width,)}
        for name, rows, columns in (
            ("attn.qkv", 3 * width, width),
            ("attn.proj", width, width),
            ("mlp.fc1", inner, width),
            ("mlp.fc2", width, inner),
        ):
            shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (rows,)}
    return shapes


def _language_model(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    import torch
    import transformers

    with torch.device("meta"):  # names and shapes only
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**text))
    return {f"language_model.{name}": tuple(meta.shape) for name, meta in model.state_dict().items()}
