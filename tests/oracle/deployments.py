"""What a request is computed from, as one value: a tiny checkpoint, an engine's settings, a request."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from devkit import checkpoints

Tensors = dict[str, torch.Tensor]
Names = Callable[[str], str]

TEXT_BEFORE: Final = 17
"""Tokens before the image: more than a page of 16, so that one page is of text alone."""
LENGTH: Final = 64


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Everything that an image's embedding and a prompt's KV may depend on."""

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
    image: Image.Image = field(default_factory=lambda: random_image(0))
    tokens: tuple[int, ...] = tuple(3 + (7 * i) % 80 for i in range(LENGTH))
    """Text of the prompt, the image's tokens apart."""

    def but(self, **changes: Any) -> Deployment:
        """The same, with some parts otherwise."""
        return replace(self, **changes)


def random_image(seed: int, width: int = 67, height: int = 61) -> Image.Image:
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


class Writer:
    """Writes deployments to folders; files of equal tensors are written once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._number = 0
        # The tensors are held, so that their ids stay theirs.
        self._kept: dict[tuple[int, ...], tuple[Path, list[torch.Tensor]]] = {}

    @contextmanager
    def written(self, deployment: Deployment) -> Iterator[tuple[Path, Path | None]]:
        """(the checkpoint's folder, the adapter's or None), which are gone afterwards."""
        self._number += 1
        into = self._root / str(self._number)
        try:
            yield self._checkpoint(deployment, into), _adapter(deployment, into)
        finally:
            shutil.rmtree(into, ignore_errors=True)

    def keep(self, deployment: Deployment) -> None:
        """Deployments that share tensors with this one are written the faster."""
        for names in deployment.shards:
            tensors = [deployment.tensors[name] for name in names]
            file = self._root / f"kept-{len(self._kept)}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file(dict(zip(names, tensors, strict=True)), file, metadata={"format": "pt"})
            self._kept[tuple(map(id, tensors))] = file, tensors

    def _checkpoint(self, deployment: Deployment, into: Path) -> Path:
        folder = into / deployment.folder
        folder.mkdir(parents=True)
        texts = {"config.json": deployment.config, "preprocessor_config.json": deployment.preprocessor}
        for name, content in texts.items():
            (folder / name).write_text(json.dumps(content, indent=deployment.indent))
        for name, text in deployment.more_files.items():
            (folder / name).write_text(text)
        rename = deployment.rename or (lambda name: name)
        plain = deployment.rename is None and dict(deployment.metadata) == {"format": "pt"}
        files: dict[str, str] = {}
        for number, names in enumerate(deployment.shards):
            file = folder / f"model-{number + 1:05}-of-{len(deployment.shards):05}.safetensors"
            files |= {rename(name): file.name for name in names}
            tensors = [deployment.tensors[name] for name in names]
            kept = self._kept.get(tuple(map(id, tensors)))
            if plain and kept is not None:
                os.link(kept[0], file)
                continue
            named = {rename(name): tensor for name, tensor in zip(names, tensors, strict=True)}
            save_file(named, file, metadata=dict(deployment.metadata))
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


def _adapter(deployment: Deployment, into: Path) -> Path | None:
    if deployment.adapter is None:
        return None
    folder = into / "adapter"
    folder.mkdir(parents=True)
    tensors, config = deployment.adapter
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
