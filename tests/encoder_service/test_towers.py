"""Towers against transformers' whole reference models, and against every wrong checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, LlavaForConditionalGeneration, Qwen2VLForConditionalGeneration

from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.protocol import Tensor
from cornplug.encoder_service.towers.tensors import from_wire
from cornplug.errors import CheckpointError, EncoderRefused
from cornplug.families import FAMILIES
from cornplug.testing import checkpoints

from .conftest import inputs_of, picture, to_wire

CPU = torch.device("cpu")
F32 = torch.float32
SIZES = [(70, 60), (200, 90), (56, 56), (90, 250)]


def embed(path: Path, together: bool = True) -> list[torch.Tensor]:
    """Embeddings of pictures of several sizes, in one batch or one by one."""
    checkpoint = Checkpoint.open(str(path))
    architecture = towers.architecture(checkpoint.family)
    tower = architecture.load_tower(checkpoint, F32, CPU)
    projector = architecture.load_projector(checkpoint, F32, CPU)
    items = [tower.prepare(inputs_of(path, picture(i, *size))) for i, size in enumerate(SIZES)]
    if together:
        return projector.project(tower.encode(items), items)
    return [projector.project(tower.encode([item]), [item])[0] for item in items]


def reference(path: Path) -> list[torch.Tensor]:
    """The same by transformers' own model, LLM and all, picture by picture."""
    kind = json.loads((path / "config.json").read_text())["model_type"]
    cls = {"llava": LlavaForConditionalGeneration, "qwen2_vl": Qwen2VLForConditionalGeneration}[kind]
    model = cls.from_pretrained(path, dtype=F32, attn_implementation="sdpa").eval()
    processor = AutoImageProcessor.from_pretrained(path)
    out = []
    with torch.inference_mode():
        for i, size in enumerate(SIZES):
            made = processor(images=picture(i, *size), return_tensors="pt")
            out.append(model.get_image_features(**made).pooler_output[0])
    return out


VARIANTS: dict[str, Callable[[Path], Path]] = {
    "llava": checkpoints.llava,
    "qwen2_vl": checkpoints.qwen2_vl,
}


def edit_config(path: Path, **fields: object) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return path


@pytest.mark.parametrize("family", VARIANTS)
def test_equals_the_reference(family: str, tmp_path: Path) -> None:
    path = VARIANTS[family](tmp_path / "m")
    for ours, theirs in zip(embed(path), reference(path), strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "fields",
    [{"vision_feature_layer": -1}, {"vision_feature_layer": 1}, {"vision_feature_select_strategy": "full"}],
)
def test_other_cuts_equal_the_reference(fields: dict[str, object], tmp_path: Path) -> None:
    path = edit_config(checkpoints.llava(tmp_path / "m"), **fields)
    for ours, theirs in zip(embed(path), reference(path), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("family", VARIANTS)
def test_a_batch_gives_the_same_as_one_by_one(family: str, tmp_path: Path) -> None:
    path = VARIANTS[family](tmp_path / "m")
    together, alone = embed(path), embed(path, together=False)
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)
    assert not torch.equal(together[0], together[2][: len(together[0])])


def test_only_the_needed_layers_are_loaded(tmp_path: Path) -> None:
    """The last layer may even be damaged: it lies past the cut."""
    path = checkpoints.llava(tmp_path / "m")
    before = embed(path)
    weights = load_file(path / "model.safetensors")
    weights["vision_tower.vision_model.encoder.layers.2.mlp.fc1.weight"].fill_(torch.nan)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    for a, b in zip(before, embed(path), strict=True):
        assert torch.equal(a, b)


def test_half_precision(tmp_path: Path) -> None:
    path = checkpoints.llava(tmp_path / "m")
    checkpoint = Checkpoint.open(str(path))
    architecture = towers.architecture(FAMILIES["llava"])
    tower = architecture.load_tower(checkpoint, torch.bfloat16, CPU)
    projector = architecture.load_projector(checkpoint, torch.bfloat16, CPU)
    item = tower.prepare(inputs_of(path, picture(0, *SIZES[0])))
    out = projector.project(tower.encode([item]), [item])[0]
    assert out.dtype == torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(out.float(), embed(path)[0], dim=-1)
    assert cosine.min() > 0.99


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
        ("vision_tower.vision_model.encoder.layers.0.gate", torch.zeros(3), "no known use"),
        ("vision_tower.vision_model.pre_layrnorm.weight", torch.zeros(3), "shapes disagree"),
        ("vision_tower.vision_model.pre_layrnorm.weight", torch.zeros(64, dtype=torch.int8), "quantised"),
    ],
)
def test_wrong_tensors_are_named(name: str, tensor: torch.Tensor | None, says: str, tmp_path: Path) -> None:
    path = checkpoints.llava(tmp_path / "m")
    change(path, name, tensor)
    with pytest.raises(CheckpointError, match=says) as e:
        towers.architecture(FAMILIES["llava"]).load_tower(Checkpoint.open(str(path)), F32, CPU)
    assert name.removeprefix("vision_tower.vision_model.") in str(e.value)


def test_a_projector_of_another_width(tmp_path: Path) -> None:
    path = checkpoints.llava(tmp_path / "m")
    change(path, "multi_modal_projector.linear_1.bias", torch.zeros(5))
    with pytest.raises(CheckpointError, match=r"linear_1\.bias"):
        towers.architecture(FAMILIES["llava"]).load_projector(Checkpoint.open(str(path)), F32, CPU)


def test_every_family_has_its_network() -> None:
    for family in FAMILIES.values():
        assert towers.architecture(family).load_tower


def test_a_layer_outside_the_tower(tmp_path: Path) -> None:
    path = checkpoints.llava(tmp_path / "m")
    shutil.copytree(path, tmp_path / "n")
    edit_config(tmp_path / "n", vision_feature_layer=9)
    with pytest.raises(CheckpointError):
        towers.architecture(FAMILIES["llava"]).load_tower(Checkpoint.open(str(tmp_path / "n")), F32, CPU)


GOOD = torch.zeros(3, 56, 56)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "pixel_values: missing"),
        ({"pixel_values": to_wire(GOOD), "extra": to_wire(GOOD)}, "extra: unknown"),
        ({"pixel_values": to_wire(GOOD.to(torch.int64))}, "pixel_values: dtype"),
        ({"pixel_values": Tensor(dtype="uint8", shape=(3, 56, 56), data=b"")}, "pixel_values: dtype"),
        ({"pixel_values": to_wire(GOOD[:, :28])}, "pixel_values: shape"),
        ({"pixel_values": to_wire(torch.zeros(2, 3, 56, 56))}, "pixel_values: shape"),
        ({"pixel_values": to_wire(GOOD + torch.nan)}, "NaN"),
        ({"pixel_values": to_wire(GOOD + torch.inf)}, "infinite"),
        ({"pixel_values": Tensor(dtype="float32", shape=(3, 56, 56), data=b"1234")}, "4 bytes"),
        ({"pixel_values": Tensor(dtype="float32", shape=(-3, -56, 56), data=b"1234")}, "empty"),
        ({"pixel_values": Tensor(dtype="float32", shape=(), data=b"1234")}, "empty"),
        ({"pixel_values": Tensor(dtype="float32", shape=(2**62, 2**62), data=b"1234")}, "4 bytes"),
    ],
)
def test_bad_clip_inputs_name_the_field(
    inputs: dict[str, Tensor], says: str, llava_pair: tuple[Path, Path]
) -> None:
    tower = towers.architecture(FAMILIES["llava"]).load_tower(Checkpoint.open(str(llava_pair[0])), F32, CPU)
    with pytest.raises(EncoderRefused, match=says) as e:
        tower.prepare(inputs)
    assert e.value.reason == "bad_input"


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
def test_bad_grids_name_the_field(grid: list[int], says: str, qwen: Path) -> None:
    tower = towers.architecture(FAMILIES["qwen2_vl"]).load_tower(Checkpoint.open(str(qwen)), F32, CPU)
    pixels = to_wire(torch.zeros(16, 1176))
    with pytest.raises(EncoderRefused, match=says):
        tower.prepare({"pixel_values": pixels, "image_grid_thw": to_wire(torch.tensor(grid))})


def test_wire_tensors_own_their_memory() -> None:
    wire = to_wire(torch.arange(6, dtype=torch.float32).reshape(2, 3))
    tensor = from_wire("x", wire, ("float32",))
    tensor[0, 0] = 7
    assert from_wire("x", wire, ("float32",))[0, 0] == 0
