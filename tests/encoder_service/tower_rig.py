"""The cases of `test_towers`: media, transformers' references, and changed checkpoints."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, AutoVideoProcessor

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import Modality
from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.messages import WireTensor
from cornplug.encoder_service.towers.base import Projector, Tower, TowerItem

from .conftest import sample_image, to_wire
from .recordings import tone
from .ultravox_reference import UltravoxModel

CPU = torch.device("cpu")
F32 = torch.float32
Made = Mapping[str, torch.Tensor]
"""A processor's outputs for one medium."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """One modality: sample media, the call of a processor, and transformers' reference embeddings."""

    media: Callable[[], Sequence[Any]]
    """Of several sizes; the first and the third give equally many rows at most."""
    process: Callable[[Path, Any], Made]
    reference: Callable[[Any, Made], torch.Tensor]
    """(whole model, processor's outputs) -> (rows, hidden), as its LLM consumes it."""


def rows(output: Any) -> torch.Tensor:
    """`pooler_output` of transformers' get_*_features for one medium, as rows."""
    found = output.pooler_output
    parts = [found] if isinstance(found, torch.Tensor) else list(found)
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def sample_images(*large: int) -> list[Any]:
    """Three images of several shapes, and one of width and height `large`."""
    sizes = [(70, 60), (200, 90), (56, 56), large or (90, 250)]
    return [sample_image(i, *size) for i, size in enumerate(sizes)]


def _read_image(path: Path, image: Any) -> Made:
    asked = Checkpoint.open(str(path)).family.processor_defaults.get("image", {})
    made = AutoImageProcessor.from_pretrained(path)(images=image, return_tensors="pt", **asked)
    return {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}


def _read_video(path: Path, frames: Any) -> Made:
    processor = AutoVideoProcessor.from_pretrained(path)
    made = processor(videos=[frames], do_sample_frames=False, return_tensors="pt")
    return {name: tensor for name, tensor in made.items() if isinstance(tensor, torch.Tensor)}


def _videos() -> list[Any]:
    """(frames, channels, height, width), of 1 to 6 frames; one frame more than the tower's patches end in."""
    sizes = [(4, 70, 60), (5, 120, 90), (2, 56, 84), (6, 64, 96)]
    return [
        torch.stack(
            [
                torch.from_numpy(np.array(sample_image(10 * i + n, width, height))).permute(2, 0, 1)
                for n in range(count)
            ]
        )
        for i, (count, height, width) in enumerate(sizes)
    ]


def deepstacked(model: Any, made: Made) -> torch.Tensor:
    """Qwen3-VL's embedding as vLLM lays it out: the last layer, then each level, side by side."""
    pixels, grid = made.values()
    output = model.model.visual(pixels, grid_thw=grid)
    return torch.cat([output.pooler_output, *output.deepstack_features], dim=-1)


MEDIA: dict[Modality, Medium] = {
    "video": Medium(
        media=_videos,
        process=_read_video,
        reference=lambda model, made: rows(model.get_video_features(**made)),
    ),
    "image": Medium(
        media=sample_images,
        process=_read_image,
        reference=lambda model, made: rows(model.get_image_features(**made)),
    ),
}


def _listen(path: Path, samples: Any) -> Made:
    checkpoint = Checkpoint.open(str(path))
    architecture: Any = towers.find_architecture(checkpoint.family)
    return architecture.feature_extractor(checkpoint.preprocessors["audio"]).extract(samples)


def _heard(model: Any, made: Made) -> torch.Tensor:
    """The input of a Qwen2-Audio's LLM for a prompt of audio only."""
    frames = int(made["feature_attention_mask"].sum())
    tokens = torch.full((1, ((frames - 1) // 2 + 1) // 2), model.config.audio_token_id)
    seen: list[torch.Tensor] = []

    def keep(_module: Any, _args: Any, kwargs: Any) -> None:
        seen.append(kwargs["inputs_embeds"][0])

    handle = model.model.language_model.register_forward_pre_hook(keep, with_kwargs=True)
    model.model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **made)
    handle.remove()
    return seen[0]


MEDIA["audio"] = Medium(
    media=lambda: [
        tone(s, pitch=p)[:, 0].astype("float32") / 32768
        for s, p in ((0.5, 440), (3.014, 200), (0.5, 90), (4.5, 700), (0.137, 300))
    ],
    process=_listen,
    reference=_heard,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the table."""

    recipe: Callable[..., Path]
    """Of `devkit.checkpoints`: takes path, hidden_size, heads and `kwargs`."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    modality: Modality = "image"
    wider: Mapping[str, Any] = field(default_factory=lambda: {"hidden_size": 96, "heads": 3})
    """Makes another LLM over the same tower."""
    media: Callable[[], Sequence[Any]] | None = None
    """Where the modality's own do not fit."""
    reference: Callable[[Any, Made], torch.Tensor] | None = None
    """Where the modality's own is not the input of the LLM."""

    def make(self, path: Path, **changes: Any) -> Path:
        return self.recipe(path, **{**self.kwargs, **changes})

    def inputs(self, path: Path) -> list[Made]:
        """Each medium's processor outputs that the family sends; more than one to try."""
        wanted = Checkpoint.open(str(path)).family.inputs[self.modality]
        medium = MEDIA[self.modality]
        made = [medium.process(path, m) for m in (self.media or medium.media)()]
        return [{name: one[name] for name in wanted} for one in made]


@dataclass(frozen=True, slots=True)
class Halves:
    tower: Tower
    projector: Projector

    @classmethod
    def load(cls, path: Path, dtype: torch.dtype = F32) -> Halves:
        checkpoint = Checkpoint.open(str(path))
        architecture = towers.find_architecture(checkpoint.family)
        return cls(
            architecture.load_tower(checkpoint, dtype, CPU),
            architecture.load_projector(checkpoint, dtype, CPU),
        )

    def items(self, made: Sequence[Made]) -> list[TowerItem]:
        return [self.tower.prepare(wire(one)) for one in made]

    def embed(self, made: Sequence[Made]) -> list[torch.Tensor]:
        """All in one batch."""
        items = self.items(made)
        return self.projector.project(self.tower.encode(items), items)


def wire(made: Made) -> dict[str, WireTensor]:
    return {name: to_wire(tensor) for name, tensor in made.items()}


def whole_model(path: Path) -> Any:
    """transformers' own model, LLM and all."""
    config = json.loads((path / "config.json").read_text())
    name = config["architectures"][0]
    cls = UltravoxModel if name == "UltravoxModel" else getattr(transformers, name)
    return cls.from_pretrained(path, dtype=F32, attn_implementation="sdpa").eval()


def edit_config(path: Path, **fields: object) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    return path


Tensors = dict[str, torch.Tensor]


def rewritten(path: Path, to: Path, change: Callable[[Tensors], Tensors], shards: int = 1) -> Path:
    """A copy whose tensors `change` has had its way with, in so many files."""
    shutil.copytree(path, to)
    tensors = change(load_file(to / "model.safetensors"))
    if shards == 1:
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
        return to
    (to / "model.safetensors").unlink()
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({name: tensors[name] for name in names}, to / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return to


def nudged(path: Path, to: Path, part: Any) -> Path:
    """A copy in which one value of one tensor of this part, the last by name, has changed."""
    name = sorted(stored for _, stored in Checkpoint.open(str(path)).locate(part).values())[-1]

    def change(tensors: Tensors) -> Tensors:
        flat = tensors[name].reshape(-1)
        flat[len(flat) // 2] += 1e-3
        return tensors

    return rewritten(path, to, change)


def fine_tuned_and_quantised(path: Path, to: Path) -> Path:
    """A copy under another name with another LLM, in 8-bit integers; tower and projector untouched."""
    language = {stored for _, stored in Checkpoint.open(str(path)).locate("language_model").values()}

    def change(tensors: Tensors) -> Tensors:
        out: Tensors = {}
        for name, tensor in tensors.items():
            if name not in language:
                out[name] = tensor
            elif tensor.ndim == 2:
                scale = tensor.abs().amax(1, keepdim=True) / 127
                out[f"{name.removesuffix('.weight')}.qweight"] = (tensor / scale).round().to(torch.int8)
                out[f"{name.removesuffix('.weight')}.scales"] = scale
            else:
                out[name] = tensor * 1.01
        return out

    return edit_config(
        rewritten(path, to, change),
        _name_or_path="somebody/else",
        quantization_config={"quant_method": "w8", "modules_to_not_convert": ["vision_tower", "visual"]},
    )
