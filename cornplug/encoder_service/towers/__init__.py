"""Which module encodes which family: `model_type` of config.json -> "module:Class"."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Final, cast

from cornplug.encoder_service.towers.base import Architecture
from cornplug.errors import CheckpointError

TOWERS: Final[Mapping[str, str]] = {
    "llava": "cornplug.encoder_service.towers.clip:LlavaClip",
    "qwen2_vl": "cornplug.encoder_service.towers.qwen2_vl:Qwen2Vl",
}


def architecture(model_type: str) -> Architecture:
    """Import the class that loads this family. CheckpointError("unknown_family") where there is none."""
    target = TOWERS.get(model_type)
    if target is None:
        raise CheckpointError(
            f"no tower for model_type {model_type!r}; the service encodes {', '.join(TOWERS)}",
            reason="unknown_family",
        )
    module, _, name = target.partition(":")
    return cast(Architecture, getattr(importlib.import_module(module), name))
