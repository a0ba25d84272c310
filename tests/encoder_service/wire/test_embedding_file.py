"""Embeddings as safetensors files, beside the library that defines the format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load

from cornplug.encoder_service.formats import engine_seal
from cornplug.encoder_service.formats.tensors import to_wire

FIELDS = {"key": "ab" * 32, "shape": [3, 5], "origin": "computed", "service_time_s": 0.25, "handle": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["short", "ä key that needs another padding"])
def test_embedding_file_is_read_by_safetensors(dtype: torch.dtype, key: str, tmp_path: Path) -> None:
    rows = torch.randn(3, 5).to(dtype)
    fields = {**FIELDS, "key": key}
    file = engine_seal.pack_embedding(fields, to_wire(rows))
    (name,) = load(file)
    assert torch.equal(load(file)[name], rows)
    path = tmp_path / "embedding.safetensors"
    path.write_bytes(file)
    with safe_open(path, framework="pt") as opened:
        assert list(opened.metadata()) == ["cornplug"]
    read, data = engine_seal.unpack_embedding(file)
    assert read == fields
    assert data == to_wire(rows).data
