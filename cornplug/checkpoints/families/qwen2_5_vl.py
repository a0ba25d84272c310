"""Qwen2.5-VL: a tower with window attention, and a merger and processors like Qwen2-VL's.

The sampling rate of a video's frames affects the LLM's positions, but not the tower.
"""

from __future__ import annotations

from typing import Final

from cornplug.checkpoints.families.family import Json, ModelFamily, Spec
from cornplug.checkpoints.families.qwen2_vl import (
    QWEN_INPUTS,
    QWEN_LANGUAGE_MODEL,
    picture_spec,
    video_spec,
    vision_spec,
)

_VISION_DEFAULTS: Final[Json] = {
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


def _tower(config: Json) -> Spec:
    return {k: v for k, v in vision_spec(config, _VISION_DEFAULTS).items() if k != "out_hidden_size"}


def _projector(config: Json) -> Spec:
    vision = vision_spec(config, _VISION_DEFAULTS)
    return {k: vision[k] for k in ("hidden_size", "out_hidden_size", "spatial_merge_size")}


FAMILY: Final = ModelFamily(
    name="qwen2_5_vl",
    tower_class="qwen2_5_vl:Qwen25Vl",
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
