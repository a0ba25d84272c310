"""Files that are not, or no longer, what a server has loaded end its sharing, in all its processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.server_args import ServerArgs

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_state, weights_guard
from cornplug.errors import CheckpointError
from cornplug.sglang_hooks import activation, plugin, weight_epochs
from cornplug.sglang_hooks.model import model_config
from devkit import checkpoints

from ..hooked import hook_of

resolve_once = hook_of(plugin, "ServerArgs.resolve_once")
load_model = hook_of(weight_epochs, "ModelRunner.load_model")
finalize_weight_load = hook_of(weight_epochs, "ModelRunner.finalize_startup_weight_load")

_CHILD = """
from cornplug.engine_common import engine_state
from cornplug.engine_common import weights_guard
print(engine_state.current().start_ns(), int(weights_guard.has_replaced_weights()))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.qwen2_vl(tmp_path / "m")


@pytest.fixture(autouse=True)
def shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORNPLUG_SGLANG", "{}")


def in_child() -> tuple[int, bool]:
    """(when the server began, whether nothing is shared), as a process sees it that this one starts."""
    done = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, check=True)
    began_ns, replaced = done.stdout.split()
    return int(began_ns), replaced == "1"


def described(folder: Path) -> Any:
    args = ServerArgs(model_path=str(folder), device="cpu", dtype="float32")
    return model_config.describe(args, ModelConfig.from_server_args(args))


# -- files that change after the start ------------------------------------------------------------


def resolve(then: Callable[[Any], None], **settings: Any) -> None:
    resolve_once(then, SimpleNamespace(**settings))


def test_engine_state_begins_before_resolution(monkeypatch: pytest.MonkeyPatch) -> None:
    """And its children know when that was, whenever they start."""

    class Resolving(Exception):
        """SGLang's own resolution, which reads the checkpoint's config."""

    def install(parts: Any) -> None:
        raise Resolving

    monkeypatch.setattr("cornplug.sglang_hooks.plugin.install", install)
    before_ns = time.time_ns()
    with pytest.raises(Resolving):
        resolve(lambda _: None)
    began_ns = engine_state.current().start_ns()
    assert before_ns <= began_ns <= time.time_ns()
    assert in_child() == (began_ns, False)
    resolve(lambda _: None, _resolution_finished=True)  # as a child does, and the server's main process later
    assert engine_state.current().start_ns() == began_ns


def test_engine_state_next_server_begins_anew() -> None:
    engine_state.record_engine_start(fresh=True)
    first = engine_state.current()
    first.mark_weights_unknown()
    engine_state.record_engine_start(fresh=True)
    assert engine_state.current().start_ns() > first.start_ns()
    assert not weights_guard.has_replaced_weights()
    assert in_child() == (engine_state.current().start_ns(), False)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_engine_model_file_changed_after_start_is_refused(folder: Path, file: str) -> None:
    engine_state.record_engine_start()
    described(folder).kv_identity()
    described(folder).tower_identity()
    content, times = (folder / file).read_bytes(), (folder / file).stat()
    (folder / file).write_bytes(content)
    os.utime(folder / file, ns=(times.st_atime_ns, times.st_mtime_ns))  # a copy with old times
    for identify in (described(folder).kv_identity, described(folder).tower_identity):
        with pytest.raises(CheckpointError, match=file) as caught:
            identify()
        assert caught.value.reason == "weights_changed"


# -- weights in memory ----------------------------------------------------------------------------


class Loaded(torch.nn.Module):
    """A model that holds a checkpoint's tensors under SGLang's names (the published ones, for Qwen2-VL)."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._named = {
            name: torch.nn.Parameter(tensor)
            for file in folder.glob("*.safetensors")
            for name, tensor in load_file(file).items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(self._named.items())


def rewrite(folder: Path, part: str) -> None:
    """Train one norm on, in the file."""
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = next(n for n in tensors if part in n and "norm" in n and n.endswith(".weight"))
    tensors[name] = tensors[name] + 0.5
    save_file(tensors, file, metadata={"format": "pt"})


def runner(folder: Path, **fields: Any) -> Any:
    return SimpleNamespace(
        **{"is_draft_worker": False, "startup_weight_load": None} | fields, model=Loaded(folder)
    )


@pytest.mark.parametrize("part", ["model.layers", "visual.blocks"])
def test_loaded_weights_of_rewritten_file_end_sharing(
    folder: Path, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weight_epochs, "engine_model", lambda: described(folder))
    rank = runner(folder)
    with caplog.at_level("WARNING", logger="sglang.cornplug"):
        load_model(None, rank)
        assert not weights_guard.has_replaced_weights()
        assert not caplog.records
        rewrite(folder, part)
        load_model(None, rank)
    assert weights_guard.has_replaced_weights()
    assert in_child()[1]
    [record] = caplog.records
    assert str(folder) in record.getMessage()


def test_weights_loaded_late_are_compared_after_fetch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_epochs, "engine_model", lambda: described(folder))
    rank = runner(folder, startup_weight_load=object())
    rewrite(folder, "model.layers")
    load_model(None, rank)
    assert not weights_guard.has_replaced_weights()
    finalize_weight_load(None, rank)
    assert weights_guard.has_replaced_weights()


@pytest.mark.parametrize("why", ["draft", "off", "unidentified"])
def test_loaded_weights_without_sharing_are_not_compared(
    folder: Path, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def identified() -> Any:
        if why == "unidentified":
            raise CheckpointError("a loader of its own", reason="load_format")
        return described(folder)

    monkeypatch.setattr(weight_epochs, "engine_model", identified)
    if why == "off":
        activation.turn_off()
    rank = runner(folder, is_draft_worker=why == "draft")
    rewrite(folder, "model.layers")
    load_model(None, rank)
    assert not weights_guard.has_replaced_weights()


def test_differing_weights_under_sglang_names_cover_layers(folder: Path) -> None:
    from cornplug.engine_common.weights_guard import find_difference

    name, compared = find_difference(Loaded(folder), Checkpoint.open(str(folder)))
    depth = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert name is None
    assert compared >= 2 * depth
