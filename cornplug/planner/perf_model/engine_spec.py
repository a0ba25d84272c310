"""Attributes of a replica that its times and memory depend on."""

from __future__ import annotations

from dataclasses import dataclass

from cornplug.planner.inputs.schema import GpuSpec
from cornplug.planner.parallelism import Parallelism


@dataclass(frozen=True)
class EngineSpec:
    """GPUs and settings of one replica."""

    gpu: GpuSpec
    engine: str
    """"vllm" or "sglang", or the server of a separate tower or generator."""
    parallelism: Parallelism
    share: float
    """Share of each GPU."""
    quantisation: str
    chunk_tokens: int
    max_batch: int
    context_tokens: int | None = None
    """Typical prompt for a roofline's attention, or None for each iteration's own."""
