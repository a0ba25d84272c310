"""Our Whisper towers and their projectors against vLLM's own model classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.tensors import to_wire
from devkit import checkpoints

pytestmark = [pytest.mark.more, pytest.mark.timeout(600)]

SECONDS = (0.53, 3.0, 31.27)
"""The last one is more than one chunk of Ultravox, whose own frames do not fill a stack."""


def waveform(seconds: float) -> np.ndarray:
    t = np.arange(int(16_000 * seconds)) / 16_000
    return (np.sin(2 * np.pi * 440 * t) * np.cos(3 * t)).astype(np.float32)


def test_tower_audio_embeddings_equal_vllm(tmp_path: Path) -> None:
    """To 1e-5 of the largest value: vLLM's activations and attention on the CPU are kernels of its own."""
    models = {
        "qwen2_audio": checkpoints.qwen2_audio(tmp_path / "q"),
        "ultravox": checkpoints.ultravox(tmp_path / "u"),
        "ultravox_base": checkpoints.ultravox(tmp_path / "b", base=tmp_path / "whisper"),
    }
    made, ours = {}, {}
    for name, path in models.items():
        checkpoint = Checkpoint.open(str(path))
        architecture, cpu = towers.find_architecture(checkpoint.family), torch.device("cpu")
        tower = architecture.load_tower(checkpoint, torch.float32, cpu)
        projector = architecture.load_projector(checkpoint, torch.float32, cpu)
        extractor = towers.feature_extractor(checkpoint)
        for i, seconds in enumerate(SECONDS):
            fields = extractor.extract(waveform(seconds))
            made |= {f"{name}/{i}/{field}": tensor.contiguous() for field, tensor in fields.items()}
            item = tower.prepare({field: to_wire(tensor) for field, tensor in fields.items()})
            ours[f"{name}/{i}/="] = projector.project(tower.encode([item]), [item])[0]
    given, out, log = (tmp_path / n for n in ("in.safetensors", "out.safetensors", "log"))
    save_file(made, given)
    program = Path(__file__).with_name("engine_audio.py")
    named = [f"{name}={path}" for name, path in models.items()]
    with log.open("w") as lines:
        done = subprocess.run(
            [sys.executable, program, out, given, *named],
            stdout=lines, stderr=lines, env=os.environ, timeout=500,
        )  # fmt: skip
    assert done.returncode == 0, log.read_text()[-4000:]
    theirs = load_file(out)
    assert theirs.keys() == ours.keys()
    for key, embedding in ours.items():
        assert embedding.shape == theirs[key].shape, key
        assert (embedding - theirs[key]).abs().max() <= 1e-5 * theirs[key].abs().max(), key
