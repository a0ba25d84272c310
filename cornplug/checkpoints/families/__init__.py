"""Model families: names of tower and projector tensors in a checkpoint, and settings that affect the
embeddings.

Each module with a variable `FAMILIES` describes the families with one kind of tower. This package's
`FAMILIES` maps the `model_type` of config.json to the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from cornplug.checkpoints.families import llava, qwen_vl, whisper
from cornplug.checkpoints.families.family import (
    Json,
    Modality,
    ModelFamily,
    Part,
    Spec,
    unusual_classes,
    without_inert,
)

__all__ = ["FAMILIES", "Json", "Modality", "ModelFamily", "Part", "Spec", "unusual_classes", "without_inert"]

_ALL: Final = (*llava.FAMILIES, *qwen_vl.FAMILIES, *whisper.FAMILIES)
FAMILIES: Final[Mapping[str, ModelFamily]] = MappingProxyType(
    {family.name: family for family in sorted(_ALL, key=lambda family: family.name)}
)
