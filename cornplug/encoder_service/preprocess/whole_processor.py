"""The images' half of a checkpoint's own transformers processor, for families without a file here.

The image processor alone would lack what its processor adds to its arguments, such as a patch size.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from PIL import Image

from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.models.torch_compile import CompiledTower
from cornplug.encoder_service.towers.decoderless import DESCRIBE, REFUSALS
from cornplug.encoder_service.towers.generic import GenericTower
from cornplug.encoder_service.wire.tensors import to_wire
from cornplug.errors import CheckpointError, EncoderRefused

_TRIED: Final = (96, 64)
"""Width and height of the image that a model is tried with when it is loaded."""
_PLACEHOLDERS: Final = ("image_token", "boi_token")


class WholeProcessor:
    """Called like an image processor: one image -> the inputs that the tower takes, by name. Thread-safe.

    Raises CheckpointError("bad_config") where the checkpoint has no processor that takes one image.
    """

    def __init__(self, loaded: LoadedModel) -> None:
        path = loaded.checkpoint.path
        tower = loaded.tower.inner if isinstance(loaded.tower, CompiledTower) else loaded.tower
        assert isinstance(tower, GenericTower)
        self.names, self._needed = tower.names, tower.needed
        # A fast tokenizer is for one thread at a time.
        self._lock = threading.Lock()
        try:
            self._processor: Any = transformers.AutoProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False
            )
        except REFUSALS as e:
            raise CheckpointError(f"{path}: no processor: {e}", reason="bad_config") from e
        self._text = self._working_text(path)

    @property
    def size(self) -> Any:
        """`size` of the image processor."""
        return getattr(getattr(self._processor, "image_processor", self._processor), "size", None)

    def __call__(self, images: Any, return_tensors: str = "pt", **asked: Any) -> Mapping[str, torch.Tensor]:
        """Raises ValueError where the processor does not take the image."""
        try:
            return self._inputs(images, self._text, **asked)
        except REFUSALS as e:
            raise ValueError(f"{type(e).__name__}: {e}") from e

    def _working_text(self, path: Path) -> str | None:
        """The prompt that this processor wants beside an image: None at best, else a placeholder."""
        problems = []
        marks = (getattr(self._processor, name, None) for name in _PLACEHOLDERS)
        for text in (None, *(mark for mark in marks if isinstance(mark, str))):
            try:
                made = self._inputs(Image.new("RGB", _TRIED, "gray"), text)
            except REFUSALS as e:
                problems.append(f"{type(e).__name__}: {e}")
                continue
            if not self._needed - made.keys():
                return text
            problems.append(f"it makes no {', '.join(sorted(self._needed - made.keys()))}")
        raise CheckpointError(
            f"{path}: {type(self._processor).__name__} takes no single image: {'; '.join(problems)}",
            reason="bad_config",
        )

    def _inputs(self, image: Any, text: str | None, **asked: Any) -> Mapping[str, torch.Tensor]:
        prompt = {} if text is None else {"text": text}
        with self._lock if prompt else nullcontext():
            made = self._processor(images=image, return_tensors="pt", **prompt, **asked)
        found = {name: made[name] for name in self.names if made.get(name) is not None}
        return {name: _tensor(value) for name, value in found.items()}


def check_encodes(loaded: LoadedModel, processor: WholeProcessor) -> None:
    """Encode an image with a model that no test may have run.

    Raises CheckpointError("unknown_family") where that fails, or its rows are no inputs of its decoder.
    """
    if loaded.device.type == "meta":
        return  # the replicas have the weights
    name, wanted = loaded.served.name, loaded.projector.hidden_size
    try:
        made = processor(images=Image.new("RGB", _TRIED, "gray"))
        item = loaded.tower.prepare({field: to_wire(tensor) for field, tensor in made.items()})
        rows = loaded.tower.encode([item])[0]
    except (EncoderRefused, *REFUSALS) as e:
        raise CheckpointError(
            f"{name}: the {loaded.served.family} of transformers {transformers.__version__} does not encode "
            f"one image by itself: {type(e).__name__}: {e}. {DESCRIBE}",
            reason="unknown_family",
        ) from e
    if rows.shape[1] != wanted or not bool(torch.isfinite(rows).all()):
        raise CheckpointError(
            f"{name}: rows of shape {tuple(rows.shape)} that are not finite, or not of the decoder's width "
            f"{wanted}. {DESCRIBE}",
            reason="unknown_family",
        )


def _tensor(value: Any) -> torch.Tensor:
    """The value as a tensor. ValueError for one that is none, as lists of images of several sizes."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)
