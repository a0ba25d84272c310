"""Families that cornplug describes: names of tower and projector tensors in a checkpoint, and settings that
affect the embeddings.

Each of the modules `*_families.py` describes the families with one kind of tower. `FAMILIES` maps the
`model_type` of config.json to the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from cornplug.checkpoints import llava_families, qwen_vl_families, whisper_families
from cornplug.checkpoints.model_family import (
    Json,
    Modality,
    ModelFamily,
    Part,
    Spec,
    unusual_classes,
    without_inert,
)

__all__ = ["FAMILIES", "Json", "Modality", "ModelFamily", "Part", "Spec", "unusual_classes", "without_inert"]

_ALL: Final = (*llava_families.FAMILIES, *qwen_vl_families.FAMILIES, *whisper_families.FAMILIES)
FAMILIES: Final[Mapping[str, ModelFamily]] = MappingProxyType(
    {family.name: family for family in sorted(_ALL, key=lambda family: family.name)}
)
