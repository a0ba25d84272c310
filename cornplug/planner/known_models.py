"""Models for a first plan input: published models by hub id, and checkpoints on disk."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.errors import CheckpointError, ConfigError
from cornplug.planner.inputs import component_shapes
from cornplug.planner.inputs.schema import Component, InputTable, LLMShape, Quantisation, TowerShape

IMAGE_TOKENS: Final = 1024
"""Placeholder for the number of tokens of an image, for models in which this number depends on the image's
size. An image of 1024 x 1024 pixels has this number of tokens with Qwen3-VL's 32 x 32 pixels per token."""
_QUANTISATIONS: Final = ("fp8", "awq", "gptq")


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
    llm = component_shapes.shape_of(Component(name="model", kind="llm", model=name), {})
    assert isinstance(llm, LLMShape)
    tower = None
    if any(isinstance(checkpoint.config.get(key), dict) for key in ("vision_config", "audio_config")):
        found = component_shapes.shape_of(Component(name="tower", kind="encoder", model=name), {})
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
