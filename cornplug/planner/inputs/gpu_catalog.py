"""GPUs and machines of a plan's input, and the GPU and price tables that come with cornplug."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ValidationError

from cornplug.errors import ConfigError
from cornplug.planner.inputs.field_types import (
    Flag,
    Gib,
    Host,
    InputTable,
    Name,
    NonNegative,
    Positive,
    PositiveGib,
    Whole,
    wrong,
)
from cornplug.planner.inputs.input_error import InputError, nearest

_PRICE_TABLES: Final = "Its tables are [[prices]] with shape, gpu, gpus, price_per_hour, source and date."


def _no_truth_value(value: Any) -> Any:
    """The value; `true` would pass for 1."""
    if isinstance(value, bool):
        raise wrong("", f"{str(value).lower()} is not one of its values", "Write 1, 2, 4 or 8.")
    return value


class GpuSpec(InputTable):
    """One device type; overrides or adds to the table that comes with cornplug."""

    name: Name
    """As `gpu` of [[pool]] and of profiles says it; a known name replaces that row of the table."""
    memory_gib: PositiveGib
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
    dram_gib: Gib = 512.0
    """Memory of one machine that caches may take, GiB."""
    nic_gb_s: Positive | None = None
    """Of the whole machine's network card, 10^9 bytes a second. Left out: gpus times the GPU's part."""
    spot: Flag = False
    """The provider may take all of them back at once: online work is on them up to rules.spot_share only.
    Give `price_per_hour`: the price table has prices on demand."""
    weights_gb_s: Positive = 2.0
    """10^9 bytes a second at which a machine reads weights from its disk or the network, for
    `growth_per_minute` of requests."""
    host: Host | None = None
    """Its address, for command lines. Left out: `cornplug launch --address HOST_n=...` sets it."""


class GpuPrice(InputTable):
    """A row of a price table."""

    shape: str
    """The cloud's name of the machine: p5.48xlarge."""
    gpu: str
    gpus: int
    price_per_hour: Positive
    """Dollars for the whole machine."""
    source: str
    date: str


def gpu_table(own: Iterable[GpuSpec] = ()) -> dict[str, GpuSpec]:
    """All devices by name: cornplug's table, with the plan's `own` rows over it."""
    return {**_known_gpus(), **{gpu.name: gpu for gpu in own}}


def price_table(own: Path | None = None) -> tuple[GpuPrice, ...]:
    """The rows of the plan's `own` price table, or cornplug's. Raises ConfigError for an unreadable file."""
    if own is None:
        return _known_prices()
    try:
        content = own.read_bytes()
    except OSError as e:
        raise ConfigError(str(own), f"the price table cannot be read: {e.strerror}", "Name a file.") from e
    return _prices(content, str(own))


def node_classes(
    pool: Iterable[NodeClass], gpus: Mapping[str, GpuSpec], prices: Sequence[GpuPrice]
) -> tuple[NodeClass, ...]:
    """The pool with every price filled in, and every GPU in the table.

    A class without price and shape has the price of the first row with its GPU and number of GPUs.
    Raises ConfigError: a GPU, shape or price that is not known, a shape that is another machine.
    """
    return tuple(priced(i, nodes, gpus, prices) for i, nodes in enumerate(pool))


def priced(i: int, nodes: NodeClass, gpus: Mapping[str, GpuSpec], prices: Sequence[GpuPrice]) -> NodeClass:
    """The `i`-th class of the pool. Raises InputError as `node_classes`."""
    if nodes.gpu not in gpus:
        remedy = f"{nearest(nodes.gpu, list(gpus))} Or describe it in a [[gpus]] table."
        raise InputError(("pool", i, "gpu"), f"no GPU {nodes.gpu!r} in the table", remedy)
    if nodes.shape is None:
        if nodes.price_per_hour is not None:
            return nodes
        found = next((p for p in prices if (p.gpu, p.gpus) == (nodes.gpu, nodes.gpus)), None)
        if found is None:
            shapes = [f"{p.shape} ({p.gpus})" for p in prices if p.gpu == nodes.gpu]
            raise InputError(
                ("pool", i),
                f"no price for a machine with {nodes.gpus} x {nodes.gpu}",
                f"Write price_per_hour = DOLLARS; shapes in the table (GPUs): {', '.join(shapes) or 'none'}.",
            )
        return nodes.model_copy(update={"price_per_hour": found.price_per_hour, "shape": found.shape})
    return _of_shape(i, nodes, prices)


def _of_shape(i: int, nodes: NodeClass, prices: Sequence[GpuPrice]) -> NodeClass:
    found = next((p for p in prices if p.shape == nodes.shape), None)
    if found is None:
        if nodes.price_per_hour is not None:
            return nodes
        known = [p.shape for p in prices if p.gpu == nodes.gpu] or [p.shape for p in prices]
        remedy = f"{nearest(str(nodes.shape), known)} Or write price_per_hour = DOLLARS."
        raise InputError(("pool", i, "shape"), f"no shape {nodes.shape!r} in the price table", remedy)
    if (found.gpu, found.gpus) != (nodes.gpu, nodes.gpus):
        raise InputError(
            ("pool", i, "shape"),
            f"{found.shape} has {found.gpus} x {found.gpu}, not {nodes.gpus} x {nodes.gpu}",
            f"Write gpu = {found.gpu!r} and gpus = {found.gpus}, or another shape.",
        )
    if nodes.price_per_hour is not None:
        return nodes
    return nodes.model_copy(update={"price_per_hour": found.price_per_hour})


@cache
def _known_gpus() -> dict[str, GpuSpec]:
    rows = tomllib.loads(_data("gpus.toml").decode())["gpus"]
    return {row["name"]: _gpu(row) for row in rows}


def _gpu(row: dict[str, Any]) -> GpuSpec:
    date = row.pop("date")
    return GpuSpec.model_validate({**row, "source": f"{row['source']}, {date}"})


@cache
def _known_prices() -> tuple[GpuPrice, ...]:
    return _prices(_data("prices.toml"), "prices.toml")


def _prices(content: bytes, name: str) -> tuple[GpuPrice, ...]:
    try:
        rows = tomllib.loads(content.decode()).get("prices")
        if not isinstance(rows, list):
            raise ConfigError(name, "no [[prices]] in it", _PRICE_TABLES)
        return tuple(GpuPrice.model_validate(row) for row in rows)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(name, f"no TOML: {e}", _PRICE_TABLES) from e
    except ValidationError as e:
        first = e.errors()[0]
        problem = f"row {first['input']}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(name, problem, _PRICE_TABLES) from e


def _data(name: str) -> bytes:
    return (files("cornplug.planner") / "data" / name).read_bytes()
