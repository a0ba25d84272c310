"""The tables that come with cornplug, and a plan's own rows over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from expected_errors import expect_error

from cornplug.errors import ConfigError
from cornplug.planner.inputs.gpu_catalog import gpu_table, node_classes, price_table
from cornplug.planner.inputs.schema import GpuSpec, NodeClass


def priced(*pool: dict[str, Any], prices: Path | None = None) -> tuple[NodeClass, ...]:
    nodes = [NodeClass.model_validate({"name": f"n{i}", **row}) for i, row in enumerate(pool)]
    return node_classes(nodes, gpu_table(), price_table(prices))


def price_per_gpu(shape: str) -> float:
    row = next(p for p in price_table() if p.shape == shape)
    return row.price_per_hour / row.gpus


def test_gpu_catalog_every_row_has_source_and_date() -> None:
    for gpu in gpu_table().values():
        assert gpu.source
        assert "202" in gpu.source
    for price in price_table():
        assert price.source
        assert price.date >= "2023"
        assert price.gpu in gpu_table()
    assert len({p.shape for p in price_table()}) == len(price_table())


@pytest.mark.parametrize(
    ("dear", "cheap", "low", "high"),
    [
        ("p5.48xlarge", "p4de.24xlarge", 2.0, 2.16),
        ("coreweave/h100x8", "coreweave/a100x8", 2.0, 2.16),
        ("p6-b200.48xlarge", "p5.48xlarge", 1.86, 2.07),
        ("nebius/b200x8", "nebius/h100x8", 1.86, 2.07),
        ("g6.48xlarge", "g6.xlarge", 2.07, 2.08),
    ],
)
def test_price_table_ratios_lie_in_published_range(dear: str, cheap: str, low: float, high: float) -> None:
    assert low <= round(price_per_gpu(dear) / price_per_gpu(cheap), 2) <= high


def test_gpu_table_flops_are_dense() -> None:
    gpus = gpu_table()
    assert gpus["H100"].bf16_tflops == 989
    assert gpus["L4"].bf16_tflops == 121
    assert gpus["A100-80"].fp8_tflops == 0, "no FP8 before Ada and Hopper"
    assert not gpus["L4"].nvlink


def test_gpu_table_rows_of_plan_override_and_add() -> None:
    own = {"memory_gib": 45, "bandwidth_gb_s": 696, "bf16_tflops": 150}
    rows = [{"name": "A40", **own}, {"name": "H100", **own, "source": "ours"}]
    gpus = gpu_table([GpuSpec.model_validate(row) for row in rows])
    assert gpus["A40"].memory_gib == 45
    assert gpus["H100"].source == "ours"
    assert gpu_table()["H100"].memory_gib == 80, "of that plan only"


def test_prices_are_filled_in_by_shape_by_gpu_or_as_given() -> None:
    filled = priced(
        {"gpu": "H100", "gpus": 8},
        {"gpu": "H100", "gpus": 8, "shape": "nebius/h100x8"},
        {"gpu": "H100", "gpus": 8, "shape": "p5.48xlarge", "price_per_hour": 14.64},
        {"gpu": "L4", "gpus": 1},
        {"gpu": "cpu-core", "gpus": 2, "price_per_hour": 0.1, "shape": "our-box"},
        {"gpu": "cpu-core", "gpus": 2, "price_per_hour": 0.2},
    )
    assert [n.price_per_hour for n in filled] == [55.04, 23.60, 14.64, 0.8048, 0.1, 0.2]
    assert filled[0].shape == "p5.48xlarge"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"gpu": "H1000"}, "pool[0].gpu: no GPU 'H1000' in the table. Did you mean 'H100'? Known: L4, "),
        (
            {"gpu": "H100", "gpus": 2},
            "pool[0]: no price for a machine with 2 x H100. Set price_per_hour. ",
        ),
        (
            {"gpu": "H100", "shape": "p5.48xl"},
            "pool[0].shape: no shape 'p5.48xl' in the price table. Did you ",
        ),
        ({"gpu": "H100", "shape": "g6.xlarge"}, "pool[0].shape: g6.xlarge has 1 x L4, not 8 x H100. Write "),
    ],
)
def test_node_classes_without_price_are_refused_with_remedy(nodes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        priced(nodes)
    assert str(raised.value).startswith(message)


def test_price_table_custom_file_replaces_catalog(tmp_path: Path) -> None:
    own = tmp_path / "prices.toml"
    row = {"shape": "rack", "gpu": "H100", "gpus": 8, "price_per_hour": 20, "source": "us", "date": "now"}
    own.write_text("[[prices]]\n" + "".join(f"{k} = {v!r}\n" for k, v in row.items()))
    assert priced({"gpu": "H100"}, prices=own)[0].price_per_hour == 20
    own.write_text('[[prices]]\nshape = "rack"\n')
    with expect_error(ConfigError, field=str(own), match="rack"):
        priced({"gpu": "H100"}, prices=own)
    for content in ("prices = 3", "[["):
        own.write_text(content)
        with expect_error(ConfigError, field=str(own)):
            priced({"gpu": "H100"}, prices=own)
    with expect_error(ConfigError, field=str(tmp_path / "absent.toml")):
        priced({"gpu": "H100"}, prices=tmp_path / "absent.toml")
