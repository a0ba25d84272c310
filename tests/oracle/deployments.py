"""What a request is computed from, as one value: a tiny checkpoint, an engine's settings, a request."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from cornplug.testing import checkpoints

Tensors = dict[str, torch.Tensor]
Names = Callable[[str], str]

TEXT_BEFORE: Final = 17
"""Tokens before the picture: more than a page of 16, so that one page is of text alone."""
LENGTH: Final = 64


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything that a picture's embedding and a prompt's KV may depend on."""

    family: str
    tensors: Tensors
    """By their published names."""
    config: dict[str, Any]
    preprocessor: dict[str, Any]
    shards: tuple[tuple[str, ...], ...]
    """Names of each file's tensors, as written before `rename`."""
    rename: Names | None = None
    """Published name -> the name in the file."""
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})
    indent: int | None = 2
    folder: str = "model"
    more_files: Mapping[str, str] = field(default_factory=dict)
    """Files beside those, by name, that no engine reads."""

    dtype: str = "float32"
    max_model_len: int = 4096
    processor_kwargs: dict[str, Any] = field(default_factory=dict)
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    adapter: tuple[Tensors, dict[str, Any]] | None = None

    salt: str | None = None
    uuid: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    """This request's own processor arguments."""
    picture: Image.Image = field(default_factory=lambda: random_picture(0))
    tokens: tuple[int, ...] = tuple(3 + (7 * i) % 80 for i in range(LENGTH))
    """Text of the prompt, the picture's tokens apart."""

    def but(self, **changes: Any) -> Deployment:
        """The same, with some parts otherwise."""
        return replace(self, **changes)


def random_picture(seed: int, width: int = 67, height: int = 61) -> Image.Image:
    """Noise: whatever a processor does otherwise shows in it."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels, "RGB")


_VISION: Final = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "projection_dim": 16}


def base(family: str, folder: Path) -> Deployment:
    """The deployment that others of this family are compared with."""
    if family == "llava":
        vision = {**checkpoints.TINY_CLIP, **_VISION}
        made = checkpoints.llava(folder, hidden_size=32, vision=vision)
    elif family == "qwen2_vl":
        vision = {**checkpoints.TINY_QWEN2_VISION, "embed_dim": 32}
        made = checkpoints.qwen2_vl(folder, hidden_size=32, vision=vision, max_pixels=28 * 28 * 6)
    else:
        vision = {**checkpoints.TINY_QWEN3_VISION, "hidden_size": 32, "depth": 3}
        made = checkpoints.qwen3_vl(folder, hidden_size=32, vision=vision, max_pixels=32 * 32 * 6)
    tensors: Tensors = {}
    for file in sorted(made.glob("*.safetensors")):
        tensors |= load_file(file)
    towers = ("vision_tower.", "visual.", "model.visual.")
    parts: tuple[list[str], list[str], list[str]] = ([], [], [])
    for name in tensors:
        of_tower = name.startswith(towers) and "merger" not in name
        parts[0 if of_tower else 1 if ".layers.0." in name else 2].append(name)
    return Deployment(
        family=family,
        tensors=tensors,
        config=json.loads((made / "config.json").read_text()),
        preprocessor=json.loads((made / "preprocessor_config.json").read_text()),
        shards=tuple(tuple(part) for part in parts),
    )


def write(deployment: Deployment, into: Path, kept: dict[tuple[int, ...], Path]) -> Path:
    """The checkpoint's folder; `kept` has the files of tensors that an earlier one wrote."""
    folder = into / deployment.folder
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(deployment.config, indent=deployment.indent))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(deployment.preprocessor, indent=deployment.indent)
    )
    for name, text in deployment.more_files.items():
        (folder / name).write_text(text)
    rename = deployment.rename or (lambda name: name)
    files = {}
    for number, names in enumerate(deployment.shards):
        file = folder / f"model-{number + 1:05}-of-{len(deployment.shards):05}.safetensors"
        files |= {rename(name): file.name for name in names}
        plain = deployment.rename is None and dict(deployment.metadata) == {"format": "pt"}
        seen = tuple(id(deployment.tensors[name]) for name in names)
        if plain and seen in kept:
            os.link(kept[seen], file)
            continue
        save_file(
            {rename(name): deployment.tensors[name].contiguous() for name in names},
            file,
            metadata=dict(deployment.metadata),
        )
        if plain and len(kept) < 12:
            kept[seen] = file
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_adapter(deployment: Deployment, into: Path) -> Path | None:
    """The adapter's folder, None without one."""
    if deployment.adapter is None:
        return None
    folder = into / "adapter"
    folder.mkdir(parents=True)
    tensors, config = deployment.adapter
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
