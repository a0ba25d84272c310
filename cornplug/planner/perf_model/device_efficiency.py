"""Constants of the roofline: the share of a GPU's peak performance that engines reach, and latencies.

The constants for Hopper and Blackwell are fitted to half of 577 published measurements of vLLM (Llama 70B,
MiniMax-M2.5, Qwen3-235B, Kimi-K2.5). `benchmarks/plan_vs_published.py` compares the other half. The constants
for Ampere, Ada, and 16-bit dense models are from kernel times of AIConfigurator 0.12, reduced if the sums of
these times are known to be too short.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from cornplug.planner.inputs.schema import GpuSpec


class LinkEfficiency(NamedTuple):
    """Efficiency of all-reduces between the GPUs of a node."""

    efficiency: float
    """Share of the link's peak bandwidth."""
    latency_s: float
    """Latency in seconds between two ranks. For n ranks, it is multiplied by log2(n)."""


class ComputeEfficiency(NamedTuple):
    """Shares of a GPU's peak FLOPS that engines reach."""

    dense: float
    dense_fp8: float
    experts: float
    """Share for mixtures of experts, whose grouped GEMMs are unevenly filled."""
    experts_fp8: float


NOT_FITTED: Final = 0.5
"""Share of the peak FLOPS that towers and generators reach. It was not compared with published times."""
NVLINK: Final = LinkEfficiency(0.6, 4.5e-6)
PCIE: Final = LinkEfficiency(0.5, 15e-6)
LAYER_S: Final = 40e-6
"""Time in seconds of a layer's sequential kernel launches, independent of the kernels' work."""
EXPERTS_S: Final = 45e-6
"""Additional time in seconds of a layer with experts, for routing, permutation and two grouped GEMMs."""

_OF_GENERATION: Final[Mapping[str, ComputeEfficiency]] = {
    "ampere": ComputeEfficiency(0.7, 0.7, 0.25, 0.25),
    "ada": ComputeEfficiency(0.52, 0.42, 0.2, 0.12),
    "hopper": ComputeEfficiency(0.68, 0.6, 0.19, 0.125),
    "blackwell": ComputeEfficiency(0.47, 0.35, 0.1, 0.09),
    "cpu": ComputeEfficiency(0.5, 0.5, 0.5, 0.5),
}


def compute_efficiency(gpu: GpuSpec, *, fp8: bool, experts: bool) -> float:
    """Return the share of a GPU's peak FLOPS at this precision that an engine reaches with long prompts."""
    of = _OF_GENERATION[gpu.generation]
    if experts:
        return of.experts_fp8 if fp8 else of.experts
    return of.dense_fp8 if fp8 else of.dense
