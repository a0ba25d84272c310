"""Sizes of components, from the plan's file or a checkpoint, and their weight on a device."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic import ValidationError

from cornplug.checkpoints.checkpoint import Checkpoint, Part
from cornplug.checkpoints.families import FAMILIES
from cornplug.errors import CheckpointError, ConfigError
from cornplug.planner.inputs import llm_shape, tower_shape
from cornplug.planner.inputs.schema import Component, GeneratorShape, LLMShape, TowerShape

_BYTES: Final[Mapping[str, float]] = {"none": 2.0, "fp8": 1.0, "awq": 0.52, "gptq": 0.52}
"""Of a linear layer's parameter. Four bits come with a scale and a zero point for each group of 128."""
_NO_WEIGHTS: Final = frozenset({"no_weights", "not_safetensors", "missing_shard"})
_LAYER: Final = re.compile(r"layers\.(\d+)\.")


def resolve(components: Sequence[Component]) -> list[Component]:
    """The components, with shapes and fingerprints filled in from the checkpoints that they name.

    A component that names no checkpoint keeps the shape that it has, or None. Raises ConfigError
    where a checkpoint cannot be read.
    """
    by_name = {c.name: c for c in components}
    return [_resolved(c, by_name) for c in components]


def _resolved(component: Component, components: Mapping[str, Component]) -> Component:
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
    """The shape of the plan's file, else of the checkpoint: counted from its weights, or from config.json.

    An encoder with `tower_of` and without a checkpoint has that LLM's. Raises ConfigError where
    there is neither shape nor checkpoint, or where the checkpoint does not describe such a component.
    """
    if component.shape is not None:
        return component.shape
    checkpoint = checkpoint_of(component, components)
    if checkpoint is None or component.kind == "generator":
        raise ConfigError(
            f"components[{component.name}].shape",
            f"the size of this {component.kind} is not known",
            "Give a shape table, or `checkpoint`, a folder with its config.json."
            if component.kind != "generator"
            else "Give shape = { parameters = ..., flops_per_unit = ... }.",
        )
    try:
        if component.kind == "encoder":
            counted = _counted(checkpoint, "tower", "projector")
            return tower_shape.from_config(checkpoint.config, counted)
        return llm_shape.from_config(checkpoint.config, _counted(checkpoint, "language_model"))
    except CheckpointError as e:
        raise ConfigError(
            f"components[{component.name}].checkpoint", str(e).rstrip("."), "Or give shape."
        ) from e
    except ValidationError as e:
        first = e.errors()[0]
        problem = f"no model can be as config.json says: {first['loc'][-1]}: {first['msg']}"
        raise ConfigError(f"components[{component.name}].checkpoint", problem, "Or give shape.") from e


def fingerprint_of(component: Component, components: Mapping[str, Component]) -> str | None:
    """The fingerprint of an encoder's tower, in hex; None where neither checkpoint nor plan has one.

    Reads the tower's weights, unless their digests are known from before. Raises ConfigError for a
    checkpoint that cannot be read.
    """
    if component.fingerprint is not None or component.kind != "encoder":
        return component.fingerprint
    checkpoint = checkpoint_of(component, components)
    if checkpoint is None:
        return None
    try:
        return checkpoint.fingerprint("tower").hex()
    except CheckpointError as e:
        if e.reason in _NO_WEIGHTS | {"unknown_family"}:
            return None
        raise ConfigError(
            f"components[{component.name}].checkpoint", str(e).rstrip("."), "Or give fingerprint."
        ) from e


def checkpoint_of(component: Component, components: Mapping[str, Component]) -> Checkpoint | None:
    """Its own, by `checkpoint` or `model`, or that of the LLM which its tower is of."""
    for one in (component, components.get(component.tower_of or "")):
        if one is None:
            continue
        for key, model in (("checkpoint", one.checkpoint), ("model", one.model)):
            if model is not None and (found := _opened(one, key, str(model))) is not None:
                return found
    return None


def weights_bytes(
    shape: LLMShape | TowerShape | GeneratorShape, quantisation: str, *, tp: int = 1, pp: int = 1, dp: int = 1
) -> int:
    """Of the fullest rank. Embeddings keep 16 bits under any quantisation, and so do towers.

    With attention data parallelism each group of `tp` ranks has all weights but the experts', which all
    tp * dp ranks share.
    """
    if isinstance(shape, TowerShape):
        return math.ceil(shape.parameters * 2 / tp)
    each = _BYTES[quantisation]
    if isinstance(shape, GeneratorShape):
        return math.ceil(shape.parameters * each / (tp * pp))
    own = shape.parameters - shape.embedding_parameters
    if dp > 1:
        own -= shape.expert_parameters * (1 - 1 / dp)
    body = own * each
    layers = math.ceil(shape.layers / pp) / shape.layers
    return math.ceil((body * layers + shape.embedding_parameters * 2) / tp)


def expert_bytes(shape: LLMShape, quantisation: str, *, tp: int, pp: int, dp: int) -> float:
    """Of the routed experts that a rank of the fullest pipeline stage holds; 0: their number is not known."""
    layers = math.ceil(shape.layers / pp) / shape.layers
    return shape.expert_parameters * _BYTES[quantisation] * layers / (tp * dp)


def kv_bytes_per_token(
    shape: LLMShape, *, tp: int = 1, pp: int = 1, dcp: int = 1, element_bytes: int = 2
) -> int:
    """Of one rank: 2 L n d B, with heads spread over ranks and repeated beyond their number.

    Latent attention (MLA): L (r_kv + d_rope) B, the same on every rank. Of ranks with the same, decode
    context parallelism gives each a `dcp`-th of a request's tokens.
    """
    layers = math.ceil(shape.layers / pp)
    if shape.mla_rank is not None:
        return math.ceil(layers * shape.mla_rank * element_bytes / dcp)
    heads = math.ceil(shape.kv_heads / min(tp, shape.kv_heads))
    return math.ceil(2 * layers * heads * shape.head_dim * element_bytes / dcp)


def _counted(checkpoint: Checkpoint, *parts: Part) -> int | None:
    """Parameters in the weights' headers; None where they are not there, or packed."""
    if "quantization_config" in checkpoint.config:
        return None
    if "language_model" in parts and _holds_more(checkpoint.config):
        return None
    try:
        return sum(
            math.prod(shape)
            for part in parts
            for name, shape in checkpoint.shapes(part).items()
            if not _beyond(checkpoint, name)
        )
    except CheckpointError as e:
        if e.reason in _NO_WEIGHTS | {"unknown_family"}:
            return None
        raise


def _holds_more(config: Mapping[str, Any]) -> bool:
    """Whether a tower that no family knows would count as language model."""
    known = str(config.get("model_type")) in FAMILIES
    return not known and any(name in config for name in ("vision_config", "audio_config"))


def _beyond(checkpoint: Checkpoint, name: str) -> bool:
    """Layers after the last one: for multi-token prediction, loaded for speculation only."""
    layers = llm_shape.text_config(checkpoint.config).get("num_hidden_layers")
    found = _LAYER.search(name)
    return name.startswith("model.layers.") and bool(found and layers and int(found[1]) >= layers)


def _opened(component: Component, key: str, model: str) -> Checkpoint | None:
    """None for a hub id that is not in the local cache: a plan may name models that are not here."""
    try:
        return Checkpoint.open(model)
    except CheckpointError as e:
        if key == "model" and e.reason == "not_found":
            return None
        raise ConfigError(f"components[{component.name}].{key}", str(e).rstrip("."), "Or give shape.") from e
