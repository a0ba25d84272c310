"""Machines that can be had, and their GPUs, as a plan's input describes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from cornplug.planner.inputs.field_types import (
    Flag,
    InputTable,
    Name,
    NonNegative,
    Positive,
    Whole,
    wrong,
)


def _no_truth_value(value: Any) -> Any:
    """The value; `true` would pass for 1."""
    if isinstance(value, bool):
        raise wrong("", f"{str(value).lower()} is not one of its values", "Write 1, 2, 4 or 8.")
    return value


class GpuSpec(InputTable):
    """One device type; overrides or adds to the table that comes with cornplug."""

    name: Name
    """As `gpu` of [[pool]] and of profiles says it; a known name replaces that row of the table."""
    memory_gib: Positive
    """Memory of one device, GiB."""
    bandwidth_gb_s: Positive
    """Of its memory, 10^9 bytes a second."""
    bf16_tflops: Positive
    """Dense, not sparse, 10^12 a second."""
    fp8_tflops: NonNegative = 0.0
    """Dense, 10^12 a second; 0: no FP8 arithmetic."""
    link_gb_s: Positive = 32.0
    """To another GPU of the node, one direction, 10^9 bytes a second."""
    nic_gb_s: Positive = 25.0
    """Its part of the node's network card, 10^9 bytes a second."""
    watts: NonNegative = 0.0
    """Power at full load."""
    nvlink: Flag = False
    """Without it tensor parallelism ends at 2."""
    generation: Literal["ampere", "ada", "hopper", "blackwell", "cpu"] = "ampere"
    """Memory is counted by it: "cpu" for a core of a processor."""
    source: str = "given"
    """Where the figures come from."""


class NodeClass(InputTable):
    """Machines of one shape that can be had."""

    name: Name
    """Name in this file."""
    gpu: str
    """Device type, of the GPU table or of [[gpus]]."""
    gpus: Annotated[Literal[1, 2, 4, 8], BeforeValidator(_no_truth_value)] = 8
    """Of one machine."""
    price_per_hour: NonNegative | None = None
    """Dollars for the whole machine. Left out: the price table's, by `shape`, else by GPU and number."""
    shape: str | None = None
    """An instance shape of the price table: p5.48xlarge."""
    stock: Whole = 64
    """Machines that can be had at most."""
    dram_gib: NonNegative = 512.0
    """Memory of one machine that caches may take, GiB."""
    nic_gb_s: Positive | None = None
    """Of the whole machine's network card, 10^9 bytes a second. Left out: gpus times the GPU's part."""
    host: str | None = None
    """Its address, for command lines. Left out: `cornplug launch --address HOST_n=...` sets it."""
