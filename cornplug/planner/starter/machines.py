"""Machines of a list of GPUs with their prices, and whether a model fits on them."""

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
"""Share of a GPU's memory for weights. The rest is for the KV cache and the engine."""
_ROOFLINE: Final = RooflineProfile()


@dataclass(frozen=True)
class PricedMachine:
    """A machine with a number of GPUs of one type, and its rows of the price table."""

    prices: tuple[GpuPrice, ...]
    """Rows of the price table. `cornplug plan` uses the first if a file gives only the GPU and the number."""

    @property
    def gpu(self) -> str:
        return self.prices[0].gpu

    @property
    def gpus(self) -> int:
        return self.prices[0].gpus


@dataclass(frozen=True)
class HostingOption:
    """The model on one GPU type, with weights as published, or in FP8 if only that fits."""

    gpu: GpuSpec
    quantisation: Quantisation
    most_tp: int
    """Largest tensor-parallel degree on this GPU."""

    def step_s(self, llm: LLMShape) -> float:
        """Return the seconds to read a token's active weights once at `most_tp`."""
        active = (llm.active_parameters or llm.parameters) / llm.parameters
        read = weights_bytes(llm, self.quantisation, tp=self.most_tp) * active
        return read / (_ROOFLINE.bandwidth_efficiency * self.gpu.bandwidth_gb_s * 1e9)

    def prefill_s(self, llm: LLMShape, tokens: int) -> float:
        """Return the compute time of a prompt in seconds at `most_tp`: two operations per weight and
        token."""
        flops = 2 * (llm.active_parameters or llm.parameters) * tokens
        efficiency = compute_efficiency(self.gpu, fp8=False, experts=llm.active_parameters is not None)
        return flops / (efficiency * self.gpu.bf16_tflops * 1e12 * self.most_tp)


def priced_machines(gpus: Sequence[str]) -> list[PricedMachine]:
    """Return the machines of the price table with these GPUs, in the order of the list, smallest first.

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
    """Return the GPUs of these machines that can hold the model. Raises ConfigError if there are none."""
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
