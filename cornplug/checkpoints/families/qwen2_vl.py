"""Qwen2-VL: a tower that differs by model size, and a merger that reduces the number of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from cornplug.checkpoints.families.family import (
    Json,
    Modality,
    ModelFamily,
    Spec,
    known_sides,
    pixel_spec,
    without_inert,
)

_VISION_DEFAULTS: Final[Json] = {
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


def vision_spec(config: Json, defaults: Json) -> Spec:
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


_ROPE: Final[Json] = {"rope_theta": 10000.0, "rope_type": "axial"}


def _tower(config: Json) -> Spec:
    return {k: v for k, v in vision_spec(config, _VISION_DEFAULTS).items() if k != "hidden_size"}


def _projector(config: Json) -> Spec:
    vision = vision_spec(config, _VISION_DEFAULTS)
    return {k: vision[k] for k in ("embed_dim", "hidden_size", "spatial_merge_size")}


def picture_spec(preprocessor: Json) -> Spec:
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
    return known_sides(spec)


def video_spec(preprocessor: Json) -> Spec:
    """Return the preprocessing spec of Qwen2VLVideoProcessor, which Qwen2.5-VL also uses.

    The spec does not include which frames are sampled, because this follows from the processor's input.
    """
    spec = pixel_spec(preprocessor, "Qwen2VLVideoProcessor", VIDEO_DEFAULTS, "video_processor_type")
    size = dict(spec.pop("size", None) or {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768})
    for pixels, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        if pixels in spec:
            size[edge] = spec.pop(pixels)
    spec["size"] = size
    return known_sides(spec)


VIDEO_DEFAULTS: Final[Json] = {
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
QWEN_INPUTS: Final[Mapping[Modality, tuple[str, ...]]] = {
    "image": ("pixel_values", "image_grid_thw"),
    "video": ("pixel_values_videos", "video_grid_thw"),
}
QWEN_LANGUAGE_MODEL: Final = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

FAMILY: Final = ModelFamily(
    name="qwen2_vl",
    tower_class="qwen2_vl:Qwen2Vl",
    inputs=QWEN_INPUTS,
    tower_prefixes=("visual.", "model.visual."),
    projector_prefixes=("visual.merger.", "model.visual.merger."),
    language_model_prefixes=QWEN_LANGUAGE_MODEL,
    shares_features=False,
    tower_spec=_tower,
    projector_spec=_projector,
    preprocess_spec=picture_spec,
    other_preprocess_specs={"video": video_spec},
    before_cut=lambda _config, name: not name.endswith("inv_freq"),
)
