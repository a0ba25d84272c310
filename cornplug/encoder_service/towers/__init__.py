"""Towers of all families. A family's `TowerArchitecture` (`ModelFamily.tower_class`) is imported on first
use."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import Modality, ModelFamily
from cornplug.encoder_service.towers.base import TowerArchitecture
from cornplug.errors import CheckpointError

if TYPE_CHECKING:
    from cornplug.encoder_service.towers.log_mel import LogMelFeatures


def find_architecture(family: ModelFamily, modalities: Sequence[Modality] = ()) -> TowerArchitecture:
    """Return the architecture of the family's tower for these modalities. The default is the family's first
    modality."""
    module, _, name = family.tower_class.partition(":")
    found = getattr(importlib.import_module(f"{__name__}.{module}"), name)
    if family.generic:
        found = found(tuple(modalities) or (family.first_modality,))
    return cast(TowerArchitecture, found)


def feature_extractor(checkpoint: Checkpoint) -> LogMelFeatures:
    """Return the feature extractor that computes the inputs of this checkpoint's tower from audio samples.

    Raises CheckpointError("bad_config") if the family does not support audio, or if the checkpoint's feature
    extractor is not supported.
    """
    found = getattr(find_architecture(checkpoint.family), "feature_extractor", None)
    if found is None:
        raise CheckpointError(f"{checkpoint.family.name} does not support audio", reason="bad_config")
    return cast("LogMelFeatures", found(checkpoint.preprocessors["audio"]))
