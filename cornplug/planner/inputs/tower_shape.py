"""Size of a tower and its projector, computed from config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from cornplug.checkpoints.families import FAMILIES
from cornplug.errors import CheckpointError
from cornplug.planner.inputs.llm_shape import text_config
from cornplug.planner.inputs.schema import TowerShape

Json = Mapping[str, Any]

_LAYERS: Final = ("depth", "num_hidden_layers", "encoder_layers")
_WIDTH: Final = ("embed_dim", "d_model", "hidden_size")
_GATED_MLP: Final = ("qwen2_5_vl",)


def from_config(config: Json, counted: int | None = None) -> TowerShape:
    """Return the shape of the tower and projector in a model's config.json.

    `counted` is their number of parameters in the weights, or None if the weights are absent. Raises
    CheckpointError with the reason "bad_config" if config.json has no tower, or "unknown_family" if the
    model's family does not support this tower.
    """
    tower = _tower_config(config)
    hidden = _first(tower, _WIDTH)
    intermediate = (
        int(tower["mlp_ratio"] * hidden)
        if "embed_dim" in tower and "mlp_ratio" in tower
        else _first(tower, ("intermediate_size", "encoder_ffn_dim"))
    )
    layers = max(tower["feature_layers"]) if "feature_layers" in tower else _first(tower, _LAYERS)
    patches = _patches_per_token(config, tower)
    mlp = (3 if _kind(config) in _GATED_MLP else 2) * hidden * intermediate
    # The last two terms are biases and norms: nine vectors of size `hidden` and one of size `intermediate`.
    blocks = layers * (4 * hidden * hidden + mlp + 9 * hidden + intermediate)
    total = blocks + _stem(tower, hidden) + _projector(config, tower, hidden, patches)
    return TowerShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        parameters=counted or total,
        patches_per_token=patches,
    )


def _tower_config(config: Json) -> Json:
    family = FAMILIES.get(_kind(config))
    if family is not None:
        return family.tower_spec(config)
    for name in ("vision_config", "audio_config"):
        if isinstance(found := config.get(name), Mapping):
            return found
    raise CheckpointError(
        f"config.json of {_kind(config)!r} has no tower. Use a model with a tower, or add [shape].",
        reason="bad_config",
    )


def _patches_per_token(config: Json, tower: Json) -> int:
    if merge := tower.get("spatial_merge_size"):
        return int(merge) ** 2
    if "pooled_rows" in tower:  # Gemma 3
        patches = (_side(tower, "image_size") // _side(tower, "patch_size")) ** 2
        return max(patches // int(tower["pooled_rows"]), 1)
    if ratio := config.get("downsample_ratio"):  # InternVL
        return round(1 / float(ratio) ** 2)
    if _kind(config) == "qwen2_audio":  # its tower averages every two frames
        return 2
    if _kind(config) == "ultravox":
        return int(config.get("stack_factor") or 8)
    return 1


def _stem(tower: Json, hidden: int) -> int:
    """Return the number of weights that compute the first layer's input from pixels or mel bins, including
    position embeddings."""
    if "num_mel_bins" in tower:
        return (
            3 * hidden * (int(tower["num_mel_bins"]) + hidden) + int(tower["max_source_positions"]) * hidden
        )
    patch, channels = _side(tower, "patch_size"), int(tower.get("in_channels", tower.get("num_channels", 3)))
    weights = channels * patch * patch * int(tower.get("temporal_patch_size", 1)) * hidden
    if "num_position_embeddings" in tower:
        return weights + int(tower["num_position_embeddings"]) * hidden
    if "spatial_merge_size" in tower or "image_size" not in tower:  # rotary positions
        return weights
    return weights + ((_side(tower, "image_size") // patch) ** 2 + 1) * hidden


def _projector(config: Json, tower: Json, hidden: int, patches: int) -> int:
    out = int(text_config(config).get("hidden_size") or hidden)
    if "spatial_merge_size" in tower:
        merged = patches * hidden
        mergers = 1 + len(tower.get("deepstack_visual_indexes") or ())
        return mergers * (merged * merged + merged * out)
    if _kind(config) == "ultravox":
        width = int(config.get("hidden_size") or 4096)
        return patches * hidden * width + width // 2 * out
    if "downsample_ratio" in config:
        return patches * hidden * out + out * out
    if "pooled_rows" in tower or "num_mel_bins" in tower:
        return hidden * out
    return hidden * out + out * out


def _side(tower: Json, name: str) -> int:
    value = tower.get(name, 14)
    return int(math.sqrt(math.prod(value))) if isinstance(value, (list, tuple)) else int(value)


def _first(tower: Json, names: tuple[str, ...]) -> int:
    found = next((tower[name] for name in names if isinstance(tower.get(name), int)), None)
    if found is None:
        raise CheckpointError(
            f"the tower in config.json has none of {', '.join(names)}. Add [shape] to the component instead.",
            reason="bad_config",
        )
    return int(found)


def _kind(config: Json) -> str:
    return str(config.get("model_type", ""))
