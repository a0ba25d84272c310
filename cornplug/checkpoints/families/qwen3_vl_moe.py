"""Qwen3-VL with a mixture of experts: another LLM with the same kind of tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cornplug.checkpoints.families.family import ModelFamily
from cornplug.checkpoints.families.qwen3_vl import FAMILY as DENSE

FAMILY: Final[ModelFamily] = replace(DENSE, name="qwen3_vl_moe")
