"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL: their towers, and mergers that reduce the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from cornplug.checkpoints.model_family import (
    Json,
    Modality,
    ModelFamily,
    Spec,
    drop_null_sides,
    pixel_spec,
    without_inert,
)
from cornplug.errors import CheckpointError

_QWEN2_VISION: Final[Json] = {
    "model_type": "qwen2_vl",
    "depth": 32,
    "embed_dim": 1280,
    "hidden_size": 3584,
    "hidden_act": "quick_gelu",
    "mlp_ratio": 4,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

_ROPE: Final[Json] = {"rope_theta": 10000.0, "rope_type": "axial"}

_VIDEO_DEFAULTS: Final[Json] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_frames": 4,
    "max_frames": 768,
    "do_sample_frames": False,
    "return_metadata": False,
    # Default in transformers 5.19. The default in 5.22 will be true.
    "cap_pixels_per_frame": False,
    "max_video_tokens": 128000,
}
"""Default values of transformers' Qwen2VLVideoProcessor, without `size`."""
_INPUTS: Final[Mapping[Modality, tuple[str, ...]]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
_LANGUAGE_MODEL: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)


def _vision_spec(config: Json, defaults: Json) -> Spec:
    """Return `vision_config` with the defaults of its class, normalised across transformers releases."""
    given = dict(config.get("vision_config") or {})
    if "in_chans" in given:
        given.setdefault("in_channels", given.pop("in_chans"))
    vision = without_inert({**defaults, **given})
    # transformers 4 and 5 name the sub-config differently, so use the family's name.
    vision["model_type"] = f"{str(defaults['model_type']).removesuffix('_vision')}_vision"
    for unread in ("spatial_patch_size", "in_chans", "tokens_per_second"):
        vision.pop(unread, None)
    if vision.get("rope_parameters") in (None, _ROPE):
        vision.pop("rope_parameters", None)
    return vision


def _image_spec(preprocessor: Json) -> Spec:
    """Return the preprocessing spec of Qwen2VLImageProcessor, which all Qwen-VL families use."""
    spec = pixel_spec(
        preprocessor,
        "Qwen2VLImageProcessor",
        {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
    )
    # As in Qwen2VLImageProcessor, min_pixels and max_pixels override size.
    size = dict(spec.pop("size", None) or {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
    for pixels, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = spec.pop(pixels, size.pop(pixels, None))
        if value is not None:
            size[edge] = value
    spec["size"] = size
    return drop_null_sides(spec)


def _video_spec(preprocessor: Json) -> Spec:
    """Return the preprocessing spec of Qwen2VLVideoProcessor, which Qwen2.5-VL also uses.

    The spec does not include which frames are sampled, because the processor's input determines them.
    """
    spec = pixel_spec(preprocessor, "Qwen2VLVideoProcessor", _VIDEO_DEFAULTS, "video_processor_type")
    size = dict(spec.pop("size", None) or {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768})
    for pixels, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if pixels in spec:
            size[edge] = spec.pop(pixels)
    spec["size"] = size
    return drop_null_sides(spec)


def _qwen2_tower(config: Json) -> Spec:
    return {k: v for k, v in _vision_spec(config, _QWEN2_VISION).items() if k != "hidden_size"}


def _qwen2_projector(config: Json) -> Spec:
    vision = _vision_spec(config, _QWEN2_VISION)
    return {k: vision[k] for k in ("embed_dim", "hidden_size", "spatial_merge_size")}


QWEN2_VL: Final = ModelFamily(
    name="qwen2_vl",
    tower_class="qwen2_vl:Qwen2Vl",
    inputs=_INPUTS,
    normalises_pixels=True,
    tower_prefixes=("visual.", "model.visual."),
    projector_prefixes=("visual.merger.", "model.visual.merger."),
    language_model_prefixes=_LANGUAGE_MODEL,
    shares_features=False,
    tower_spec=_qwen2_tower,
    projector_spec=_qwen2_projector,
    preprocess_spec=_image_spec,
    other_preprocess_specs={"video": _video_spec},
    before_cut=lambda _config, name: not name.endswith("inv_freq"),
)


# -- Qwen2.5-VL: window attention. The sampling rate of frames affects only the LLM's positions. --

_QWEN2_5_VISION: Final[Json] = {
    "model_type": "qwen2_5_vl",
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": [7, 15, 23, 31],
}


def _qwen2_5_tower(config: Json) -> Spec:
    return {k: v for k, v in _vision_spec(config, _QWEN2_5_VISION).items() if k != "out_hidden_size"}


def _qwen2_5_projector(config: Json) -> Spec:
    vision = _vision_spec(config, _QWEN2_5_VISION)
    return {k: vision[k] for k in ("hidden_size", "out_hidden_size", "spatial_merge_size")}


QWEN2_5_VL: Final[ModelFamily] = replace(
    QWEN2_VL,
    name="qwen2_5_vl",
    tower_class="qwen2_vl:Qwen25Vl",
    tower_spec=_qwen2_5_tower,
    projector_spec=_qwen2_5_projector,
)


# -- Qwen3-VL: the tower also outputs some inner layers, with a merger for each (deepstack). ------

_QWEN3_VISION: Final[Json] = {
    "model_type": "qwen3_vl",
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN3_VIDEO: Final[Json] = {
    **_VIDEO_DEFAULTS,
    "patch_size": 16,
    "do_sample_frames": True,
    "fps": 2,
    "max_video_tokens": 768,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
}


def _qwen3_vision(config: Json) -> Spec:
    vision = _vision_spec(config, _QWEN3_VISION)
    levels, depth = list(vision["deepstack_visual_indexes"]), vision["depth"]
    # vLLM selects a layer's merger by the layer's position in this list. SGLang selects it by layer order.
    if levels != sorted(set(levels)) or not all(0 <= layer < depth for layer in levels):
        raise CheckpointError(
            f"deepstack_visual_indexes {levels} must be ascending layers below {depth}.", reason="bad_config"
        )
    return vision


def _qwen3_tower(config: Json) -> Spec:
    return {k: v for k, v in _qwen3_vision(config).items() if k != "out_hidden_size"}


def _qwen3_projector(config: Json) -> Spec:
    vision = _qwen3_vision(config)
    counted = ("hidden_size", "out_hidden_size", "spatial_merge_size", "deepstack_visual_indexes")
    return {k: vision[k] for k in counted}


def _qwen3_video(preprocessor: Json) -> Spec:
    spec = pixel_spec(preprocessor, "Qwen3VLVideoProcessor", _QWEN3_VIDEO, "video_processor_type")
    return drop_null_sides(spec)


QWEN3_VL: Final[ModelFamily] = replace(
    QWEN2_VL,
    name="qwen3_vl",
    tower_class="qwen3_vl:Qwen3Vl",
    projector_prefixes=tuple(
        f"{model}visual.{merger}."
        for model in ("", "model.")
        for merger in ("merger", "deepstack_merger_list")
    ),
    tower_spec=_qwen3_tower,
    projector_spec=_qwen3_projector,
    other_preprocess_specs={"video": _qwen3_video},
)

QWEN3_VL_MOE: Final[ModelFamily] = replace(QWEN3_VL, name="qwen3_vl_moe")

FAMILIES: Final = (QWEN2_VL, QWEN2_5_VL, QWEN3_VL, QWEN3_VL_MOE)
