"""Families whose tower is CLIP, SigLIP or InternVL's ViT: LLaVA 1.5, LLaVA-NeXT, LLaVA-OneVision, Gemma 3 and
InternVL (the -hf checkpoints).

In the LLaVA families, the tower's output is taken at `vision_feature_layer`, before the final norm.
InternVL's tower encodes tiles, and its projector joins 2x2 patches.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from cornplug.checkpoints.model_family import (
    Json,
    ModelFamily,
    Spec,
    drop_null_sides,
    pixel_spec,
    without_inert,
)
from cornplug.errors import CheckpointError

_CLIP_DEFAULTS: Final[Json] = {
    "model_type": "clip_vision_model",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 32,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}
_SIGLIP_DEFAULTS: Final[Json] = {
    **_CLIP_DEFAULTS,
    "model_type": "siglip_vision_model",
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_TOWER_DEFAULTS: Final = {str(row["model_type"]): row for row in (_CLIP_DEFAULTS, _SIGLIP_DEFAULTS)}

_CLIP_L_336: Final[Json] = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}
"""Default vision_config of LlavaConfig and LlavaNextConfig."""

# Layers after the cut, CLIP's contrastive head and SigLIP's pooling head do not affect the features.
_FIELDS_PAST_CUT: Final = (
    "num_hidden_layers", "projection_dim", "vocab_size", "logit_scale_init_value", "vision_use_head",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _LlavaCut:
    """Defaults of a family's config class, used for fields that are absent in config.json."""

    vision: Json
    """Default vision_config. Its `model_type` is the default if a vision_config has no `model_type`."""
    layer: int
    """Default `vision_feature_layer`."""
    select: str
    """Default `vision_feature_select_strategy`: "default" drops the first row, and "full" keeps all rows."""

    def vision_config(self, config: Json) -> Spec:
        """Return the tower's config with all defaults.

        Raises CheckpointError("unknown_family") if the tower is neither CLIP nor SigLIP.
        """
        kind, given = self._tower_config(config)
        if kind not in _TOWER_DEFAULTS:
            raise CheckpointError(
                f"{config.get('model_type')} with a {kind!r} tower is not supported. "
                f"Supported towers: {', '.join(_TOWER_DEFAULTS)}.",
                reason="unknown_family",
            )
        return {**_TOWER_DEFAULTS[kind], **given, "model_type": kind}

    def supports_tower(self, config: Json) -> bool:
        """Return whether the tower is CLIP or SigLIP, for `ModelFamily.fits`."""
        return self._tower_config(config)[0] in _TOWER_DEFAULTS

    def _tower_config(self, config: Json) -> tuple[str, Json]:
        given = config.get("vision_config")
        given = self.vision if given is None else given
        return str(given.get("model_type") or self.vision["model_type"]), given

    def feature_layers(self, config: Json) -> list[int]:
        """Return `vision_feature_layer` as indices of hidden states. Index 0 is the embedding layer's output.

        Raises CheckpointError("bad_config") for a layer that the tower does not have.
        """
        depth = int(self.vision_config(config)["num_hidden_layers"])
        layers = config.get("vision_feature_layer", self.layer)
        # An index and a list with only this index select the same features.
        wanted = [layers] if isinstance(layers, int) else list(layers)
        absolute = [depth + 1 + i if i < 0 else i for i in wanted]
        if not absolute or not all(0 <= i <= depth for i in absolute):
            raise CheckpointError(
                f"vision_feature_layer {layers!r} is outside a tower of {depth} layers.", reason="bad_config"
            )
        return absolute

    def tower_spec(self, config: Json) -> Spec:
        vision = without_inert(self.vision_config(config))
        for name in _FIELDS_PAST_CUT:
            vision.pop(name, None)
        return vision | {
            "feature_layers": self.feature_layers(config),
            "feature_select": config.get("vision_feature_select_strategy", self.select),
        }

    def before_cut(self, config: Json, name: str) -> bool:
        """Return whether a tensor affects the features, for `ModelFamily.before_cut`.

        With LLaVA's default layer -2, CLIP's last layer is not computed. The final norm is never computed,
        because hidden states are taken before it, both in transformers and in vLLM
        (`require_post_norm=False`).
        """
        if name.startswith("encoder.layers."):
            return int(name.split(".")[2]) < max(self.feature_layers(config))
        return not name.startswith(("post_layernorm.", "head.")) and not name.endswith("position_ids")


def _llava_projector(config: Json) -> Spec:
    """Return the settings of a projector that consists of a linear layer, an activation and a linear
    layer."""
    return {
        "hidden_act": config.get("projector_hidden_act", "gelu"),
        "bias": config.get("multimodal_projector_bias", True),
    }


def _tiled_projector(config: Json, pinpoints: list[list[int]]) -> Spec:
    """Return the projector's settings and the layout of tiles. `pinpoints` is the config class's default."""
    return _llava_projector(config) | {
        "image_grid_pinpoints": config.get("image_grid_pinpoints") or pinpoints,
    }


def _row_per_patch_tower_spec(cut: _LlavaCut, config: Json) -> Spec:
    """Return `_LlavaCut.tower_spec` for a family that assembles tiles from one row per patch.

    Raises CheckpointError("bad_config") if the rows are not exactly the patches. This happens if CLIP's first
    row is kept, or if SigLIP's first row is dropped.
    """
    spec = cut.tower_spec(config)
    fits = "default" if spec["model_type"] == "clip_vision_model" else "full"
    if spec["feature_select"] != fits:
        raise CheckpointError(
            f"vision_feature_select_strategy {spec['feature_select']!r} does not give one row per patch of "
            f"a {spec['model_type']}; use {fits!r}.",
            reason="bad_config",
        )
    return spec


def _sized_pixel_spec(preprocessor: Json, kind: str, defaults: Json) -> Spec:
    """Return `pixel_spec` with named sides in `size` and `crop_size`, even if the JSON has single numbers."""
    spec = pixel_spec(preprocessor, kind, defaults)
    if isinstance(spec.get("size"), int):
        square = preprocessor.get("default_to_square", False)
        n = spec["size"]
        spec["size"] = {"height": n, "width": n} if square else {"shortest_edge": n}
    if isinstance(spec.get("crop_size"), int):
        spec["crop_size"] = {"height": spec["crop_size"], "width": spec["crop_size"]}
    return drop_null_sides(spec)


# -- LLaVA 1.5: the tower, then a two-layer projector ---------------------------------------------

_LLAVA_CUT: Final = _LlavaCut(vision=_CLIP_L_336, layer=-2, select="default")
_LLAVA_PIXELS: Final[Json] = {
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
}


def _llava_preprocess(preprocessor: Json) -> Spec:
    return _sized_pixel_spec(preprocessor, "CLIPImageProcessor", _LLAVA_PIXELS)


def _llava_fits(config: Json) -> bool:
    # Other families that extend this description have other towers, which this check does not cover.
    return config.get("model_type") != "llava" or _LLAVA_CUT.supports_tower(config)


LLAVA: Final = ModelFamily(
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
    tower_spec=_LLAVA_CUT.tower_spec,
    projector_spec=_llava_projector,
    preprocess_spec=_llava_preprocess,
    before_cut=_LLAVA_CUT.before_cut,
    fits=_llava_fits,
)


# -- LLaVA-NeXT (1.6): LLaVA applied to tiles. Padding is removed, and a newline embedding ends each row. --

_LLAVA_NEXT_PINPOINTS: Final = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_LLAVA_NEXT_CUT: Final = _LlavaCut(vision=_CLIP_L_336, layer=-2, select="default")
_LLAVA_NEXT_PIXELS: Final[Json] = {
    "size": {"shortest_edge": 224},
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_pad": True,
    "image_grid_pinpoints": _LLAVA_NEXT_PINPOINTS,
}


def _llava_next_tower(config: Json) -> Spec:
    return _row_per_patch_tower_spec(_LLAVA_NEXT_CUT, config)


def _llava_next_projector(config: Json) -> Spec:
    return _tiled_projector(config, _LLAVA_NEXT_PINPOINTS)


def _llava_next_preprocess(preprocessor: Json) -> Spec:
    return _sized_pixel_spec(preprocessor, "LlavaNextImageProcessor", _LLAVA_NEXT_PIXELS)


LLAVA_NEXT: Final[ModelFamily] = replace(
    LLAVA,
    name="llava_next",
    tower_class="llava:LlavaTiles",
    inputs={"image": ("pixel_values", "image_sizes")},
    # `image_newline` is not part of a module. It is loaded as "newline" together with the projector.
    projector_prefixes=(*LLAVA.projector_prefixes, "image_", "model.image_"),
    shares_features=False,
    tower_spec=_llava_next_tower,
    projector_spec=_llava_next_projector,
    preprocess_spec=_llava_next_preprocess,
    processor_defaults={"image": {"do_pad": True}},
    before_cut=_LLAVA_NEXT_CUT.before_cut,
)


# -- LLaVA-OneVision: a SigLIP tower applied to tiles. Rows are downscaled to a maximum number of tiles. --

_ONEVISION_SIDES: Final = range(384, 2304 + 1, 384)
_ONEVISION_PINPOINTS: Final = [list(sides) for sides in product(_ONEVISION_SIDES, _ONEVISION_SIDES)]
_ONEVISION_CUT: Final = _LlavaCut(
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
_ONEVISION_PIXELS: Final[Json] = {
    "size": {"height": 384, "width": 384},
    "do_pad": True,
    "image_grid_pinpoints": _ONEVISION_PINPOINTS,
}


def _onevision_tower(config: Json) -> Spec:
    return _row_per_patch_tower_spec(_ONEVISION_CUT, config)


def _onevision_projector(config: Json) -> Spec:
    ratio = str(config.get("vision_aspect_ratio", "anyres_max_9"))
    most = re.fullmatch(r"anyres_max_([1-9]\d*)", ratio)
    if most is None:
        raise CheckpointError(
            f"vision_aspect_ratio {ratio!r} is not supported; use anyres_max_N.", reason="bad_config"
        )
    return _tiled_projector(config, _ONEVISION_PINPOINTS) | {"most_tiles": int(most[1])}


def _onevision_preprocess(preprocessor: Json) -> Spec:
    return _sized_pixel_spec(preprocessor, "LlavaOnevisionImageProcessor", _ONEVISION_PIXELS)


LLAVA_ONEVISION: Final[ModelFamily] = replace(
    LLAVA_NEXT,
    name="llava_onevision",
    tower_spec=_onevision_tower,
    projector_spec=_onevision_projector,
    preprocess_spec=_onevision_preprocess,
    processor_defaults={},
    before_cut=_ONEVISION_CUT.before_cut,
)


# -- Gemma 3: a SigLIP tower and pooling without parameters. 4B, 12B and 27B have the same tower. --

_HALF: Final = [0.5, 0.5, 0.5]
_GEMMA3_PIXELS: Final[Json] = {
    "size": {"height": 224, "width": 224},
    "resample": 2,
    "image_mean": _HALF,
    "image_std": _HALF,
    "do_pan_and_scan": False,
}
_GEMMA3_CROPS: Final = (
    "pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate",
)  # fmt: skip


def _gemma3_tower(config: Json) -> Spec:
    vision = without_inert({**_SIGLIP_DEFAULTS, **(config.get("vision_config") or {})})
    vision.pop("vision_use_head", None)
    return vision | {"pooled_rows": config.get("mm_tokens_per_image", 256)}


def _gemma3_projector(config: Json) -> Spec:
    return {"layer_norm_eps": _gemma3_tower(config)["layer_norm_eps"]}


def _gemma3_preprocess(preprocessor: Json) -> Spec:
    spec = pixel_spec(preprocessor, "Gemma3ImageProcessor", _GEMMA3_PIXELS)
    spec.pop("image_seq_length", None)  # The number of rows in the prompt.
    if not spec.get("do_pan_and_scan"):
        for name in _GEMMA3_CROPS:
            spec.pop(name, None)
    return drop_null_sides(spec)


GEMMA3: Final[ModelFamily] = replace(
    LLAVA,
    name="gemma3",
    tower_class="llava:Gemma3",
    # The 4x4 average has no weights, so all LLM sizes can share its output, which has 16 times fewer rows.
    shares_features=True,
    tower_spec=_gemma3_tower,
    projector_spec=_gemma3_projector,
    preprocess_spec=_gemma3_preprocess,
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


# -- InternVL: a ViT that encodes tiles, then a projector that joins 2x2 patches ------------------

_INTERNVL_VISION: Final[Json] = {
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
_INTERNVL_PIXELS: Final[Json] = {
    "size": {"height": 384, "width": 384},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
}
# Fields that are read only in training, or with a mask.
_UNREAD: Final = ("hidden_dropout_prob", "projection_dropout", "layer_scale_init_value", "use_mask_token")


def _internvl_vision(config: Json) -> Spec:
    return {**_INTERNVL_VISION, **(config.get("vision_config") or {})}


def _internvl_tower(config: Json) -> Spec:
    chosen = config.get("vision_feature_layer", -1), config.get("vision_feature_select_strategy", "default")
    if chosen != (-1, "default"):
        # vLLM reads neither field, so its embeddings would differ from transformers' embeddings.
        raise CheckpointError(
            f"internvl with vision_feature_layer and vision_feature_select_strategy {chosen} is not "
            "supported; use (-1, 'default').",
            reason="unknown_family",
        )
    vision = without_inert(_internvl_vision(config))
    for name in _UNREAD:
        vision.pop(name, None)
    for name in ("image_size", "patch_size"):
        sides = vision[name]
        vision[name] = list(sides) if isinstance(sides, Sequence) else [sides, sides]
    return vision | {"downsample_ratio": config.get("downsample_ratio", 0.5)}


def _internvl_projector(config: Json) -> Spec:
    return {"hidden_act": config.get("projector_hidden_act", "gelu")}


def _internvl_preprocess(preprocessor: Json) -> Spec:
    spec = pixel_spec(preprocessor, "GotOcr2ImageProcessor", _INTERNVL_PIXELS)
    if not spec.get("crop_to_patches"):
        for name in ("min_patches", "max_patches"):
            spec.pop(name, None)
    return drop_null_sides(spec)


def _internvl_before_cut(config: Json, name: str) -> bool:
    if name.startswith("layernorm."):
        return not _internvl_vision(config)["use_mean_pooling"]
    return name != "embeddings.mask_token"


INTERNVL: Final[ModelFamily] = replace(
    LLAVA,
    name="internvl",
    tower_class="llava:InternVl",
    tower_prefixes=("vision_tower.", "model.vision_tower."),
    shares_features=False,
    tower_spec=_internvl_tower,
    projector_spec=_internvl_projector,
    preprocess_spec=_internvl_preprocess,
    processor_defaults={"image": {"crop_to_patches": True}},
    before_cut=_internvl_before_cut,
)

FAMILIES: Final = (LLAVA, LLAVA_NEXT, LLAVA_ONEVISION, GEMMA3, INTERNVL)
