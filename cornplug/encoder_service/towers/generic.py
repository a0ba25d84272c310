"""The tower of every family without a file here: transformers' own `get_image_features`, one image at a time.

    inputs ──get_image_features──> pooler_output ──> (rows, hidden_size)
Tower and projector are one, so the projector hands rows on. Images are not batched: nothing says of an
unknown tower that an image has the same rows beside others.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.towers import decoderless, input_checks
from cornplug.encoder_service.towers.base import TowerItem
from cornplug.encoder_service.towers.decoderless import DESCRIBE
from cornplug.encoder_service.wire.messages import WireTensor
from cornplug.errors import CheckpointError
from cornplug.identity import digest

_NAMES_VERSION: Final = "cornplug-tower-inputs-v1"
_NUMBERS_A_TOKEN: Final = 3 * 14 * 14
"""Numbers of a usual patch, for a guess of how many there are."""
_ACCEPTED: Final = (*input_checks.FLOATS, *input_checks.INTEGERS, input_checks.BOOLEAN)


class GenericArchitecture:
    """Loads a checkpoint of any model_type that transformers has a class for."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> GenericTower:
        model = decoderless.load(checkpoint, dtype, device)
        check_decoder_takes_rows(model)
        return GenericTower(model, dtype=dtype, device=device)

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> NoProjector:
        _, config = decoderless.model_class(checkpoint)
        return NoProjector(decoderless.hidden_size(checkpoint, config))


class GenericTower:
    """One image's inputs by their names -> its rows, as transformers' whole model computes them."""

    def __init__(self, model: Any, *, dtype: torch.dtype, device: torch.device) -> None:
        self._owner, parameters = _feature_method(model)
        self.names = tuple(parameters)
        """The inputs that `get_image_features` takes."""
        self.needed = frozenset(name for name, p in parameters.items() if p.default is p.empty)
        """Those that it cannot do without."""
        self._class_name = type(model).__name__
        self._dtype = dtype
        self._device = device

    def prepare(self, inputs: Mapping[str, WireTensor]) -> TowerItem:
        input_checks.check_names(inputs, self.names, optional=set(self.names) - self.needed)
        present = [name for name in self.names if name in inputs]
        tensors = []
        for name in present:
            tensor = input_checks.from_wire(name, inputs[name], _ACCEPTED)
            tensors.append(tensor.to(self._dtype) if tensor.is_floating_point() else tensor)
        numbers = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
        return TowerItem(
            tensors=tuple(tensors),
            digests=(
                digest(_NAMES_VERSION, *(name.encode() for name in present)),
                *map(input_checks.digest_of, tensors),
            ),
            tokens=max(1, math.ceil(numbers / _NUMBERS_A_TOKEN)),
            geometry=tuple(map(self.names.index, present)),
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        return [self._rows(item) for item in items]

    def _rows(self, item: TowerItem) -> torch.Tensor:
        named = {self.names[i]: t for i, t in zip(item.geometry, item.tensors, strict=True)}
        output = self._owner.get_image_features(**{k: t.to(self._device) for k, t in named.items()})
        return rows_of(output, self._class_name)


class NoProjector:
    """Hands on rows that are embeddings already."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        return list(features)


def _feature_method(model: Any) -> tuple[Any, dict[str, inspect.Parameter]]:
    """(the model or its inner one, whichever names the inputs of `get_image_features`; these inputs)."""
    for owner in (model, model.base_model):
        method = getattr(owner, "get_image_features", None)
        found = inspect.signature(method).parameters if method is not None else {}
        named = {k: p for k, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if named:
            return owner, named
    raise CheckpointError(
        f"{type(model).__name__} has no get_image_features. {DESCRIBE}", reason="unknown_family"
    )


def rows_of(output: Any, name: str) -> torch.Tensor:
    """The rows of one image out of what `get_image_features` of class `name` returned: (rows, width).

    Raises CheckpointError("unknown_family") where those are no rows.
    """
    found = getattr(output, "pooler_output", None)
    parts = [found] if isinstance(found, torch.Tensor) else list(found or ())
    if not parts or not all(isinstance(part, torch.Tensor) and part.ndim >= 2 for part in parts):
        raise CheckpointError(f"{name}.get_image_features gives no rows. {DESCRIBE}", reason="unknown_family")
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).contiguous()


def check_decoder_takes_rows(model: Any) -> None:
    """Raises CheckpointError("unknown_family") where the decoder of a model takes other outputs of
    `get_image_features` than `pooler_output`: rows of several layers, or ones to be projected still.

    transformers' own code says so: `forward` takes each output by its name, for callers that computed it
    before.
    """
    owner = type(model).__mro__[1]
    taken: set[str] = set()
    parts: tuple[Any, ...] = (owner, type(model.base_model))
    for part in parts:
        try:
            taken |= set(_TAKEN.findall(inspect.getsource(part.forward)))
        except (OSError, TypeError):
            continue
    if taken != {"pooler_output"}:
        raise CheckpointError(
            f"the decoder of {owner.__name__} takes {', '.join(sorted(taken)) or 'what no code says'} of "
            f" get_image_features, not only its rows (pooler_output). {DESCRIBE}",
            reason="unknown_family",
        )


_TAKEN: Final = re.compile(r"""mm_encoder_outputs(?:\["image"\]|\.get\("image"\))\.(\w+)""")
