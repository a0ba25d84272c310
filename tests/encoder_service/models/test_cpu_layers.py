"""Towers on a CPU: the quicker layers give the same features."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.activations import QuickGELUActivation

from cornplug.encoder_service import model_loader
from cornplug.encoder_service.model_loader import LoadedModel, layers_of
from cornplug.encoder_service.model_registry import ModelRegistry

from ..conftest import Requests


def opened(path: Path, dtype: str) -> LoadedModel:
    (loaded,) = ModelRegistry.open([str(path)], dtype=dtype, device="cpu").loaded_models()
    return loaded


@pytest.mark.parametrize(("dtype", "apart"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_packed_tower_gives_same_features(
    llava_pair: tuple[Path, Path],
    request_for: Requests,
    dtype: str,
    apart: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = opened(llava_pair[0], dtype).tower
    assert any(
        isinstance(part, model_loader.PackedLinear) for layer in layers_of(packed) for part in layer.modules()
    )
    monkeypatch.setattr(model_loader, "replace_slow_layers", lambda tower: None)
    plain = opened(llava_pair[0], dtype).tower
    item = plain.prepare(request_for(llava_pair[0], 1).inputs)
    for got, want in zip(packed.encode([item, item]), plain.encode([item, item]), strict=True):
        torch.testing.assert_close(got.float(), want.float(), atol=apart, rtol=apart)


def test_tower_that_cannot_be_packed_runs_as_it_is(
    llava_pair: tuple[Path, Path], request_for: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NotImplementedError("no such operator")

    monkeypatch.setattr(model_loader, "PackedLinear", refuse)
    loaded = opened(llava_pair[0], "float32")
    item = loaded.tower.prepare(request_for(llava_pair[0], 1).inputs)
    assert loaded.tower.encode([item])[0].isfinite().all()


def test_quick_gelu_equals_transformers() -> None:
    rows = torch.randn(7, 33)
    assert torch.equal(model_loader.QuickGelu()(rows), QuickGELUActivation()(rows))


@pytest.mark.parametrize("bias", [True, False])
def test_packed_linear_takes_any_strides(bias: bool) -> None:
    linear, rows = nn.Linear(24, 40, bias=bias), torch.randn(24, 5, 3).transpose(0, 2)
    with torch.inference_mode():
        torch.testing.assert_close(model_loader.PackedLinear(linear)(rows), linear(rows))
