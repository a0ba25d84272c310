"""LLaVA 1.5: a CLIP tower cut at `vision_feature_layer`, then a two-layer projector."""

from __future__ import annotations

from typing import Final

from cornplug.errors import CheckpointError
from cornplug.families.base import Family, Json, Spec, known_sides, pixel_spec, without_inert

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
_LLAVA_CLIP: Final[Json] = {
    # LlavaConfig's own tower when config.json has no vision_config at all.
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "image_size": 336,
    "patch_size": 14,
}


def _clip(config: Json) -> Spec:
    given = config.get("vision_config")
    vision = {**_CLIP_DEFAULTS, **(_LLAVA_CLIP if given is None else given)}
    if vision["model_type"] != "clip_vision_model":
        raise CheckpointError(
            f"LLaVA with a {vision['model_type']!r} tower is not supported. Towers known: clip_vision_model.",
            reason="unknown_family",
        )
    return vision


def _feature_layers(config: Json) -> list[int]:
    """`vision_feature_layer` as indices from the first hidden state (0: the embeddings)."""
    depth = int(_clip(config)["num_hidden_layers"])
    layers = config.get("vision_feature_layer", -2)
    # One index and a list of that index give the same features.
    wanted = [layers] if isinstance(layers, int) else list(layers)
    absolute = [depth + 1 + i if i < 0 else i for i in wanted]
    if not absolute or not all(0 <= i <= depth for i in absolute):
        raise CheckpointError(
            f"vision_feature_layer {layers!r} is outside a tower of {depth} layers.", reason="bad_config"
        )
    return absolute


def _llava_tower(config: Json) -> Spec:
    vision = without_inert(_clip(config))
    # Depth beyond the cut and CLIP's contrastive head do not reach the features.
    for name in ("num_hidden_layers", "projection_dim", "vocab_size", "logit_scale_init_value"):
        vision.pop(name, None)
    return vision | {
        "feature_layers": _feature_layers(config),
        "feature_select": config.get("vision_feature_select_strategy", "default"),
    }


def _llava_projector(config: Json) -> Spec:
    return {
        "hidden_act": config.get("projector_hidden_act", "gelu"),
        "bias": config.get("multimodal_projector_bias", True),
    }


def _clip_before_cut(config: Json, name: str) -> bool:
    """With LLaVA's default layer -2, CLIP's last layer and its final norm never run.

    At layer -1 the final norm counts: vLLM applies it there.
    """
    layers, depth = _feature_layers(config), int(_clip(config)["num_hidden_layers"])
    if name.startswith("encoder.layers."):
        return int(name.split(".")[2]) < max(layers)
    if name.startswith("post_layernorm."):
        return max(layers) == depth
    return not name.endswith("position_ids")


def _clip_preprocess(preprocessor: Json) -> Spec:
    spec = pixel_spec(
        preprocessor,
        "CLIPImageProcessor",
        {"size": {"shortest_edge": 224}, "do_center_crop": True, "crop_size": {"height": 224, "width": 224}},
    )
    if isinstance(spec["size"], int):
        square = preprocessor.get("default_to_square", False)
        n = spec["size"]
        spec["size"] = {"height": n, "width": n} if square else {"shortest_edge": n}
    if isinstance(spec["crop_size"], int):
        spec["crop_size"] = {"height": spec["crop_size"], "width": spec["crop_size"]}
    return known_sides(spec)


FAMILY: Final = Family(
    name="llava",
    network="clip:LlavaClip",
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
    tower_spec=_llava_tower,
    projector_spec=_llava_projector,
    preprocess_spec=_clip_preprocess,
    before_cut=_clip_before_cut,
)
