"""The families of `any_family`: one line of test each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from devkit.checkpoints.any_family import AnyFamily

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
    "tokens": ("<|image|>", "<|video|>", "<|begin_of_video|>", "<|end_of_video|>"),
    "named_tokens": {"video_token": "<|video|>"},
    "token_fields": {
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
}
_QWEN: Final = {
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<vision>",
    "vision_eos_token": "</vision>",
}
_FEW_PIXELS: Final = {"size": {"shortest_edge": 784, "longest_edge": 12544}}
_PIXTRAL: Final = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": 14,
    "size": {"longest_edge": 112},
}
_PIXTRAL_TOKENS: Final = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
_TILE_MARKS: Final = ("<|tile_x_separator|>", "<|tile_y_separator|>")
_OVIS_MARKS: Final = tuple(f"<IMG_{mark}>" for mark in ("START", "GRID", "COL", "ROW", "END"))
_WHISPER: Final = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
_MROPE: Final = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
_IDEFICS_TOKENS: Final = ("<image>", "<fake_token_around_image>", "<global-img>")


def _square(kind: str, **more: Any) -> Mapping[str, Any]:
    return {"image_processor_type": kind, "size": {"height": 56, "width": 56}, **more}


def _video(kind: str) -> Mapping[str, Any]:
    few = {"shortest_edge": 784, "longest_edge": 62720}
    return {"video_processor_type": f"{kind}VideoProcessor", "patch_size": 14, "size": few}


def _idefics(name: str) -> AnyFamily:
    tiles = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    return AnyFamily(
        config={"scale_factor": 2},
        image_processor={"image_processor_type": f"{name}ImageProcessor", **tiles},
        processor={"processor_class": f"{name}Processor", "image_seq_len": 4},
        tokens=_IDEFICS_TOKENS,
    )


_OMNI: Final[Mapping[str, Any]] = {
    "tokens": ("<|IMAGE|>",),
    "named_tokens": {
        **{f"{name}_token": f"<|{name}|>" for name in ("audio", "video", "vision_bos", "vision_eos")},
        **{f"audio_{end}_token": f"<|audio_{end}|>" for end in ("bos", "eos")},
    },
    "token_fields": {
        f"{kind}_{at}_token_id": f"<|{kind}_{mark}|>"
        for kind in ("vision", "audio")
        for at, mark in (("start", "bos"), ("end", "eos"))
    },
    "nested": "thinker_config",
    "outer": {"enable_audio_output": False},
    "media": ("image", "video", "audio"),
}

ANY_FAMILIES: Final[Mapping[str, AnyFamily]] = {
    "audioflamingo3": AnyFamily(
        vision=None,
        audio={
            "model_type": "audioflamingo3_encoder",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        text={"model_type": "qwen2"},
        image_processor=_WHISPER,
        processor={"processor_class": "AudioFlamingo3Processor"},
        tokens=("<sound>",),
        media=("audio",),
    ),
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
        processor={"processor_class": "Glm4vProcessor", "video_processor": _video("Glm4v")},
        media=("image", "video"),
        **_GLM_TOKENS,
    ),
    "glmasr": AnyFamily(
        vision=None,
        audio={
            "hidden_size": 32,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
        image_processor=_WHISPER,
        processor={"processor_class": "GlmAsrProcessor", "audio_token": "<sound>"},
        tokens=("<sound>",),
        media=("audio",),
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
    "llava": AnyFamily(
        vision={"model_type": "pixtral", "head_dim": 16, "image_size": 112},
        text={"model_type": "mistral"},
        config={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
        image_processor=_PIXTRAL,
        processor={"processor_class": "PixtralProcessor", "patch_size": 14},
        tokens=_PIXTRAL_TOKENS,
    ),
    "llama4": AnyFamily(
        vision={
            "intermediate_size": 128,
            "vision_output_dim": 64,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
        text={"model_type": "llama4_text"},
        image_processor=_square("Llama4ImageProcessor"),
        processor={"processor_class": "Llama4Processor", "patch_size": 14},
        tokens=("<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>", *_TILE_MARKS),
    ),
    "mistral3": AnyFamily(
        vision={"model_type": "pixtral", "head_dim": 16, "image_size": 112},
        text={"model_type": "mistral"},
        image_processor=_PIXTRAL,
        processor={"processor_class": "PixtralProcessor", "patch_size": 14, "spatial_merge_size": 2},
        tokens=_PIXTRAL_TOKENS,
    ),
    "ovis2": AnyFamily(
        vision={"vocab_size": 64},
        config={"hidden_size": 64, "vocab_size": 1024},
        image_processor=_square("Ovis2ImageProcessor"),
        processor={"processor_class": "Ovis2Processor", "image_seq_length": 16},
        tokens=("<IMG_ATOM>", *_OVIS_MARKS),
        token_fields={"visual_indicator_token_ids": _OVIS_MARKS},
    ),
    "paligemma": AnyFamily(
        vision={**_SIGLIP, "projection_dim": 64},
        text={"model_type": "gemma", "head_dim": 32},
        config={"projection_dim": 64},
        image_processor=_square("SiglipImageProcessor", image_seq_length=16),
        processor={"processor_class": "PaliGemmaProcessor"},
    ),
    "qwen2_5_omni": AnyFamily(
        vision={
            "depth": 2,
            "num_heads": 2,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
            "window_size": 56,
        },
        audio={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "output_dim": 64,
        },
        text={"model_type": "qwen2_5_omni_text", "rope_parameters": _MROPE},
        image_processor={"image_processor_type": "Qwen2VLImageProcessor", **_FEW_PIXELS},
        processor={
            "processor_class": "Qwen2_5OmniProcessor",
            "feature_extractor": _WHISPER,
            "video_processor": _video("Qwen2VL"),
        },
        **_OMNI,
    ),
    "qwen3_omni_moe": AnyFamily(
        vision={
            "depth": 3,
            "num_heads": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        audio={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "output_dim": 64,
            "downsample_hidden_size": 32,
        },
        text={
            "model_type": "qwen3_omni_moe_text",
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": _MROPE,
        },
        image_processor={"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, **_FEW_PIXELS},
        processor={
            "processor_class": "Qwen3OmniMoeProcessor",
            "feature_extractor": _WHISPER,
            "video_processor": _video("Qwen2VL"),
        },
        **_OMNI,
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
            "layer_types": ["linear_attention", "full_attention"],
        },
        image_processor={"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, **_FEW_PIXELS},
        processor={"processor_class": "Qwen3VLProcessor", "video_processor": _video("Qwen3VL")},
        media=("image", "video"),
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
