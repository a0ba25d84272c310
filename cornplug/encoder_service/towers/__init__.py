"""Finds the class that runs a family: `Family.network`, imported when it is asked for."""

from __future__ import annotations

import importlib
from typing import cast

from cornplug.encoder_service.towers.base import Architecture
from cornplug.families import Family


def architecture(family: Family) -> Architecture:
    """The class that loads this family's halves."""
    module, _, name = family.network.partition(":")
    return cast(Architecture, getattr(importlib.import_module(f"{__name__}.{module}"), name))
