"""Tower for families without their own module. It runs transformers' own model on one media item at a time.

    inputs ─┬─get_image_features, get_video_features──> pooler_output ─┬─> (rows, hidden_size)
            └─whole forward, with a prompt ──> DecoderRecorder ────────┘

The first method is used if transformers' code for the decoder uses these outputs unchanged. The second method
is used for all other families and for audio, which have further steps between tower and decoder (masks,
padding).

The tower already computes the embedding, so the projector returns rows unchanged. Items are not batched,
because batching may change the rows of an unknown tower.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import Modality
from cornplug.encoder_service.towers import base, decoderless
from cornplug.encoder_service.towers.base import TowerInput, TowerItem
from cornplug.encoder_service.towers.decoderless import DEEPSTACK_ARGUMENT, UNSUPPORTED_HINT, DecoderReached
from cornplug.errors import CheckpointError
from cornplug.identity import digest

PROMPT: Final = "input_ids"
"""Name of the input that contains the prompt."""
_MODALITIES: Final[tuple[Modality, ...]] = ("image", "video", "audio")
_NAMES_VERSION: Final = "cornplug-tower-inputs-v1"
_VALUES_PER_TOKEN: Final = 3 * 14 * 14
"""Number of values in a typical patch, to estimate the number of patches."""
_ACCEPTED: Final = (*base.FLOAT_DTYPES, *base.INTEGER_DTYPES, base.BOOL_DTYPE)


class GenericArchitecture:
    """Loads any model_type for which transformers has a multimodal class."""

    def __init__(self, modalities: tuple[Modality, ...]) -> None:
        self._modalities = modalities

    def load_tower(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> GenericTower:
        model = decoderless.load_without_decoder(checkpoint, dtype, device, self._modalities[0])
        return GenericTower(model, self._modalities, dtype=dtype, device=device)

    def load_projector(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
    ) -> IdentityProjector:
        found, config = decoderless.model_class(checkpoint)
        levels = 0 if self._modalities[0] == "audio" else _deepstack_levels(found, config)
        return IdentityProjector((1 + levels) * decoderless.hidden_size(checkpoint, config))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeMethod:
    """Method of a transformers model that computes the rows of a media item."""

    input_names: tuple[str, ...]
    """Names of the method's inputs."""
    required_inputs: frozenset[str]
    """Names of the method's required inputs."""
    compute_rows: Callable[[Mapping[str, torch.Tensor]], torch.Tensor]

    @property
    def needs_prompt(self) -> bool:
        """Whether the method requires a prompt that contains the media item."""
        return PROMPT in self.required_inputs


class GenericTower:
    """Computes a media item's rows from its named inputs with transformers' complete model."""

    def __init__(
        self, model: Any, modalities: Sequence[Modality], *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Create a tower. Raises CheckpointError("unknown_family") if the model does not accept the first of
        `modalities`."""
        found: dict[Modality, EncodeMethod] = {}
        # Support all modalities of the class, not only `modalities`. Another model with the same weights
        # shares this tower, and may accept more modalities.
        for modality in _MODALITIES:
            try:
                found[modality] = _encode_method(model, modality)
            except CheckpointError:
                if modality == modalities[0]:
                    raise
        self.methods: Mapping[Modality, EncodeMethod] = found
        self._model = model
        self._dtype = dtype
        self._device = device

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        modality = max(
            self.methods, key=lambda m: _match_inputs(self.methods[m], inputs)
        )  # the first on a tie
        method = self.methods[modality]
        base.check_input_names(
            inputs, method.input_names, optional=set(method.input_names) - method.required_inputs
        )
        present = [name for name in method.input_names if name in inputs]
        tensors = []
        for name in present:
            tensor = base.validate_input(name, inputs[name], _ACCEPTED)
            tensors.append(tensor.to(self._dtype) if tensor.is_floating_point() else tensor)
        numbers = sum(tensor.numel() for tensor in tensors if tensor.is_floating_point())
        return TowerItem(
            tensors=tuple(tensors),
            names_digest=digest(_NAMES_VERSION, *(name.encode() for name in present)),
            tokens=max(1, math.ceil(numbers / _VALUES_PER_TOKEN)),
            geometry=(_MODALITIES.index(modality), *map(method.input_names.index, present)),
        )

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        return [self._encode_item(item) for item in items]

    def _encode_item(self, item: TowerItem) -> torch.Tensor:
        modality, *places = item.geometry
        method = self.methods[_MODALITIES[modality]]
        named = {method.input_names[i]: t.to(self._device) for i, t in zip(places, item.tensors, strict=True)}
        return method.compute_rows(named)


class IdentityProjector:
    """Projector that returns the tower's rows unchanged, because they already are the embedding."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size

    @property
    def hidden_size(self) -> int:
        return self._hidden_size

    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        return list(features)


def _match_inputs(method: EncodeMethod, inputs: Mapping[str, Any]) -> tuple[bool, int]:
    """Return (whether the inputs are sufficient for a method, number of inputs that it would use)."""
    return method.required_inputs <= inputs.keys(), len(inputs.keys() & set(method.input_names))


def _encode_method(model: Any, modality: Modality) -> EncodeMethod:
    """Return the model's `get_*_features` if the decoder uses its rows unchanged, otherwise the complete
    forward pass.

    Raises CheckpointError("unknown_family") if the model has no `get_*_features` for the modality.
    """
    name = f"get_{modality}_features"
    owner, inputs = _find_method_inputs(model, name)
    if outputs_used_by_decoder(model, modality) != {"pooler_output"}:
        return _full_forward_method(model)
    method = getattr(owner, name)
    return EncodeMethod(
        input_names=tuple(inputs),
        required_inputs=_required_names(inputs),
        compute_rows=lambda named: rows_of(method(**named), f"{type(model).__name__}.{name}"),
    )


def _full_forward_method(model: Any) -> EncodeMethod:
    _, inputs = _find_method_inputs(model, "forward")

    def rows(named: Mapping[str, torch.Tensor]) -> torch.Tensor:
        try:
            model(**named)
        except DecoderReached as reached:
            return reached.rows
        raise CheckpointError(f"{type(model).__name__} has no decoder", reason="unknown_family")

    return EncodeMethod(input_names=tuple(inputs), required_inputs=frozenset({PROMPT}), compute_rows=rows)


def _required_names(inputs: Mapping[str, inspect.Parameter]) -> frozenset[str]:
    return frozenset(name for name, p in inputs.items() if p.default is p.empty)


def _find_method_inputs(model: Any, name: str) -> tuple[Any, dict[str, inspect.Parameter]]:
    """Return (model or its inner model, parameters of its method `name`). The model that has this method with
    named parameters is used.

    Raises CheckpointError("unknown_family") if neither model has the method.
    """
    for owner in (model, model.base_model):
        method = getattr(owner, name, None)
        found = inspect.signature(method).parameters if method is not None else {}
        named = {k: p for k, p in found.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        if named:
            return owner, named
    raise CheckpointError(
        f"{type(model).__name__} has no {name}. {UNSUPPORTED_HINT}", reason="unknown_family"
    )


def rows_of(output: Any, name: str) -> torch.Tensor:
    """Return the rows of one media item, of shape (rows, width), from the output of the method `name`.

    Raises CheckpointError("unknown_family") if the output has no rows.
    """
    found = getattr(output, "pooler_output", None)
    parts = [found] if isinstance(found, torch.Tensor) else list(found or ())
    if not parts or not all(isinstance(part, torch.Tensor) and part.ndim >= 2 for part in parts):
        raise CheckpointError(f"{name} returns no rows. {UNSUPPORTED_HINT}", reason="unknown_family")
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]).contiguous()


def _deepstack_levels(found: type[Any], config: Any) -> int:
    """Return the number of deepstack levels that are concatenated to each row, as in the Qwen3-VL module."""
    module = inspect.getmodule(found)
    if module is None or f"{DEEPSTACK_ARGUMENT}=" not in inspect.getsource(module):
        return 0
    return len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())


def outputs_used_by_decoder(model: Any, modality: Modality) -> set[str]:
    """Return the names of the outputs of `get_*_features` that a model's decoder uses.

    The names are read from the source code of transformers' `forward`, which names each output that callers
    may pass in precomputed. The result is empty if `forward` does not accept precomputed outputs, as for
    audio. Outputs other than "pooler_output" are rows of several layers, or rows before the projector.
    """
    pattern = re.compile(rf'mm_encoder_outputs(?:\["{modality}"\]|\.get\("{modality}"\))\.(\w+)')
    taken: set[str] = set()
    parts: tuple[Any, ...] = (type(model).__mro__[1], type(model.base_model))
    for part in parts:
        try:
            taken |= set(pattern.findall(inspect.getsource(part.forward)))
        except (OSError, TypeError):
            continue
    return taken
