"""Qwen3-VL with a mixture of experts: another LLM behind the same kind of tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from cornplug.families.base import Family
from cornplug.families.qwen3_vl import FAMILY as DENSE

FAMILY: Final[Family] = replace(DENSE, name="qwen3_vl_moe")
