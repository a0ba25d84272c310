"""Qwen3-VL: a tower that also outputs some of its inner layers, with a merger for each (deepstack)."""

from __future__ import annotations

from typing import Final

from cornplug.checkpoints.families.family import Json, ModelFamily, Spec, known_sides, pixel_spec
from cornplug.checkpoints.families.qwen2_vl import (
    QWEN_INPUTS,
    QWEN_LANGUAGE_MODEL,
    VIDEO_DEFAULTS,
    picture_spec,
    vision_spec,
)
from cornplug.errors import CheckpointError

_VISION_DEFAULTS: Final[Json] = {
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
_VIDEO_DEFAULTS: Final[Json] = {
    **VIDEO_DEFAULTS,
    "patch_size": 16,
    "do_sample_frames": True,
    "fps": 2,
    "max_video_tokens": 768,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
}


def _vision(config: Json) -> Spec:
    vision = vision_spec(config, _VISION_DEFAULTS)
    levels, depth = list(vision["deepstack_visual_indexes"]), vision["depth"]
    # vLLM selects a layer's merger by the layer's position in this list, SGLang by the order of the layers.
    if levels != sorted(set(levels)) or not all(0 <= layer < depth for layer in levels):
        raise CheckpointError(
            f"deepstack_visual_indexes {levels} must be ascending layers below {depth}.", reason="bad_config"
        )
    return vision


def _tower(config: Json) -> Spec:
    return {k: v for k, v in _vision(config).items() if k != "out_hidden_size"}


def _projector(config: Json) -> Spec:
    vision = _vision(config)
    counted = ("hidden_size", "out_hidden_size", "spatial_merge_size", "deepstack_visual_indexes")
    return {k: vision[k] for k in counted}


def _video(preprocessor: Json) -> Spec:
    spec = pixel_spec(preprocessor, "Qwen3VLVideoProcessor", _VIDEO_DEFAULTS, "video_processor_type")
    return known_sides(spec)


FAMILY: Final = ModelFamily(
    name="qwen3_vl",
    tower_class="qwen3_vl:Qwen3Vl",
    inputs=QWEN_INPUTS,
    tower_prefixes=("visual.", "model.visual."),
    projector_prefixes=tuple(
        f"{model}visual.{merger}."
        for model in ("", "model.")
        for merger in ("merger", "deepstack_merger_list")
    ),
    language_model_prefixes=QWEN_LANGUAGE_MODEL,
    shares_features=False,
    tower_spec=_tower,
    projector_spec=_projector,
    preprocess_spec=picture_spec,
    other_preprocess_specs={"video": _video},
    before_cut=lambda _config, name: not name.endswith("inv_freq"),
)
