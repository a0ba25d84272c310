"""The registry: models by the identity of each modality."""

from __future__ import annotations

from pathlib import Path

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.model_registry import ModelRegistry


def test_registry_by_identity_finds_model_of_each_modality(registry: ModelRegistry, qwen: Path) -> None:
    loaded = registry.find_by_name(str(qwen))
    assert loaded is not None
    served, checkpoint = loaded.served, Checkpoint.open(str(qwen))
    assert [m.name for m in served.modalities] == ["image", "video"]
    assert served.identity == served.identity_for("image")
    assert served.identity_for("video") == checkpoint.identity("float32", modality="video").identity
    assert served.identity_for("audio") is None
    for modality in served.modalities:
        assert registry.find_by_identity(modality.identity) is loaded


def test_registry_models_of_equal_identity_serve_as_one(
    registry: ModelRegistry, llava_pair: tuple[Path, Path]
) -> None:
    first, second = (registry.find_by_name(str(path)) for path in llava_pair)
    assert first is not None
    assert second is not None
    assert first.tower is second.tower
    assert registry.find_by_identity(second.served.identity) is second
    assert registry.find_by_identity(bytes(32)) is None
