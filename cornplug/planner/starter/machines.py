"""Machines that have given GPUs, with their prices, and the GPUs on which a model fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from cornplug.errors import ConfigError
from cornplug.planner.candidates.replica_configs import TP_WITHOUT_NVLINK
from cornplug.planner.inputs import gpu_catalog
from cornplug.planner.inputs.component_shapes import weights_bytes
from cornplug.planner.inputs.components import TP_DEGREES
from cornplug.planner.inputs.gpu_catalog import GpuPrice
from cornplug.planner.inputs.input_error import nearest
from cornplug.planner.inputs.schema import GpuSpec, LLMShape, Quantisation, RooflineProfile
from cornplug.planner.perf_model.device_efficiency import compute_efficiency

_GIB: Final = 1 << 30
_ROOM: Final = 0.8
"""Fraction of a GPU's memory that weights may use. The rest is for the KV cache and the engine."""
_ROOFLINE: Final = RooflineProfile()


@dataclass(frozen=True)
class PricedMachine:
    """Machine with a number of GPUs of one type, and the prices of such machines."""

    prices: tuple[GpuPrice, ...]
    """Rows of the price table. `cornplug plan` uses the first row if its input has only the GPU type and the
    number of GPUs."""

    @property
    def gpu(self) -> str:
        return self.prices[0].gpu

    @property
    def gpus(self) -> int:
        return self.prices[0].gpus


@dataclass(frozen=True)
class HostingOption:
    """GPU type on which the model fits, with the weights as published, or in FP8 if only FP8 weights fit."""

    gpu: GpuSpec
    quantisation: Quantisation
    most_tp: int
    """Largest tensor-parallel degree of the model in one machine with this GPU type."""

    def step_s(self, llm: LLMShape) -> float:
        """Return the estimated seconds of a decode step at `most_tp`: the time to read the active weights
        once."""
        active = (llm.active_parameters or llm.parameters) / llm.parameters
        read = weights_bytes(llm, self.quantisation, tp=self.most_tp) * active
        return read / (_ROOFLINE.bandwidth_efficiency * self.gpu.bandwidth_gb_s * 1e9)

    def prefill_s(self, llm: LLMShape, tokens: int) -> float:
        """Return the estimated seconds to compute a prompt at `most_tp`, with two operations for each weight
        and token."""
        flops = 2 * (llm.active_parameters or llm.parameters) * tokens
        efficiency = compute_efficiency(self.gpu, fp8=False, experts=llm.active_parameters is not None)
        return flops / (efficiency * self.gpu.bf16_tflops * 1e12 * self.most_tp)


def priced_machines(gpus: Sequence[str]) -> list[PricedMachine]:
    """Return the machines in the price table that have these GPUs, in the order of `gpus`. Machines with the
    same GPU are in the order of their number of GPUs.

    Raises ConfigError for a GPU that is not in the table.
    """
    table = gpu_catalog.price_table()
    known = list(dict.fromkeys(row.gpu for row in table))
    found = []
    for gpu in dict.fromkeys(gpus):
        rows = sorted((row for row in table if row.gpu == gpu), key=lambda row: row.gpus)
        if not rows:
            remedy = f"{nearest(gpu, known)} Add other GPUs to the file as [[gpus]] and [[pool]]."
            raise ConfigError("--gpus", f"no GPU {gpu!r} in the price table", remedy)
        found += [PricedMachine(tuple(of)) for _, of in groupby(rows, key=lambda row: row.gpus)]
    return found


def hosting_options(
    llm: LLMShape, published: Quantisation, machines: Sequence[PricedMachine]
) -> list[HostingOption]:
    """Return the GPU types of these machines on which the model fits. Raises ConfigError if there are none.

    `published` is the quantisation of the published weights.
    """
    if found := _able(llm, published, machines):
        return found
    every = priced_machines([row.gpu for row in gpu_catalog.price_table()])
    able = ", ".join(option.gpu.name for option in _able(llm, published, every))
    remedy = (
        f"GPUs with enough memory: {able}."
        if able
        else "Write a file with pp by hand, see docs/plan-input.md."
    )
    names = ", ".join(dict.fromkeys(machine.gpu for machine in machines))
    gib = weights_bytes(llm, published) / _GIB
    raise ConfigError("--gpus", f"weights of {gib:.0f} GiB do not fit on one machine with {names}", remedy)


def _able(llm: LLMShape, published: Quantisation, machines: Sequence[PricedMachine]) -> list[HostingOption]:
    table = gpu_catalog.gpu_table()
    most = {machine.gpu: machine.gpus for machine in machines}  # the last machine of a GPU is the largest
    found = (_option(llm, published, table[gpu], gpus) for gpu, gpus in most.items())
    return [option for option in found if option is not None]


def _option(llm: LLMShape, published: Quantisation, gpu: GpuSpec, gpus: int) -> HostingOption | None:
    most = gpus if gpu.nvlink else min(gpus, TP_WITHOUT_NVLINK)
    tp = max(degree for degree in TP_DEGREES if degree <= most and llm.heads % degree == 0)
    choices: tuple[Quantisation, ...] = (published, "fp8") if published == "none" else (published,)
    for quantisation in choices:
        computes = quantisation != "fp8" or gpu.fp8_tflops > 0
        if computes and weights_bytes(llm, quantisation, tp=tp) <= _ROOM * gpu.memory_gib * _GIB:
            return HostingOption(gpu, quantisation, tp)
    return None
