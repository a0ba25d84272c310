"""Checkpoints that transformers does not load as they are: the error names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.preprocess.preparer import MediaPreparer
from cornplug.encoder_service.preprocess.preprocessor import MediaLimits
from cornplug.encoder_service.towers import decoderless
from cornplug.errors import CheckpointError
from devkit import checkpoints

from ..conftest import SECRET, plant_modules
from ..tower_rig import Tensors, edit_config, rewritten

PATCHES = "vision_tower.vision_model.embeddings.patch_embedding.weight"


@pytest.fixture(scope="module")
def paligemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paligemma") / "p"
    return checkpoints.any_family(folder, "paligemma", checkpoints.ANY_FAMILIES["paligemma"])


def refusal(path: Path) -> CheckpointError:
    """The error of a service that is to serve this checkpoint."""
    with pytest.raises(CheckpointError) as caught:
        registry = ModelRegistry.open([str(path)], dtype="float32", device="cpu")
        MediaPreparer(registry, secret=SECRET, limits=MediaLimits())
    return caught.value


def patches(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    def changed(tensors: Tensors) -> Tensors:
        name = next(name for name in tensors if name.endswith("patch_embedding.weight"))
        return {**tensors, name: change(tensors[name]).contiguous()}

    return changed


def test_decoderless_model_holds_no_tensor_of_the_decoder(paligemma: Path) -> None:
    checkpoint = Checkpoint.open(str(paligemma))
    model = decoderless.load_without_decoder(checkpoint, torch.float32, torch.device("cpu"))
    held = sum(tensor.numel() for tensor in model.parameters())
    assert held == sum(
        torch.Size(shape).numel()
        for name, shape in checkpoint.tensor_shapes("tower").items()
        if "position_ids" not in name
    )
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda t: {k: v for k, v in t.items() if "patch_embedding.weight" not in k},
            "patch_embedding.weight",
        ),
        (patches(lambda t: t[:, :, :7]), "patch_embedding.weight"),
        (patches(lambda t: t.to(torch.int8)), "int8: quantised towers are not supported"),
        (patches(lambda t: t.to(torch.float8_e4m3fn)), "float8_e4m3fn: quantised towers are not supported"),
    ],
)
def test_decoderless_tensor_that_does_not_fit_is_named(
    change: Callable[[Tensors], Tensors], problem: str, paligemma: Path, tmp_path: Path
) -> None:
    found = refusal(rewritten(paligemma, tmp_path / "copy", change))
    assert found.reason == "bad_tensors"
    assert problem in str(found)


def test_decoderless_tower_tensor_under_a_decoder_name_is_missing_not_drawn(
    paligemma: Path, tmp_path: Path
) -> None:
    """What the identity does not count, the tower does not get."""

    def hidden(tensors: Tensors) -> Tensors:
        return {
            name.replace("multi_modal_projector", "language_model.stray"): t for name, t in tensors.items()
        }

    found = refusal(rewritten(paligemma, tmp_path / "copy", hidden))
    assert found.reason == "bad_tensors"
    assert "multi_modal_projector" in str(found)


@pytest.mark.parametrize(
    ("change", "reason", "problem"),
    [
        ({"model_type": "no_such_model"}, "bad_config", "no_such_model"),
        ({"model_type": "vit"}, "unknown_family", "no model of images or audio"),
        ({"text_config": {"model_type": "no_such_text"}}, "bad_config", "no_such_text"),
        ({"vision_config": "wide"}, "bad_config", "config.json"),
        (
            {"vision_config": {"model_type": "siglip_vision_model", "hidden_size": -4}},
            "bad_tensors",
            "PaliGemma",
        ),
    ],
)
def test_decoderless_config_that_transformers_refuses_is_named(
    change: dict[str, Any], reason: str, problem: str, paligemma: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(paligemma, tmp_path / "copy"))
    found = refusal(edit_config(copy, **change))
    assert (found.reason, problem in str(found)) == (reason, True), str(found)


def test_decoderless_code_of_a_checkpoint_is_never_run(paligemma: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(paligemma, tmp_path / "copy"))
    plant_modules(copy, "configuration_own.py", "modeling_own.py", "processing_own.py")
    own = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForImageTextToText": "modeling_own.OwnModel",
        "AutoProcessor": "processing_own.OwnProcessor",
    }
    edit_config(copy, model_type="own", auto_map=own)
    found = refusal(copy)
    assert found.reason == "bad_config"
    assert "never run" in str(found)
    assert not list(copy.glob("imported-*"))


def test_decoderless_checkpoint_without_tokenizer_names_the_processor(
    paligemma: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(paligemma, tmp_path / "copy"))
    for file in copy.glob("tokenizer*"):
        file.unlink()
    found = refusal(copy)
    assert found.reason == "bad_config"
    assert "the processor does not load" in str(found)


def test_checkpoint_without_image_processor_names_the_field(paligemma: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(paligemma, tmp_path / "copy"))
    for name in ("preprocessor_config.json", "processor_config.json"):
        (copy / name).write_text(json.dumps({"feature_extractor_type": "WhisperFeatureExtractor"}))
    found = refusal(copy)
    assert found.reason == "unknown_family"
    assert "image_processor_type" in str(found)
