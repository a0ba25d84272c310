"""Sizes of components, the memory that components need on a device, and the models for a first plan input.

Sizes are from the plan's file or a checkpoint. The size of a tower and its projector is computed from
config.json. `llm_shape.py` does this for language models. The models for a first plan input are published
models by hub id, and checkpoints on disk.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cornplug.checkpoints.checkpoint import Checkpoint, Part
from cornplug.checkpoints.families import FAMILIES
from cornplug.errors import CheckpointError, ConfigError
from cornplug.planner.inputs import llm_shape
from cornplug.planner.inputs.llm_shape import text_config
from cornplug.planner.inputs.schema import (
    Component,
    GeneratorShape,
    InputTable,
    LLMShape,
    Quantisation,
    TowerShape,
)

_BYTES_PER_PARAMETER: Final[Mapping[str, float]] = {"none": 2.0, "fp8": 1.0, "awq": 0.52, "gptq": 0.52}
"""Bytes per parameter of a linear layer, by quantisation. Four-bit weights have a scale and a zero point for
each group of 128."""
ELEMENT_BYTES: Final = 2
"""Bytes per element of activations, embeddings and KV in 16-bit precision."""
_NO_WEIGHTS_REASONS: Final = frozenset({"no_weights", "not_safetensors", "missing_shard"})
_LAYER_PATTERN: Final = re.compile(r"layers\.(\d+)\.")
Json = Mapping[str, Any]
_LAYER_COUNT_KEYS: Final = ("depth", "num_hidden_layers", "encoder_layers")
_WIDTH_KEYS: Final = ("embed_dim", "d_model", "hidden_size")
_GATED_MLP: Final = ("qwen2_5_vl",)
IMAGE_TOKENS: Final = 1024
"""Placeholder for the number of tokens of an image, for models in which this number depends on the image's
size. An image of 1024 x 1024 pixels has this number of tokens with Qwen3-VL's 32 x 32 pixels per token."""
_QUANTISATIONS: Final = ("fp8", "awq", "gptq")


def resolve(components: Sequence[Component]) -> list[Component]:
    """Return the components with shapes and fingerprints from their checkpoints.

    A component without a checkpoint is returned unchanged, even if its shape is None. Raises ConfigError if a
    checkpoint cannot be read.
    """
    by_name = {c.name: c for c in components}
    return [_resolve_component(c, by_name) for c in components]


def _resolve_component(component: Component, components: Mapping[str, Component]) -> Component:
    if component.kind == "generator" or checkpoint_of(component, components) is None:
        return component
    known = {
        "shape": shape_of(component, components),
        "fingerprint": fingerprint_of(component, components),
    }
    found = component.model_copy(update=known)
    for error in found.parallelism_errors():
        said = error.context or {}
        raise ConfigError(f"components[{component.name}].{said['key']}", said["problem"], said["remedy"])
    return found


def shape_of(
    component: Component, components: Mapping[str, Component]
) -> LLMShape | TowerShape | GeneratorShape:
    """Return the component's shape from the plan's file, or else from its checkpoint. The number of
    parameters is counted in the checkpoint's weights if they are present, and otherwise computed from
    config.json.

    An encoder with `tower_of` and without a checkpoint of its own uses the checkpoint of that LLM. Raises
    ConfigError if there is neither a shape nor a checkpoint, or if the checkpoint does not describe a
    component of this kind.
    """
    if component.shape is not None:
        return component.shape
    checkpoint = checkpoint_of(component, components)
    if checkpoint is None or component.kind == "generator":
        raise ConfigError(
            f"components[{component.name}].shape",
            f"the size of this {component.kind} is unknown",
            "Add a shape table, or set `checkpoint` to a folder with its config.json."
            if component.kind != "generator"
            else "Add shape = { parameters = ..., flops_per_unit = ... }.",
        )
    try:
        if component.kind == "encoder":
            counted = _count_parameters(checkpoint, "tower", "projector")
            return tower_from_config(checkpoint.config, counted)
        return llm_shape.from_config(checkpoint.config, _count_parameters(checkpoint, "language_model"))
    except CheckpointError as e:
        raise ConfigError(
            f"components[{component.name}].checkpoint",
            str(e).rstrip("."),
            "Correct the checkpoint, or set shape.",
        ) from e
    except ValidationError as e:
        first = e.errors()[0]
        problem = f"config.json is invalid: {first['loc'][-1]}: {first['msg']}"
        raise ConfigError(
            f"components[{component.name}].checkpoint", problem, "Correct it, or set shape."
        ) from e


def fingerprint_of(component: Component, components: Mapping[str, Component]) -> str | None:
    """Return the fingerprint of an encoder's tower in hex, from the plan's file or the checkpoint, or None if
    neither contains it.

    Reads the tower's weights, unless their digests are cached. Raises ConfigError if the checkpoint cannot be
    read.
    """
    if component.fingerprint is not None or component.kind != "encoder":
        return component.fingerprint
    checkpoint = checkpoint_of(component, components)
    if checkpoint is None:
        return None
    try:
        return checkpoint.fingerprint("tower").hex()
    except CheckpointError as e:
        if e.reason in _NO_WEIGHTS_REASONS | {"unknown_family"}:
            return None
        raise ConfigError(
            f"components[{component.name}].checkpoint", str(e).rstrip("."), "Correct it, or set fingerprint."
        ) from e


def checkpoint_of(component: Component, components: Mapping[str, Component]) -> Checkpoint | None:
    """Return the checkpoint to which `checkpoint` or `model` of the component refers, or else the checkpoint
    of the LLM in `tower_of`. Returns None if there is no checkpoint."""
    for one in (component, components.get(component.tower_of or "")):
        if one is None:
            continue
        for key, model in (("checkpoint", one.checkpoint), ("model", one.model)):
            if model is not None and (found := _open_checkpoint(one, key, str(model))) is not None:
                return found
    return None


def weights_bytes(
    shape: LLMShape | TowerShape | GeneratorShape, quantisation: str, *, tp: int = 1, pp: int = 1, dp: int = 1
) -> int:
    """Return the bytes of weights on the rank with the most weights. Embeddings and towers have 16 bits per
    parameter with any quantisation.

    With attention data parallelism, each group of `tp` ranks has all weights except the experts, which are
    divided among all tp * dp ranks.
    """
    if isinstance(shape, TowerShape):
        return math.ceil(shape.parameters * 2 / tp)
    each = _BYTES_PER_PARAMETER[quantisation]
    if isinstance(shape, GeneratorShape):
        return math.ceil(shape.parameters * each / (tp * pp))
    own = shape.parameters - shape.embedding_parameters
    if dp > 1:
        own -= shape.expert_parameters * (1 - 1 / dp)
    body = own * each
    layers = math.ceil(shape.layers / pp) / shape.layers
    return math.ceil((body * layers + shape.embedding_parameters * 2) / tp)


def expert_bytes(shape: LLMShape, quantisation: str, *, tp: int, pp: int, dp: int) -> float:
    """Return the bytes of routed experts on a rank of the pipeline stage with the most layers, or 0 if the
    number of experts is unknown."""
    layers = math.ceil(shape.layers / pp) / shape.layers
    return shape.expert_parameters * _BYTES_PER_PARAMETER[quantisation] * layers / (tp * dp)


def kv_bytes_per_token(
    shape: LLMShape, *, tp: int = 1, pp: int = 1, dcp: int = 1, element_bytes: int = ELEMENT_BYTES
) -> int:
    """Return the KV bytes per token on one rank: 2 L n d B for L layers, n KV heads of size d, and B bytes
    per element. Heads are divided among the ranks, and repeated if there are more ranks than heads.

    With latent attention (MLA), the bytes are L (r_kv + d_rope) B on every rank. Decode context parallelism
    divides a request's tokens among `dcp` ranks that would otherwise have the same KV.
    """
    layers = math.ceil(shape.layers / pp)
    if shape.mla_rank is not None:
        return math.ceil(layers * shape.mla_rank * element_bytes / dcp)
    heads = math.ceil(shape.kv_heads / min(tp, shape.kv_heads))
    return math.ceil(2 * layers * heads * shape.head_dim * element_bytes / dcp)


def _count_parameters(checkpoint: Checkpoint, *parts: Part) -> int | None:
    """Return the number of parameters of these parts, from the headers of the weight files. Returns None if
    the weights are absent or quantised, or if the checkpoint's family is unknown."""
    if "quantization_config" in checkpoint.config:
        return None
    if "language_model" in parts and _has_unknown_tower(checkpoint.config):
        return None
    try:
        return sum(
            math.prod(shape)
            for part in parts
            for name, shape in checkpoint.tensor_shapes(part).items()
            if not _is_draft_layer(checkpoint, name)
        )
    except CheckpointError as e:
        if e.reason in _NO_WEIGHTS_REASONS | {"unknown_family"}:
            return None
        raise


def _has_unknown_tower(config: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint has a tower but an unknown family, so that the tower's weights would be
    counted as part of the language model."""
    known = str(config.get("model_type")) in FAMILIES
    return not known and any(name in config for name in ("vision_config", "audio_config"))


def _is_draft_layer(checkpoint: Checkpoint, name: str) -> bool:
    """Return whether a weight belongs to a layer beyond `num_hidden_layers`. Such layers are for multi-token
    prediction, and loaded only for speculation."""
    layers = llm_shape.text_config(checkpoint.config).get("num_hidden_layers")
    found = _LAYER_PATTERN.search(name)
    return name.startswith("model.layers.") and bool(found and layers and int(found[1]) >= layers)


def _open_checkpoint(component: Component, key: str, model: str) -> Checkpoint | None:
    """Open the checkpoint to which `key` of a component refers. Returns None if `model` is a hub id that is
    not in the local cache, because a plan may contain models that this host does not have."""
    try:
        return Checkpoint.open(model)
    except CheckpointError as e:
        if key == "model" and e.reason == "not_found":
            return None
        raise ConfigError(
            f"components[{component.name}].{key}", str(e).rstrip("."), "Correct it, or set shape."
        ) from e


def tower_from_config(config: Json, counted_parameters: int | None = None) -> TowerShape:
    """Return the shape of the tower and projector in a model's config.json.

    `counted_parameters` is their number of parameters in the weights, or None if the weights are absent.
    Raises CheckpointError with the reason "bad_config" if config.json has no tower, or "unknown_family" if
    the model's family does not support this tower.
    """
    tower = _tower_config(config)
    hidden = _first_number(tower, _WIDTH_KEYS)
    intermediate = (
        int(tower["mlp_ratio"] * hidden)
        if "embed_dim" in tower and "mlp_ratio" in tower
        else _first_number(tower, ("intermediate_size", "encoder_ffn_dim"))
    )
    layers = (
        max(tower["feature_layers"]) if "feature_layers" in tower else _first_number(tower, _LAYER_COUNT_KEYS)
    )
    patches = _patches_per_token(config, tower)
    mlp = (3 if _model_type(config) in _GATED_MLP else 2) * hidden * intermediate
    # The last two terms are biases and norms: nine vectors of size `hidden` and one of size `intermediate`.
    blocks = layers * (4 * hidden * hidden + mlp + 9 * hidden + intermediate)
    total = blocks + _stem(tower, hidden) + _projector(config, tower, hidden, patches)
    return TowerShape(
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        parameters=counted_parameters or total,
        patches_per_token=patches,
    )


def _tower_config(config: Json) -> Json:
    family = FAMILIES.get(_model_type(config))
    if family is not None:
        return family.tower_spec(config)
    for name in ("vision_config", "audio_config"):
        if isinstance(found := config.get(name), Mapping):
            return found
    raise CheckpointError(
        f"config.json of {_model_type(config)!r} has no tower. Use a model with a tower, or add [shape].",
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
    if _model_type(config) == "qwen2_audio":  # its tower averages every two frames
        return 2
    if _model_type(config) == "ultravox":
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
    if _model_type(config) == "ultravox":
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


def _first_number(tower: Json, names: tuple[str, ...]) -> int:
    found = next((tower[name] for name in names if isinstance(tower.get(name), int)), None)
    if found is None:
        raise CheckpointError(
            f"the tower in config.json has none of {', '.join(names)}. Add [shape] to the component instead.",
            reason="bad_config",
        )
    return int(found)


def _model_type(config: Json) -> str:
    return str(config.get("model_type", ""))


class KnownModelRow(InputTable):
    """Row of data/models.toml."""

    ids: list[str]
    """Hub ids of the models with these shapes."""
    llm: LLMShape
    tower: TowerShape | None = None
    image_tokens: int | None = None
    """Number of tokens per image, or None if the number depends on the image's size."""
    quantisation: Quantisation = "none"
    """Quantisation of the published weights."""
    source: str
    """Source of the config.json with the shapes. A test compares the number of parameters with the published
    number."""


@dataclass(frozen=True)
class StartingModel:
    """Properties of a model that a first plan input needs."""

    name: str
    """Hub id or folder, as the user wrote it."""
    llm: LLMShape
    tower: TowerShape | None
    """Shape of the model's tower, or None if the model has no tower."""
    quantisation: Quantisation
    """Quantisation of the published weights."""
    media_tokens: int
    """Number of tokens of one image or audio clip. This is a placeholder unless `fixed_tokens` is true."""
    fixed_tokens: bool
    """Whether all images or audio clips have the same number of tokens."""
    from_checkpoint: bool
    """Whether config.json is in the folder or the local Hugging Face cache, so that the plan input needs no
    shape."""


def starting_model(name: str) -> StartingModel:
    """Return the model in a checkpoint folder, or with a hub id in data/models.toml or the local Hugging Face
    cache.

    Raises ConfigError for any other name, or for a config.json that does not describe a language model.
    """
    row = known_models().get(name)
    if row is not None and not Path(name).is_dir():
        tokens, fixed = row.image_tokens or IMAGE_TOKENS, row.image_tokens is not None
        return StartingModel(name, row.llm, row.tower, row.quantisation, tokens, fixed, from_checkpoint=False)
    try:
        checkpoint = Checkpoint.open(name)
    except CheckpointError as e:
        if e.reason == "not_found" and not Path(name).is_dir():
            raise ConfigError(
                "MODEL",
                f"{name!r} is not a known model, a folder, or a model in the local cache",
                _suggest_models(name),
            ) from e
        raise ConfigError("MODEL", str(e).rstrip("."), "Pass a checkpoint's folder or a hub id.") from e
    try:
        return _of_checkpoint(name, checkpoint)
    except ConfigError as e:
        problem = str(e).removeprefix(f"{e.field}: ").removesuffix(f". {e.remedy}")
        raise ConfigError("MODEL", problem, "Write the file by hand, see docs/plan-input.md.") from e


@cache
def known_models() -> Mapping[str, KnownModelRow]:
    """Return the row of data/models.toml for each hub id in it."""
    rows = tomllib.loads((files("cornplug.planner") / "data" / "models.toml").read_text())["models"]
    read = [KnownModelRow.model_validate(row) for row in rows]
    return {one: row for row in read for one in row.ids}


def _of_checkpoint(name: str, checkpoint: Checkpoint) -> StartingModel:
    llm = shape_of(Component(name="model", kind="llm", model=name), {})
    assert isinstance(llm, LLMShape)
    tower = None
    if any(isinstance(checkpoint.config.get(key), dict) for key in ("vision_config", "audio_config")):
        found = shape_of(Component(name="tower", kind="encoder", model=name), {})
        assert isinstance(found, TowerShape)
        tower = found
    method = str((checkpoint.config.get("quantization_config") or {}).get("quant_method", ""))
    quantisation: Any = method if method in _QUANTISATIONS else "none"
    tokens = _media_tokens(checkpoint.config, tower) if tower else None
    fixed = tokens is not None
    return StartingModel(name, llm, tower, quantisation, tokens or IMAGE_TOKENS, fixed, from_checkpoint=True)


def _media_tokens(config: Mapping[str, Any], tower: TowerShape) -> int | None:
    """Return the tokens per image, or None if config.json does not fix them."""
    for key in ("mm_tokens_per_image", "image_seq_length"):
        if isinstance(said := config.get(key), int) and said > 0:
            return said
    vision = config.get("vision_config") or {}
    side, patch = vision.get("image_size"), vision.get("patch_size")
    if isinstance(side, int) and isinstance(patch, int) and 0 < patch <= side:
        return max((side // patch) ** 2 // tower.patches_per_token, 1)
    return None


def _suggest_models(name: str) -> str:
    """Return a remedy for an unknown name, with the most similar hub ids."""
    ids = list(known_models())
    by_text = {one.lower(): one for one in ids} | {one.rpartition("/")[2].lower(): one for one in ids}
    wanted = (name.lower(), name.rpartition("/")[2].lower())
    longer = [one for text, one in by_text.items() if any(text.startswith(part) for part in wanted if part)]
    like = [by_text[text] for one in wanted for text in get_close_matches(one, list(by_text), 4, 0.6)]
    close = list(dict.fromkeys([*longer, *like]))[:4]
    folder = "Or pass a folder with config.json, for example from hf download."
    if close:
        return f"Did you mean {', '.join(close)}? {folder}"
    return f"Known: {', '.join(ids)}. {folder}"
