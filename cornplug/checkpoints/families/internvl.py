"""InternVL (the -hf checkpoints): a ViT that encodes tiles, and a projector that joins 2x2 patches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from cornplug.checkpoints.families import llava
from cornplug.checkpoints.families.family import (
    Json,
    ModelFamily,
    Spec,
    drop_null_sides,
    pixel_spec,
    without_inert,
)
from cornplug.errors import CheckpointError

_VISION_DEFAULTS: Final[Json] = {
    "model_type": "internvl_vision",
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "attention_bias": False,
    "use_qk_norm": False,
    "intermediate_size": 4096,
    "hidden_act": "gelu",
    "norm_type": "layer_norm",
    "layer_norm_eps": 1e-06,
    "image_size": [448, 448],
    "patch_size": [14, 14],
    "num_channels": 3,
    "use_mask_token": False,
    "use_absolute_position_embeddings": True,
    "layer_scale_init_value": 0.1,
    "use_mean_pooling": True,
}
_PIXELS: Final[Json] = {
    "size": {"height": 384, "width": 384},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
}
# Fields that are read only in training, or with a mask.
_UNREAD: Final = ("hidden_dropout_prob", "projection_dropout", "layer_scale_init_value", "use_mask_token")


def _vision(config: Json) -> Spec:
    return {**_VISION_DEFAULTS, **(config.get("vision_config") or {})}


def _tower(config: Json) -> Spec:
    chosen = config.get("vision_feature_layer", -1), config.get("vision_feature_select_strategy", "default")
    if chosen != (-1, "default"):
        # vLLM reads neither field, so its embeddings would differ from transformers' embeddings.
        raise CheckpointError(
            f"internvl with vision_feature_layer and vision_feature_select_strategy {chosen} is not "
            "supported; use (-1, 'default').",
            reason="unknown_family",
        )
    vision = without_inert(_vision(config))
    for name in _UNREAD:
        vision.pop(name, None)
    for name in ("image_size", "patch_size"):
        sides = vision[name]
        vision[name] = list(sides) if isinstance(sides, Sequence) else [sides, sides]
    return vision | {"downsample_ratio": config.get("downsample_ratio", 0.5)}


def _projector(config: Json) -> Spec:
    return {"hidden_act": config.get("projector_hidden_act", "gelu")}


def _preprocess(preprocessor: Json) -> Spec:
    spec = pixel_spec(preprocessor, "GotOcr2ImageProcessor", _PIXELS)
    if not spec.get("crop_to_patches"):
        for name in ("min_patches", "max_patches"):
            spec.pop(name, None)
    return drop_null_sides(spec)


def _before_cut(config: Json, name: str) -> bool:
    if name.startswith("layernorm."):
        return not _vision(config)["use_mean_pooling"]
    return name != "embeddings.mask_token"


INTERNVL: Final[ModelFamily] = replace(
    llava.LLAVA,
    name="internvl",
    tower_class="internvl:InternVl",
    tower_prefixes=("vision_tower.", "model.vision_tower."),
    shares_features=False,
    tower_spec=_tower,
    projector_spec=_projector,
    preprocess_spec=_preprocess,
    processor_defaults={"image": {"crop_to_patches": True}},
    before_cut=_before_cut,
)

FAMILIES: Final = (INTERNVL,)
