"""Checkpoints with no model behind them: names, shapes and bytes, without torch.

For tests of identity, and for golden vectors: every byte follows from the tensor's name.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

Tensor = tuple[str, tuple[int, ...], bytes]
"""safetensors dtype, shape, little-endian bytes"""
Tensors = dict[str, Tensor]
Generation = Literal[4, 5]
"""The transformers release whose tensor names are used."""

_WIDTH: Final = 4
_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8}

LLAVA_CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "llava",
    "vision_feature_layer": -2,
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": _WIDTH, "num_hidden_layers": 3},
    "text_config": {"model_type": "llama", "hidden_size": _WIDTH, "num_hidden_layers": 1},
}
QWEN2_VL_CONFIG: Final[Mapping[str, Any]] = {
    "model_type": "qwen2_vl",
    "hidden_size": _WIDTH,
    "num_hidden_layers": 1,
    "vision_config": {"depth": 1, "embed_dim": _WIDTH, "hidden_size": _WIDTH},
}
CLIP_PREPROCESSOR: Final[Mapping[str, Any]] = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
    "resample": 3,
}

_LAYER: Final = ("self_attn.q_proj.weight", "mlp.fc1.weight", "layer_norm1.weight")
_TEXT: Final = ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight", "norm.weight")


def bare(name: str, dtype: str = "F32", shape: Sequence[int] = (_WIDTH, _WIDTH)) -> Tensor:
    """A tensor whose bytes are SHAKE-256 of its name."""
    size = math.prod(shape) * _BYTES[dtype]
    return dtype, tuple(shape), hashlib.shake_256(name.encode()).digest(size)


def llava_tensors(generation: Generation = 4) -> Tensors:
    """LLaVA with a CLIP tower of three layers; the same weights in either generation."""
    tower = ["embeddings.class_embedding", "pre_layrnorm.weight", "post_layernorm.weight"]
    tower += [f"encoder.layers.{i}.{leaf}" for i in range(3) for leaf in _LAYER]
    prefix = {
        4: (
            "vision_tower.vision_model.",
            "multi_modal_projector.",
            "language_model.model.",
            "language_model.",
        ),
        5: ("model.vision_tower.", "model.multi_modal_projector.", "model.language_model.", ""),
    }[generation]
    parts = (tower, ["linear_1.weight", "linear_2.bias"], list(_TEXT), ["lm_head.weight"])
    return _named("llava", prefix, parts)


def qwen2_vl_tensors(generation: Generation = 4) -> Tensors:
    """Qwen2-VL with one tower block; the same weights in either generation."""
    tower = ["patch_embed.proj.weight", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.bias"]
    prefix = {
        4: ("visual.", "visual.merger.", "model.", ""),
        5: ("model.visual.", "model.visual.merger.", "model.language_model.", ""),
    }[generation]
    return _named(
        "qwen2_vl", prefix, (tower, ["ln_q.weight", "mlp.0.weight"], list(_TEXT), ["lm_head.weight"])
    )


def _named(family: str, prefixes: Sequence[str], parts: Sequence[Sequence[str]]) -> Tensors:
    return {
        prefix + name: bare(f"{family}/{i}/{name}")
        for i, (prefix, names) in enumerate(zip(prefixes, parts, strict=True))
        for name in names
    }


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One safetensors file, tensors in the order given."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any] = LLAVA_CONFIG,
    preprocessor: Mapping[str, Any] | None = CLIP_PREPROCESSOR,
    *,
    shards: int = 1,
) -> Path:
    """A checkpoint folder: config, preprocessor, and weights in `shards` files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if preprocessor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, {name: tensors[name] for name in names[i::shards]})
        weight_map.update(dict.fromkeys(names[i::shards], file))
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder
