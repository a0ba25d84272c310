"""Weights in memory that are not the files' end sharing, at start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import weights_guard
from cornplug.engine_common.weights_guard import find_difference
from cornplug.vllm_connector.model import reloads, setting_verdicts
from devkit import checkpoints

from ..wrapped import wrapper_of

load_model = wrapper_of(reloads, "Worker.load_model")


class Loaded(torch.nn.Module):
    """A model that holds a checkpoint's tensors under vLLM's names (the published ones, for LLaVA)."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self._named = {
            name: torch.nn.Parameter(tensor.to(dtype))
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._named.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.llava(tmp_path / "m")


def rewrite(folder: Path, part: str) -> str:
    """Train one norm on, in the file. Returns its published name."""
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if part in n and "norm" in n and n.endswith(".weight"))
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_differing_weights_of_same_files_is_none(folder: Path, dtype: torch.dtype) -> None:
    name, compared = find_difference(Loaded(folder, dtype), Checkpoint.open(str(folder)))
    assert name is None
    assert compared >= 8  # two layers of language model and of tower, two norms each


@pytest.mark.parametrize("part", ["language_model", "vision_tower"])
def test_differing_weights_of_rewritten_file_are_named(folder: Path, part: str) -> None:
    model = Loaded(folder, torch.bfloat16)
    changed = rewrite(folder, part)
    name, _ = find_difference(model, Checkpoint.open(str(folder)))
    assert name is not None
    assert changed.endswith(name)


def config(folder: Path, kv: str = "CornplugConnector") -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=kv, kv_connector_extra_config={}),
        ec_transfer_config=None,
        model_config=SimpleNamespace(model=str(folder), revision=None),
        load_config=SimpleNamespace(download_dir=None),
    )


@pytest.mark.parametrize(
    ("kv", "dummy", "ends"),
    [("CornplugConnector", False, True), ("Other", False, False), ("CornplugConnector", True, False)],
)
def test_load_model_of_rewritten_file_ends_sharing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kv: str, dummy: bool, ends: bool
) -> None:
    monkeypatch.setattr(
        setting_verdicts, "judge_common", lambda config: setting_verdicts.SettingsVerdict({}, {})
    )
    model = Loaded(folder, torch.float32)
    runner = SimpleNamespace(get_model=lambda: model)
    worker = SimpleNamespace(vllm_config=config(folder, kv), model_runner=runner)
    load_model(lambda worker, **_: None, worker)
    assert not weights_guard.has_replaced_weights()
    rewrite(folder, "language_model")
    load_model(lambda worker, **_: None, worker, load_dummy_weights=dummy)
    assert weights_guard.has_replaced_weights() is ends
