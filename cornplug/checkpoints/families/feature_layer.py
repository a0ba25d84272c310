"""Cut of a CLIP or SigLIP tower in the LLaVA families.

The tower's output is taken at `vision_feature_layer`, before the final norm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cornplug.checkpoints.families.family import Json, Spec, known_sides, pixel_spec, without_inert
from cornplug.errors import CheckpointError

CLIP_DEFAULTS: Final[Json] = {
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
SIGLIP_DEFAULTS: Final[Json] = {
    **CLIP_DEFAULTS,
    "model_type": "siglip_vision_model",
    "patch_size": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}
_TOWERS: Final = {str(row["model_type"]): row for row in (CLIP_DEFAULTS, SIGLIP_DEFAULTS)}

CLIP_L_336: Final[Json] = {
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
_PAST_THE_CUT: Final = (
    "num_hidden_layers", "projection_dim", "vocab_size", "logit_scale_init_value", "vision_use_head",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaCut:
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
        kind, given = self._tower(config)
        if kind not in _TOWERS:
            raise CheckpointError(
                f"{config.get('model_type')} with a {kind!r} tower is not supported. "
                f"Supported towers: {', '.join(_TOWERS)}.",
                reason="unknown_family",
            )
        return {**_TOWERS[kind], **given, "model_type": kind}

    def knows_tower(self, config: Json) -> bool:
        """Return whether the tower is CLIP or SigLIP, for `ModelFamily.fits`."""
        return self._tower(config)[0] in _TOWERS

    def _tower(self, config: Json) -> tuple[str, Json]:
        given = config.get("vision_config")
        given = self.vision if given is None else given
        return str(given.get("model_type") or self.vision["model_type"]), given

    def feature_layers(self, config: Json) -> list[int]:
        """Return `vision_feature_layer` as indices of hidden states (0 for the embeddings).

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
        for name in _PAST_THE_CUT:
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


def llava_projector(config: Json) -> Spec:
    """Return the settings of a projector that consists of a linear layer, an activation and a linear
    layer."""
    return {
        "hidden_act": config.get("projector_hidden_act", "gelu"),
        "bias": config.get("multimodal_projector_bias", True),
    }


def tiled_projector(config: Json, pinpoints: list[list[int]]) -> Spec:
    """Return the projector's settings and the layout of tiles. `pinpoints` is the config class's default."""
    return llava_projector(config) | {
        "image_grid_pinpoints": config.get("image_grid_pinpoints") or pinpoints,
    }


def one_row_a_patch(cut: LlavaCut, config: Json) -> Spec:
    """Return `LlavaCut.tower_spec` for a family that assembles tiles from one row per patch.

    Raises CheckpointError("bad_config") if the rows are not exactly the patches, because CLIP's first row is
    kept or SigLIP's first row is dropped.
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


def sized_pixels(preprocessor: Json, kind: str, defaults: Json) -> Spec:
    """Return `pixel_spec` with `size` and `crop_size` as named sides, even if the JSON has single numbers."""
    spec = pixel_spec(preprocessor, kind, defaults)
    if isinstance(spec.get("size"), int):
        square = preprocessor.get("default_to_square", False)
        n = spec["size"]
        spec["size"] = {"height": n, "width": n} if square else {"shortest_edge": n}
    if isinstance(spec.get("crop_size"), int):
        spec["crop_size"] = {"height": spec["crop_size"], "width": spec["crop_size"]}
    return known_sides(spec)
