"""Model families: names of tower and projector tensors in a checkpoint, and settings that affect their
results.

Each family is described by a module with a variable `FAMILY`. Other modules contain shared code. `FAMILIES`
maps the `model_type` of config.json to the family.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

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


def _families() -> Iterator[ModelFamily]:
    for module in pkgutil.iter_modules(__path__):
        family = getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILY", None)
        if family is not None:
            yield family


FAMILIES: Final[Mapping[str, ModelFamily]] = MappingProxyType({family.name: family for family in _families()})
