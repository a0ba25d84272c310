"""torch.compile: the same result, and a tower that will not compile runs all the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException, Unsupported

from cornplug.encoder_service.model_loader import CompiledTower
from cornplug.encoder_service.model_registry import ModelRegistry

from ..conftest import Requests


@pytest.mark.more
def test_compiled_tower_features_equal_uncompiled(
    registry: ModelRegistry, request_for: Requests, qwen: Path
) -> None:
    plain = registry.find_by_name(str(qwen))
    assert plain is not None
    (loaded,) = ModelRegistry.open([str(qwen)], dtype="float32", device="cpu", compile=True).loaded_models()
    tower = loaded.tower
    assert isinstance(tower, CompiledTower)
    assert tower.layers
    before = CompiledTower.failures
    items = [tower.prepare(request_for(qwen, seed).inputs) for seed in (1, 2)]
    for got, want in zip(tower.encode(items), plain.tower.encode(items), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    # A longer batch is no other program.
    (alone,) = tower.encode(items[:1])
    torch.testing.assert_close(alone, plain.tower.encode(items[:1])[0], atol=1e-5, rtol=0)
    assert CompiledTower.failures == before


def test_compiled_tower_uncompilable_runs_uncompiled(
    qwen: Path, registry: ModelRegistry, request_for: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = registry.find_by_name(str(qwen))
    assert plain is not None

    def refuse(module: nn.Module, **_: object) -> None:
        def fail(*args: object, **kwargs: object) -> None:
            raise Unsupported("no such operation")

        module._compiled_call_impl = fail

    monkeypatch.setattr(nn.Module, "compile", refuse)
    (loaded,) = ModelRegistry.open([str(qwen)], dtype="float32", device="cpu", compile=True).loaded_models()
    before = CompiledTower.failures
    item = loaded.tower.prepare(request_for(qwen, 1).inputs)
    (want,) = plain.tower.encode([item])
    for _ in range(2):
        assert torch.equal(loaded.tower.encode([item])[0], want)
    assert CompiledTower.failures == before + 1


def test_compiled_tower_own_error_is_raised_unchanged() -> None:
    class Tower:
        def encode(self, items: object) -> None:
            raise TorchDynamoException("not from any layer of ours")

    with pytest.raises(TorchDynamoException):
        CompiledTower(Tower()).encode([])  # type: ignore[arg-type]
