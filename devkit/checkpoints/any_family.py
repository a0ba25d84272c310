"""Tiny checkpoints of any model_type that transformers knows, with a processor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from devkit import tokenizers
from devkit.checkpoints.parts import Text, draw, make_folder, token_ids

TINY_VISION: Final[Mapping[str, Any]] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
_SPECIAL: Final = ("<s>", "</s>", "<pad>")


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyFamily:
    """One model_type: what differs from Llama's decoder, `TINY_VISION`, and a processor without settings."""

    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=lambda: {"model_type": "llama"})
    config: Mapping[str, Any] = field(default_factory=dict)
    image_processor: Mapping[str, Any] = field(default_factory=dict)
    processor: Mapping[str, Any] = field(default_factory=dict)
    tokens: Sequence[str] = ("<image>",)
    """Special tokens; the first stands for an image."""
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the tokenizer, such as `image_token`."""


def any_family(
    path: Path | str, model_type: str, made_of: AnyFamily, *, tower_seed: int = 0, llm_seed: int = 1
) -> Path:
    """A checkpoint of that type, as transformers saves it, in float32. Returns `path`."""
    import torch
    import transformers

    folder = make_folder(path)
    named = {"image_token": made_of.tokens[0], **made_of.named_tokens}
    special = tuple(dict.fromkeys((*_SPECIAL, *made_of.tokens, *named.values())))
    ids = tokenizers.write(folder, special=special, eos="</s>", pad="<pad>", chat_template="")
    (folder / "chat_template.jinja").unlink()
    _edit(folder / "tokenizer_config.json", {"bos_token": "<s>", "extra_special_tokens": named})
    text = Text(64, 2, 2, None, None, 4096).config("llama", ids)
    whole = {
        "model_type": model_type,
        "image_token_id": ids[made_of.tokens[0]],
        "image_token_index": ids[made_of.tokens[0]],
        "vision_config": {**TINY_VISION, **made_of.vision},
        "text_config": {**text, **token_ids(ids, "<s>", "</s>", "<pad>"), **made_of.text},
        **token_ids(ids, "<s>", "</s>", "<pad>"),
        "tie_word_embeddings": False,
        **made_of.config,
    }
    (folder / "config.json").write_text(json.dumps(whole))
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    decoder = {id(tensor) for tensor in model.get_decoder().parameters()}
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.copy_(
                draw(
                    name,
                    tuple(tensor.shape),
                    llm_seed if id(tensor) in decoder or "lm_head" in name else tower_seed,
                )
            )
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(made_of.image_processor))
    (folder / "processor_config.json").write_text(json.dumps(made_of.processor))
    return folder


def _edit(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


_SIGLIP: Final = {"model_type": "siglip_vision_model", "vision_use_head": False}
_GLM: Final = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "spatial_merge_size": 2}
_GLM_TEXT: Final = {
    "model_type": "glm4v_text",
    "rope_parameters": {
        "rope_type": "default",
        "mrope_section": [4, 6, 6],
        "rope_theta": 1e4,
        "partial_rotary_factor": 1.0,
    },
}
_GLM_TOKENS: Final[Mapping[str, Any]] = {
    "tokens": ("<|image|>", "<|video|>"),
    "named_tokens": {"video_token": "<|video|>"},
}
_QWEN: Final = {
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<vision>",
    "vision_eos_token": "</vision>",
}
_FEW_PIXELS: Final = {"size": {"shortest_edge": 784, "longest_edge": 12544}}
_IDEFICS_TOKENS: Final = ("<image>", "<fake_token_around_image>", "<global-img>")


def _square(kind: str, **more: Any) -> Mapping[str, Any]:
    return {"image_processor_type": kind, "size": {"height": 56, "width": 56}, **more}


def _idefics(name: str) -> AnyFamily:
    tiles = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    return AnyFamily(
        config={"scale_factor": 2},
        image_processor={"image_processor_type": f"{name}ImageProcessor", **tiles},
        processor={"processor_class": f"{name}Processor", "image_seq_len": 4},
        tokens=_IDEFICS_TOKENS,
    )


ANY_FAMILIES: Final[Mapping[str, AnyFamily]] = {
    "aya_vision": AnyFamily(
        vision=_SIGLIP,
        text={"model_type": "cohere2"},
        image_processor=_square("GotOcr2ImageProcessor"),
        processor={"processor_class": "AyaVisionProcessor", "patch_size": 14, "img_size": 56},
    ),
    "cohere2_vision": AnyFamily(
        vision=_SIGLIP,
        text={"model_type": "cohere2"},
        config={"alignment_intermediate_size": 64},
        image_processor=_square("Cohere2VisionImageProcessor"),
        processor={"processor_class": "Cohere2VisionProcessor"},
        named_tokens={"boi_token": "<boi>", "eoi_token": "<eoi>", "img_line_break_token": "<br>"},
    ),
    "deepseek_vl": AnyFamily(
        vision=_SIGLIP,
        image_processor=_square("DeepseekVLImageProcessor"),
        processor={"processor_class": "DeepseekVLProcessor"},
    ),
    "gemma4": AnyFamily(
        vision={
            "model_type": "gemma4_vision",
            "head_dim": 16,
            "num_key_value_heads": 2,
            "pooling_kernel_size": 2,
        },
        text={"model_type": "gemma4_text", "head_dim": 32, "hidden_size_per_layer_input": 0},
        image_processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 14,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        processor={"processor_class": "Gemma4Processor"},
        named_tokens={
            "boi_token": "<boi>",
            "eoi_token": "<eoi>",
            "audio_token": "<audio>",
            "boa_token": "<boa>",
            "eoa_token": "<eoa>",
        },
    ),
    "glm46v": AnyFamily(
        vision={**_GLM, "model_type": "glm4v_vision"},
        text=_GLM_TEXT,
        image_processor={"image_processor_type": "Glm46VImageProcessor", **_FEW_PIXELS},
        processor={"processor_class": "Glm46VProcessor"},
        **_GLM_TOKENS,
    ),
    "glm4v": AnyFamily(
        vision=_GLM,
        text=_GLM_TEXT,
        image_processor={"image_processor_type": "Glm4vImageProcessor", **_FEW_PIXELS},
        processor={"processor_class": "Glm4vProcessor"},
        **_GLM_TOKENS,
    ),
    "idefics3": _idefics("Idefics3"),
    "kimi_k25": AnyFamily(
        config={"projection_hidden_size": 32},
        image_processor={"image_processor_type": "Kimi_K25ImageProcessor", "patch_size": 14},
        processor={"processor_class": "Kimi_K25Processor"},
    ),
    "lfm2_vl": AnyFamily(
        vision={"model_type": "siglip2_vision_model", "num_patches": 16, "vision_use_head": False},
        text={"model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_ff_dim": 64},
        config={"projector_hidden_size": 64},
        image_processor={
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": 14,
            "tile_size": 56,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            "max_num_patches": 64,
        },
        processor={"processor_class": "Lfm2VlProcessor"},
    ),
    "llama4": AnyFamily(
        vision={"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        text={"model_type": "llama4_text"},
        image_processor=_square("Llama4ImageProcessor"),
        processor={"processor_class": "Llama4Processor", "patch_size": 14},
    ),
    "mistral3": AnyFamily(
        vision={"model_type": "pixtral", "head_dim": 16, "image_size": 112},
        text={"model_type": "mistral"},
        image_processor={
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": 14,
            "size": {"longest_edge": 112},
        },
        processor={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        tokens=("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    ),
    "ovis2": AnyFamily(
        vision={"vocab_size": 64},
        config={"hidden_size": 64, "vocab_size": 1024},
        image_processor=_square("Ovis2ImageProcessor"),
        processor={"processor_class": "Ovis2Processor"},
    ),
    "paligemma": AnyFamily(
        vision={**_SIGLIP, "projection_dim": 64},
        text={"model_type": "gemma", "head_dim": 32},
        config={"projection_dim": 64},
        image_processor=_square("SiglipImageProcessor", image_seq_length=16),
        processor={"processor_class": "PaliGemmaProcessor"},
    ),
    "qwen3_5": AnyFamily(
        vision={"depth": 2, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16},
        text={
            "model_type": "qwen3_5_text",
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
        image_processor={"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, **_FEW_PIXELS},
        processor={"processor_class": "Qwen3VLProcessor"},
        tokens=("<|image_pad|>",),
        named_tokens=_QWEN,
    ),
    "smolvlm": _idefics("SmolVLM"),
    "vipllava": AnyFamily(
        vision={"model_type": "clip_vision_model", "projection_dim": 32, "num_hidden_layers": 3},
        config={"vision_feature_layers": [-1, -2, 1]},
        image_processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
}
"""`model_type` -> a tiny one."""
