"""Checkpoints of many equal layers: as large as a published model, and drawn in seconds."""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from devkit import checkpoints

_FIRST: Final = "model.layers.0."
_ALIGNMENT: Final = 8


def qwen2_text(path: Path, *, layers: int, **parameters: Any) -> Path:
    """A Qwen2 whose layers have equal weights. Returns `path`.

    Args:
        parameters: Of `devkit.checkpoints.qwen2_text`.
    """
    folder = checkpoints.qwen2_text(path, layers=1, **parameters)
    weights = folder / "model.safetensors"
    repeat(weights, folder / "repeated.safetensors", layers)
    (folder / "repeated.safetensors").rename(weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": layers}, indent=1))
    return folder


def repeat(source: Path, target: Path, layers: int) -> None:
    """Write a safetensors file in which each tensor of the first layer is there `layers` times."""
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        (length,) = struct.unpack_from("<Q", data)
        start = 8 + length
        tensors: Mapping[str, Any] = json.loads(data[8:start])
        header, spans, at = {}, [], 0
        for name, tensor in tensors.items():
            if name == "__metadata__":
                header[name] = tensor
                continue
            first, end = tensor["data_offsets"]
            for i in range(layers if name.startswith(_FIRST) else 1):
                copy = name.replace(_FIRST, f"model.layers.{i}.", 1)
                header[copy] = {**tensor, "data_offsets": [at, at + end - first]}
                spans.append((start + first, start + end))
                at += end - first
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        with target.open("wb") as out, memoryview(data) as view:
            out.write(struct.pack("<Q", len(text)) + text)
            for first, end in spans:
                with view[first:end] as span:
                    out.write(span)
