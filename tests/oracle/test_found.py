"""What the oracle has found, each as it was found: seconds instead of thousands of cases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cornplug.checkpoints.checkpoint import Checkpoint
from devkit import checkpoints


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.qwen2_vl(tmp_path_factory.mktemp("found") / "qwen2_vl")


def test_checkpoint_identity_contains_size_argument(qwen: Path) -> None:
    """`--mm-processor-kwargs '{"size": ...}'` and a file with min_pixels and max_pixels: transformers'
    processor, called so, takes the size; the key took the limits, and was the same for any size."""
    opened = Checkpoint.open(str(qwen))

    def identity(**kwargs: Any) -> bytes:
        return opened.identity("float32", processor_kwargs=kwargs).identity

    sizes = [{"shortest_edge": 3136, "longest_edge": edge} for edge in (50176, 100352)]
    assert len({identity(), *(identity(size=size) for size in sizes)}) == 3
    assert identity(max_pixels=50176) != identity(max_pixels=100352)


@pytest.mark.parametrize("found", [1, True, "Qwen2VLForConditionalGeneration", [], [None]])
def test_checkpoint_with_malformed_architectures_opens(qwen: Path, tmp_path: Path, found: Any) -> None:
    """It was a TypeError on the thread that identifies the model."""
    for file in qwen.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((qwen / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": found}))
    assert Checkpoint.open(str(tmp_path)).kv_spec()
