"""Our towers and projectors against vLLM's own model classes, on what vLLM itself would send to us.

One program of its own loads them one after another (`engine_towers.py`): vLLM has one model a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.tensors import to_wire
from cornplug.encoder_service.towers.base import Projector, Tower
from devkit import checkpoints

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

MODELS: dict[str, Callable[[Path], Path]] = {
    "llava": checkpoints.llava,
    "llava_last_layer": partial(checkpoints.llava, config={"vision_feature_layer": -1}),
    "llava_next": checkpoints.llava_next,
    "llava_onevision": checkpoints.llava_onevision,
    "gemma3": checkpoints.gemma3,
    "internvl": checkpoints.internvl,
    "qwen2_vl": checkpoints.qwen2_vl,
    "qwen2_5_vl": checkpoints.qwen2_5_vl,
    "qwen3_vl": checkpoints.qwen3_vl,
}
IMAGES = 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name) for name, make in MODELS.items()}


@pytest.fixture(scope="module")
def engine(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, torch.Tensor]]:
    """Model -> "NUMBER/FIELD" -> tensor; "NUMBER/=" is vLLM's embedding."""
    out = tmp_path_factory.mktemp("engine") / "towers.safetensors"
    program = Path(__file__).with_name("engine_towers.py")
    named = [f"{name}={folder}" for name, folder in folders.items()]
    log = out.with_suffix(".log")
    with log.open("w") as lines:
        done = subprocess.run(
            [sys.executable, program, out, *named], stdout=lines, stderr=lines, env=os.environ, timeout=500
        )
    assert done.returncode == 0, log.read_text()[-4000:]
    found: dict[str, dict[str, torch.Tensor]] = {each: {} for name in folders for each in (name, alone(name))}
    for key, tensor in load_file(out).items():
        name, _, rest = key.partition("/")
        found[name][rest] = tensor
    return found


def alone(name: str) -> str:
    """The model as an engine with `--mm-encoder-only` loads it."""
    return f"{name}:alone"


@pytest.mark.parametrize("name", MODELS)
def test_vllm_embeddings_without_language_model_are_those_with_it(
    name: str, engine: dict[str, dict[str, torch.Tensor]]
) -> None:
    """To the last bit: so `mm_encoder_only` is in no key."""
    for number in range(IMAGES):
        assert torch.equal(engine[alone(name)][f"{number}/="], engine[name][f"{number}/="])


def halves(folder: Path) -> tuple[Tower, Projector]:
    checkpoint = Checkpoint.open(str(folder))
    architecture = towers.find_architecture(checkpoint.family)
    cpu = torch.device("cpu")
    return (
        architecture.load_tower(checkpoint, torch.float32, cpu),
        architecture.load_projector(checkpoint, torch.float32, cpu),
    )


def sent(engine: dict[str, torch.Tensor], number: int) -> dict[str, torch.Tensor]:
    prefix = f"{number}/"
    return {key.removeprefix(prefix): t for key, t in engine.items() if key.startswith(prefix)}


@pytest.mark.parametrize("name", MODELS)
def test_tower_image_embeddings_equal_vllm(
    name: str, folders: dict[str, Path], engine: dict[str, dict[str, torch.Tensor]]
) -> None:
    """To 1e-5 of the largest value: vLLM's activations and attention on the CPU are kernels of its own."""
    tower, projector = halves(folders[name])
    for number in range(IMAGES):
        fields = sent(engine[name], number)
        theirs = fields.pop("=")
        item = tower.prepare({field: to_wire(tensor) for field, tensor in fields.items()})
        ours = projector.project(tower.encode([item]), [item])[0]
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
