"""Refusals by name: checkpoints with wrong tensors, and untrusted inputs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from expected_errors import expect_error
from safetensors.torch import load_file, save_file

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import FAMILIES
from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.towers.base import FLOAT_DTYPES, TowerInput, from_wire, validate_input
from cornplug.errors import CheckpointError, EncoderRefused
from devkit import checkpoints

from ..conftest import inputs_of, sample_image, to_wire
from ..tower_rig import CPU, F32, Halves, edit_config


def test_tower_layers_past_the_cut_are_not_loaded(tmp_path: Path) -> None:
    """The last layer may even be damaged: it lies past the cut."""
    path = checkpoints.llava(tmp_path / "m")
    inputs = inputs_of(path, sample_image(0))
    tower = Halves.load(path).tower
    before = tower.encode([tower.prepare(inputs)])[0]
    change(
        path, "vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight", torch.full((128, 64), torch.nan)
    )
    tower = Halves.load(path).tower
    assert torch.equal(tower.encode([tower.prepare(inputs)])[0], before)


def change(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    weights = load_file(path / "model.safetensors")
    if tensor is None:
        del weights[name]
    else:
        weights[name] = tensor
    save_file(weights, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("vision_tower.vision_model.encoder.layers.0.self_attn.q_proj.bias", None, "lacks"),
        ("vision_tower.vision_model.encoder.layers.0.gate", torch.zeros(3), "unknown tensors"),
        ("vision_tower.vision_model.pre_layrnorm.weight", torch.zeros(3), "shapes do not match"),
        ("vision_tower.vision_model.pre_layrnorm.weight", torch.zeros(64, dtype=torch.int8), "quantised"),
    ],
)
def test_load_tower_wrong_tensors_are_named(
    name: str, tensor: torch.Tensor | None, says: str, tmp_path: Path
) -> None:
    path = checkpoints.llava(tmp_path / "m")
    change(path, name, tensor)
    with expect_error(CheckpointError, reason="bad_tensors", match=says) as e:
        towers.find_architecture(FAMILIES["llava"]).load_tower(Checkpoint.open(str(path)), F32, CPU)
    assert name.removeprefix("vision_tower.vision_model.") in str(e.value)


def test_load_projector_of_other_width_is_refused(tmp_path: Path) -> None:
    path = checkpoints.llava(tmp_path / "m")
    change(path, "multi_modal_projector.linear_1.bias", torch.zeros(5))
    with expect_error(CheckpointError, reason="bad_tensors", match=r"linear_1\.bias"):
        towers.find_architecture(FAMILIES["llava"]).load_projector(Checkpoint.open(str(path)), F32, CPU)


def test_tower_cut_outside_its_layers_is_refused(tmp_path: Path) -> None:
    path = checkpoints.llava(tmp_path / "m")
    edit_config(path, vision_feature_layer=9)
    with pytest.raises(CheckpointError):
        Halves.load(path)


GOOD = torch.zeros(3, 56, 56)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "pixel_values: missing"),
        ({"pixel_values": to_wire(GOOD), "extra": to_wire(GOOD)}, "extra: unknown"),
        ({"pixel_values": to_wire(GOOD.to(torch.int64))}, "pixel_values: dtype"),
        ({"pixel_values": WireTensor(dtype="uint8", shape=(3, 56, 56), data=b"")}, "pixel_values: dtype"),
        ({"pixel_values": to_wire(GOOD[:, :28])}, "pixel_values: shape"),
        ({"pixel_values": to_wire(torch.zeros(2, 3, 56, 56))}, "pixel_values: shape"),
        ({"pixel_values": GOOD.to(torch.int64)}, "pixel_values: dtype"),
        ({"pixel_values": GOOD[:, :28]}, "pixel_values: shape"),
        ({"pixel_values": GOOD[:0]}, "empty"),
        ({"pixel_values": torch.tensor(0.5)}, "empty"),
        ({"pixel_values": GOOD + torch.nan}, "NaN"),
        ({"pixel_values": to_wire(GOOD + torch.nan)}, "NaN"),
        ({"pixel_values": to_wire(GOOD + torch.inf)}, "infinite"),
        ({"pixel_values": WireTensor(dtype="float32", shape=(3, 56, 56), data=b"1234")}, "4 bytes"),
        ({"pixel_values": WireTensor(dtype="float32", shape=(-3, -56, 56), data=b"1234")}, "empty"),
        ({"pixel_values": WireTensor(dtype="float32", shape=(), data=b"1234")}, "empty"),
        ({"pixel_values": WireTensor(dtype="float32", shape=(2**62, 2**62), data=b"1234")}, "4 bytes"),
    ],
)
def test_tower_llava_bad_inputs_are_refused_by_field(
    inputs: dict[str, TowerInput], says: str, llava_pair: tuple[Path, Path]
) -> None:
    tower = towers.find_architecture(FAMILIES["llava"]).load_tower(
        Checkpoint.open(str(llava_pair[0])), F32, CPU
    )
    with expect_error(EncoderRefused, reason="bad_input", match=says):
        tower.prepare(inputs)


@pytest.mark.parametrize(
    ("grid", "says"),
    [
        ([1, 4], "image_grid_thw: shape"),
        ([1, 3, 4], "multiples of 2"),
        ([1, 0, 4], "multiples of 2"),
        ([-1, -4, 4], "multiples of 2"),
        ([1, 4, 6], "pixel_values: shape"),
        ([2**40, 2**40, 2**40], "pixel_values: shape"),
    ],
)
def test_tower_qwen_bad_grids_are_refused_by_field(grid: list[int], says: str, qwen: Path) -> None:
    tower = towers.find_architecture(FAMILIES["qwen2_vl"]).load_tower(Checkpoint.open(str(qwen)), F32, CPU)
    pixels = to_wire(torch.zeros(16, 1176))
    with expect_error(EncoderRefused, reason="bad_input", match=says):
        tower.prepare({"pixel_values": pixels, "image_grid_thw": to_wire(torch.tensor(grid))})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 1, 517, 1023, 1024])
def test_checked_one_value_that_is_not_finite_is_refused(
    dtype: torch.dtype, value: float, place: int
) -> None:
    tensor = torch.linspace(-1, 1, 1025).to(dtype)
    assert validate_input("x", tensor, FLOAT_DTYPES) is tensor
    tensor[place] = value
    for given in (tensor, to_wire(tensor)):
        with expect_error(EncoderRefused, reason="bad_input", match="NaN"):
            validate_input("x", given, FLOAT_DTYPES)


def test_from_wire_tensors_own_their_memory() -> None:
    wire = to_wire(torch.arange(6, dtype=torch.float32).reshape(2, 3))
    tensor = from_wire("x", wire, ("float32",))
    tensor[0, 0] = 7
    assert from_wire("x", wire, ("float32",))[0, 0] == 0


@pytest.fixture(scope="module")
def tiled(tmp_path_factory: pytest.TempPathFactory) -> Halves:
    return Halves.load(checkpoints.llava_next(tmp_path_factory.mktemp("tiled") / "m"))


TILES = torch.rand(5, 3, 56, 56)


@pytest.mark.parametrize(
    ("sizes", "tiles", "says"),
    [
        ([60, 70, 3], 5, "image_sizes: shape"),
        ([[60, 70], [60, 70]], 5, "image_sizes: shape"),
        ([0, 70], 5, "image_sizes: 0 x 70"),
        ([-60, 70], 5, "image_sizes: -60 x 70"),
        ([2**40, 2**40], 5, "image_sizes"),
        ([300, 310], 3, "pixel_values: shape: must have 5 tiles for 300 x 310, not 3"),
    ],
)
def test_tower_tiles_bad_image_sizes_are_refused_by_field(
    sizes: list[int], tiles: int, says: str, tiled: Halves
) -> None:
    inputs = {"pixel_values": to_wire(TILES[:tiles]), "image_sizes": to_wire(torch.tensor(sizes))}
    with expect_error(EncoderRefused, reason="bad_input", match=says):
        tiled.tower.prepare(inputs)


@pytest.mark.parametrize("size", [(1, 5000), (5000, 1), (1, 1), (2, 16_000_000)])
def test_tower_tiles_image_of_any_proportion_has_rows(size: tuple[int, int], tiled: Halves) -> None:
    item = tiled.tower.prepare({"pixel_values": to_wire(TILES), "image_sizes": to_wire(torch.tensor(size))})
    rows = tiled.projector.project(tiled.tower.encode([item]), [item])[0]
    assert len(rows) >= 16
    assert rows.isfinite().all()


def test_tower_tiles_padding_changes_no_embedding(tiled: Halves) -> None:
    """Processors pad to the longest image of a batch: the same image has the same key alone."""
    sizes = to_wire(torch.tensor([50, 110]))  # two tiles beside each other, and the whole
    alone, padded = TILES[:3], torch.cat([TILES[:3], torch.zeros(2, 3, 56, 56)])
    items = [
        tiled.tower.prepare({"pixel_values": to_wire(pixels), "image_sizes": sizes})
        for pixels in (alone, padded, padded[None])
    ]
    assert len({(item.digests, item.geometry, item.tokens) for item in items}) == 1
