"""LLaVA 1.5: a CLIP or SigLIP tower cut at `vision_feature_layer`, then a two-layer projector."""

from __future__ import annotations

from typing import Final

from cornplug.checkpoints.families.family import Json, ModelFamily, Spec
from cornplug.checkpoints.families.feature_layer import CLIP_L_336, LlavaCut, llava_projector, sized_pixels

_CUT: Final = LlavaCut(vision=CLIP_L_336, layer=-2, select="default")
_CLIP_PIXELS: Final[Json] = {
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}


def _preprocess(preprocessor: Json) -> Spec:
    return sized_pixels(preprocessor, "CLIPImageProcessor", _CLIP_PIXELS)


def _fits(config: Json) -> bool:
    # Other families that extend this description have other towers, which this check does not cover.
    return config.get("model_type") != "llava" or _CUT.knows_tower(config)


FAMILY: Final = ModelFamily(
    name="llava",
    tower_class="llava:Llava",
    inputs={"image": ("pixel_values",)},
    tower_prefixes=(
        "vision_tower.vision_model.",
        "model.vision_tower.vision_model.",
        "vision_tower.",
        "model.vision_tower.",
    ),
    projector_prefixes=("multi_modal_projector.", "model.multi_modal_projector."),
    language_model_prefixes=(
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
        ("language_model.lm_head.", "lm_head."),
    ),
    shares_features=True,
    tower_spec=_CUT.tower_spec,
    projector_spec=llava_projector,
    preprocess_spec=_preprocess,
    before_cut=_CUT.before_cut,
    fits=_fits,
)
