"""The scales of KV in a checkpoint: their names, and each that vLLM would read otherwise."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expected_errors import expect_error
from safetensors.torch import load_file, save_file

from cornplug.errors import LayoutError
from cornplug.vllm_connector.kv.cache_geometry import checkpoint_scales, scales_of_layers
from devkit import checkpoints

LAYER = "model.layers.1.self_attn"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.qwen2_text(tmp_path / "model")


def with_scales(folder: Path, drafts: bool = False, **scales: torch.Tensor) -> Any:
    """The config of an engine whose checkpoint has these scales of layer 1, by their names' ends."""
    file = folder / "model.safetensors"
    named = {f"{LAYER}.{name.replace('/', '.')}": value.clone() for name, value in scales.items()}
    save_file(load_file(file) | named, file, metadata={"format": "pt"})
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None, dtype=torch.bfloat16),
        load_config=SimpleNamespace(download_dir=None),
        speculative_config=SimpleNamespace(uses_draft_kv_cache=lambda: True) if drafts else None,
    )


@pytest.mark.parametrize(
    "names",
    [("k_scale", "v_scale"), ("k_proj/k_scale", "v_proj/v_scale"), ("attn/k_scale", "attn/v_scale"),
     ("qkv_proj/k_scale", "qkv_proj/v_scale")],
)  # fmt: skip
def test_kv_scales_are_in_the_dtype_that_vllm_keeps(folder: Path, names: tuple[str, str]) -> None:
    config = with_scales(folder, **dict(zip(names, (torch.tensor(0.1), torch.tensor([2.0])), strict=True)))
    scales = checkpoint_scales(config)
    assert scales == {1: (torch.tensor(0.1).bfloat16().item(), 2.0)}
    layers = scales_of_layers(scales, ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"])
    assert list(layers.values()) == [(1.0, 1.0), scales[1]]


def test_kv_scales_of_a_checkpoint_without_are_one(folder: Path) -> None:
    assert checkpoint_scales(with_scales(folder)) == {}
    assert scales_of_layers({}, ["draft"]) == {"draft": (1.0, 1.0)}


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({"k_scale": ONE}, "kv_dtype"),
        ({"k_scale": ONE, "v_scale": torch.ones(2)}, "kv_dtype"),
        ({"k_scale": ONE, "v_scale": -ONE}, "kv_dtype"),
        ({"k_scale": ONE, "v_scale": torch.tensor(1)}, "kv_dtype"),
        ({"k_scale": ONE, "v_scale": ONE, "attn/k_scale": 2 * ONE}, "kv_dtype"),
        ({"kv_scale": ONE}, "kv_dtype"),
        ({"k_cache/scale": ONE, "v_cache/scale": ONE}, "kv_dtype"),
        ({"v_proj/k_scale": ONE, "v_scale": ONE}, "kv_dtype"),
        ({"k_scale": ONE, "v_scale": ONE, "k_zero_point": ONE}, "kv_dtype"),
        ({"inner/k_scale": ONE, "v_scale": ONE}, "kv_dtype"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_kv_scales_by_other_names_or_shapes_are_refused(
    folder: Path, scales: dict[str, Any], reason: str
) -> None:
    with pytest.raises(LayoutError) as error:
        checkpoint_scales(with_scales(folder, **scales))
    assert error.value.reason == reason


def test_kv_scales_beside_a_draft_model_are_refused(folder: Path) -> None:
    with pytest.raises(LayoutError) as error:
        checkpoint_scales(with_scales(folder, drafts=True, k_scale=ONE, v_scale=ONE))
    assert error.value.reason == "speculative"


def test_kv_scales_of_no_checkpoint_are_refused(tmp_path: Path) -> None:
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path), revision=None, dtype=torch.bfloat16),
        load_config=SimpleNamespace(download_dir=None),
    )
    with expect_error(LayoutError, reason="not_found"):
        checkpoint_scales(config)
