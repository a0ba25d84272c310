"""LLaVA-OneVision: a SigLIP tower applied to an image's tiles. The rows are downscaled to those of a maximum
number of tiles."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Final

from cornplug.checkpoints.families import llava_next
from cornplug.checkpoints.families.family import Json, ModelFamily, Spec
from cornplug.checkpoints.families.feature_layer import (
    LlavaCut,
    one_row_a_patch,
    sized_pixels,
    tiled_projector,
)
from cornplug.errors import CheckpointError

_SIDES: Final = range(384, 2304 + 1, 384)
_PINPOINTS: Final = [list(sides) for sides in product(_SIDES, _SIDES)]
_CUT: Final = LlavaCut(
    vision={
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "patch_size": 14,
        "image_size": 384,
        "num_hidden_layers": 26,
        "num_attention_heads": 16,
    },
    layer=-1,
    select="full",
)
_PIXELS: Final[Json] = {
    "size": {"height": 384, "width": 384},
    "do_pad": True,
    "image_grid_pinpoints": _PINPOINTS,
}


def _tower(config: Json) -> Spec:
    return one_row_a_patch(_CUT, config)


def _projector(config: Json) -> Spec:
    ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    most = re.fullmatch(r"anyres_max_([1-9]\d*)", ratio)
    if most is None:
        raise CheckpointError(
            f"vision_aspect_ratio {ratio!r} is not supported; use anyres_max_N.", reason="bad_config"
        )
    return tiled_projector(config, _PINPOINTS) | {"most_tiles": int(most[1])}


def _preprocess(preprocessor: Json) -> Spec:
    return sized_pixels(preprocessor, "LlavaOnevisionImageProcessor", _PIXELS)


FAMILY: Final[ModelFamily] = replace(
    llava_next.FAMILY,
    name="llava_onevision",
    tower_spec=_tower,
    projector_spec=_projector,
    preprocess_spec=_preprocess,
    processor_defaults={},
    before_cut=_CUT.before_cut,
)
