"""Gemma 3: a SigLIP tower followed by parameter-free pooling. 4B, 12B and 27B have the same tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cornplug.checkpoints.families import llava
from cornplug.checkpoints.families.family import (
    Json,
    ModelFamily,
    Spec,
    known_sides,
    pixel_spec,
    without_inert,
)
from cornplug.checkpoints.families.feature_layer import SIGLIP_DEFAULTS

_HALF: Final = [0.5, 0.5, 0.5]
_PIXELS: Final[Json] = {
    "size": {"height": 224, "width": 224},
    "resample": 2,
    "image_mean": _HALF,
    "image_std": _HALF,
    "do_pan_and_scan": False,
}
_CROPS: Final = (
    "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate",
)  # fmt: skip


def _tower(config: Json) -> Spec:
    vision = without_inert({**SIGLIP_DEFAULTS, **(config.get("vision_config") or {})})
    vision.pop("vision_use_head", None)
    return vision | {"pooled_rows": config.get("mm_tokens_per_image", 256)}


def _projector(config: Json) -> Spec:
    return {"layer_norm_eps": _tower(config)["layer_norm_eps"]}


def _preprocess(preprocessor: Json) -> Spec:
    spec = pixel_spec(preprocessor, "Gemma3ImageProcessor", _PIXELS)
    spec.pop("image_seq_length", None)  # number of rows in the prompt
    if not spec.get("do_pan_and_scan"):
        for name in _CROPS:
            spec.pop(name, None)
    return known_sides(spec)


FAMILY: Final[ModelFamily] = replace(
    llava.FAMILY,
    name="gemma3",
    tower_class="gemma3:Gemma3",
    # The 4x4 average has no weights, so the tower's rows serve every LLM size, with 16 times fewer rows.
    shares_features=True,
    tower_spec=_tower,
    projector_spec=_projector,
    preprocess_spec=_preprocess,
    processor_defaults={
        "image": {
            "do_convert_rgb": True,
            "do_pan_and_scan": False,
            "pan_and_scan_min_crop_size": 256,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        }
    },
    before_cut=lambda _config, name: not name.startswith("head.") and not name.endswith("position_ids"),
)
