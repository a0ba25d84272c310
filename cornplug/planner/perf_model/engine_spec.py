"""Attributes of a replica on which its times and memory depend."""

from __future__ import annotations

from dataclasses import dataclass

from cornplug.planner.inputs.schema import GpuSpec
from cornplug.planner.parallelism import Parallelism


@dataclass(frozen=True)
class EngineSpec:
    """GPUs and settings of one replica."""

    gpu: GpuSpec
    engine: str
    """"vllm", "sglang", or the name of the server of a separate tower or generator."""
    parallelism: Parallelism
    share: float
    """Share of each GPU that the replica uses."""
    quantisation: str
    chunk_tokens: int
    max_batch: int
    context_tokens: int | None = None
    """Number of tokens to which prompt tokens attend in a roofline, or None for the tokens of each
    iteration."""
