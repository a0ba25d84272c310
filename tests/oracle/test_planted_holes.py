"""The oracle can fail: a hole that is planted into the keys' code is found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from cornplug.checkpoints import checkpoint
from cornplug.checkpoints.families import FAMILIES
from cornplug.engine_common.lora_digests import LoraDigests
from cornplug.engine_common.model_identity import EngineModel

from .changes import renamed
from .deployments import base
from .keys import ENGINE, room
from .oracle import Oracle

pytestmark = pytest.mark.skipif(ENGINE != "vllm", reason="LLaVA is shared in vLLM")


@pytest.fixture
def oracle(tmp_path: Path) -> Iterator[Callable[[], Oracle]]:
    """Made once the hole is planted: the keys that all are compared with have it too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda: Oracle(tmp_path / "written", [base("llava", tmp_path / "llava")])
    torch.set_num_threads(threads)


def _forget_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = checkpoint.without_inert

    def without(config: Mapping[str, Any]) -> dict[str, Any]:
        return {k: v for k, v in whole(config).items() if k not in ("rms_norm_eps", "hidden_act")}

    monkeypatch.setattr(checkpoint, "without_inert", without)


def _forget_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    _replace_family(monkeypatch, preprocess_spec=lambda _json: {"kind": "pixels"})


def _forget_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    made = room.engine_model
    monkeypatch.setattr(room, "engine_model", lambda *args: dataclasses.replace(made(*args), dtype="float32"))


def _forget_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineModel, "_all_overrides", lambda *_args: {})


def _forget_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraDigests, "digest", lambda *_args: b"a" * 32)


def _forget_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = FAMILIES["llava"].before_cut
    _replace_family(
        monkeypatch, before_cut=lambda config, name: "layers.0.mlp" not in name and whole(config, name)
    )


def _forget_salts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cornplug.identity._encode_salt", lambda _salt: b"")


def _replace_family(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    family = dataclasses.replace(FAMILIES["llava"], **fields)
    monkeypatch.setattr(checkpoint, "FAMILIES", {**FAMILIES, "llava": family})


@pytest.mark.parametrize(
    ("plant", "kind", "cases"),
    [
        (_forget_eps, "value in config.json", 20),
        (_forget_pixels, "value in preprocessor", 3),
        (_forget_pixels, "processor argument", 3),
        (_forget_dtype, "dtype", 2),
        (_forget_overrides, "hf override", 10),
        (_forget_adapters, "adapter", 6),
        (_forget_a_layer, "bit of a weight", 50),
        (_forget_salts, "salt", 3),
    ],
)
def test_planted_hole_is_found_by_oracle(
    oracle: Callable[[], Oracle],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    kind: str,
    cases: int,
) -> None:
    plant(monkeypatch)
    assert oracle().run(seed=1, cases=cases, kinds=[kind]).holes


def test_planted_key_that_follows_names_is_found(
    oracle: Callable[[], Oracle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round: a key that a renaming changes."""
    whole = FAMILIES["llava"].classify
    assert renamed("llava", "vision_tower.x") == "model.vision_tower.x"
    monkeypatch.setattr(
        "cornplug.checkpoints.families.ModelFamily.classify",
        lambda family, name: (whole(name)[0], name) if family.name == "llava" else whole(name),
    )
    assert oracle().run(seed=1, cases=2, kinds=["tensor names"]).parted
