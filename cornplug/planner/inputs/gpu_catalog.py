"""GPUs and machines in a plan's input, and the GPU and price tables that come with cornplug."""

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
    InputError,
    InputTable,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveGib,
    field_error,
    suggest_known_name,
)

_PRICE_TABLE_REMEDY: Final = "Write [[prices]] tables with shape, gpu, gpus, price_per_hour, source and date."


def _reject_bool(value: Any) -> Any:
    """Reject booleans, because `true` would be accepted as 1."""
    if isinstance(value, bool):
        raise field_error("", f"{str(value).lower()} is not an allowed value", "Write 1, 2, 4 or 8.")
    return value


class GpuSpec(InputTable):
    """GPU type that extends or overrides cornplug's table."""

    name: Name
    """Name of the GPU type."""
    memory_gib: PositiveGib
    """Memory in GiB."""
    bandwidth_gb_s: Positive
    """Memory bandwidth in GB/s."""
    bf16_tflops: Positive
    """Dense BF16 throughput in TFLOPS."""
    fp8_tflops: NonNegative = 0.0
    """Dense FP8 throughput in TFLOPS, or 0 if the GPU has no FP8 arithmetic."""
    link_gb_s: Positive = 32.0
    """Bandwidth to another GPU of the node in one direction, in GB/s."""
    nic_gb_s: Positive = 25.0
    """Network bandwidth of the node divided by its number of GPUs, in GB/s."""
    watts: NonNegative = 0.0
    """Power in watts at full load."""
    nvlink: Flag = False
    """Whether NVLink connects the GPUs of a node. Without it, tp is at most 2."""
    generation: Literal["ampere", "ada", "hopper", "blackwell", "cpu"] = "ampere"
    """Determines efficiency and memory overhead. "cpu" is one core of a processor."""
    source: str = "given"
    """Source of these figures."""


class NodeClass(InputTable):
    """Identical machines that you can rent or own."""

    name: Name
    """Name of the machine type."""
    gpu: str
    """GPU type."""
    gpus: Annotated[Literal[1, 2, 4, 8], BeforeValidator(_reject_bool)] = 8
    """Number of GPUs."""
    price_per_hour: NonNegative | None = None
    """Dollars per hour of a machine, by default from the price table."""
    shape: str | None = None
    """Instance type in the price table, such as p5.48xlarge."""
    stock: NonNegativeInt = 64
    """Maximum number of machines."""
    dram_gib: Gib = 512.0
    """Memory for caches in GiB."""
    nic_gb_s: Positive | None = None
    """Network bandwidth in GB/s, by default the sum of the GPUs' shares."""
    spot: Flag = False
    """Whether these are spot machines, which serve at most `rules.spot_share` of online requests. Requires
    `price_per_hour`."""
    weights_gb_s: Positive = 2.0
    """Speed of reading weights in GB/s."""
    host: Host | None = None
    """Address, by default set with `cornplug launch --address HOST_n=...`."""


class GpuPrice(InputTable):
    """Row of a price table."""

    shape: str
    """The cloud's name of the machine, such as p5.48xlarge."""
    gpu: str
    gpus: int
    price_per_hour: Positive
    """Price of the whole machine in dollars."""
    source: str
    date: str


def gpu_table(overrides: Iterable[GpuSpec] = ()) -> dict[str, GpuSpec]:
    """Return all GPU types by name: cornplug's table, and the GPU types `overrides` of the plan's input,
    which replace types with the same name."""
    return {**_known_gpus(), **{gpu.name: gpu for gpu in overrides}}


def price_table(path: Path | None = None) -> tuple[GpuPrice, ...]:
    """Return the price table in the file `path`, or cornplug's price table if `path` is None. Raises
    ConfigError if the file cannot be read."""
    if path is None:
        return _known_prices()
    try:
        content = path.read_bytes()
    except OSError as e:
        raise ConfigError(str(path), f"cannot read the price table: {e.strerror}", "Correct the path.") from e
    return _prices(content, str(path))


def node_classes(
    pool: Iterable[NodeClass], gpus: Mapping[str, GpuSpec], prices: Sequence[GpuPrice]
) -> tuple[NodeClass, ...]:
    """Return the node classes of the pool with their prices from the price table.

    A class without a price or shape has the price of the first row with the same GPU and number of GPUs.
    Raises ConfigError if a GPU, shape or price is unknown, or if a shape has another GPU or number of GPUs.
    """
    return tuple(price_node_class(i, nodes, gpus, prices) for i, nodes in enumerate(pool))


def price_node_class(
    i: int, nodes: NodeClass, gpus: Mapping[str, GpuSpec], prices: Sequence[GpuPrice]
) -> NodeClass:
    """Return `nodes`, the node class at index `i` of the pool, with its price. Raises InputError, which is a
    ConfigError, in the same cases as `node_classes`."""
    if nodes.gpu not in gpus:
        remedy = f"{suggest_known_name(nodes.gpu, list(gpus))} Or describe it in a [[gpus]] table."
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
                f"Set price_per_hour. Shapes in the table (GPUs): {', '.join(shapes) or 'none'}.",
            )
        return nodes.model_copy(update={"price_per_hour": found.price_per_hour, "shape": found.shape})
    return _price_by_shape(i, nodes, prices)


def _price_by_shape(i: int, nodes: NodeClass, prices: Sequence[GpuPrice]) -> NodeClass:
    found = next((p for p in prices if p.shape == nodes.shape), None)
    if found is None:
        if nodes.price_per_hour is not None:
            return nodes
        known = [p.shape for p in prices if p.gpu == nodes.gpu] or [p.shape for p in prices]
        remedy = f"{suggest_known_name(str(nodes.shape), known)} Or set price_per_hour."
        raise InputError(("pool", i, "shape"), f"no shape {nodes.shape!r} in the price table", remedy)
    if (found.gpu, found.gpus) != (nodes.gpu, nodes.gpus):
        raise InputError(
            ("pool", i, "shape"),
            f"{found.shape} has {found.gpus} x {found.gpu}, not {nodes.gpus} x {nodes.gpu}",
            f"Write gpu = {found.gpu!r} and gpus = {found.gpus}, or choose another shape.",
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
            raise ConfigError(name, "the file contains no [[prices]]", _PRICE_TABLE_REMEDY)
        return tuple(GpuPrice.model_validate(row) for row in rows)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(name, f"invalid TOML: {e}", _PRICE_TABLE_REMEDY) from e
    except ValidationError as e:
        first = e.errors()[0]
        problem = f"row {first['input']}: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(name, problem, _PRICE_TABLE_REMEDY) from e


def _data(name: str) -> bytes:
    return (files("cornplug.planner") / "data" / name).read_bytes()
