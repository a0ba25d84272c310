"""LLaVA-NeXT (1.6): LLaVA applied to an image's tiles. Padding is removed, and a newline embedding ends each
row of patches."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cornplug.checkpoints.families import llava
from cornplug.checkpoints.families.family import Json, ModelFamily, Spec
from cornplug.checkpoints.families.feature_layer import (
    CLIP_L_336,
    LlavaCut,
    one_row_a_patch,
    sized_pixels,
    tiled_projector,
)

_PINPOINTS: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_CUT: Final = LlavaCut(vision=CLIP_L_336, layer=-2, select="default")
_PIXELS: Final[Json] = {
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_pad": True,
    "image_grid_pinpoints": _PINPOINTS,
}


def _tower(config: Json) -> Spec:
    return one_row_a_patch(_CUT, config)


def _projector(config: Json) -> Spec:
    return tiled_projector(config, _PINPOINTS)


def _preprocess(preprocessor: Json) -> Spec:
    return sized_pixels(preprocessor, "LlavaNextImageProcessor", _PIXELS)


FAMILY: Final[ModelFamily] = replace(
    llava.FAMILY,
    name="llava_next",
    tower_class="llava:LlavaTiles",
    inputs={"image": ("pixel_values", "image_sizes")},
    # `image_newline` is not part of a module. It is loaded as "newline" together with the projector.
    projector_prefixes=(*llava.FAMILY.projector_prefixes, "image_", "model.image_"),
    shares_features=False,
    tower_spec=_tower,
    projector_spec=_projector,
    preprocess_spec=_preprocess,
    processor_defaults={"image": {"do_pad": True}},
    before_cut=_CUT.before_cut,
)
