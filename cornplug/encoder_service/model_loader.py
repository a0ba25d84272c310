"""Loads a model from its checkpoint. If a loaded model already has the same tower or projector, it is shared.

checkpoint ─┬─ LoadedModel: image, video ─ tower, projector
            └─ LoadedModel: audio ─ tower, projector          only models with two towers

On a CPU, `replace_slow_layers` replaces layers of the tower. Like vLLM's own towers, the new layers pack each
weight matrix once for oneDNN and have fused activations. PyTorch's `nn.Linear` packs the matrix at each call
in half precision, and calls a slower library in float32. With `--compile`, torch.compile compiles the layers.
A tower that cannot be compiled runs uncompiled, after one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from transformers.activations import QuickGELUActivation

from cornplug import identity
from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.checkpoints.families import Modality
from cornplug.encoder_service import towers
from cornplug.encoder_service.formats.messages import ServedModality, ServedModel
from cornplug.encoder_service.towers.base import (
    Projector,
    Tower,
    TowerInput,
    TowerItem,
    between_layers,
    float_dtype,
)
from cornplug.errors import CheckpointError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """Loaded model. If a model's modalities have several towers, this is the part of the model with one
    tower. `tower` and `projector` may be shared with other models."""

    served: ServedModel
    """Description of the whole model, with all its modalities."""
    checkpoint: Checkpoint
    modalities: tuple[Modality, ...]
    """Modalities that this tower computes."""
    identity: bytes
    """Model identity of the first of `modalities`. The parts of a model have different identities."""
    tower_fp: bytes
    projector_fp: bytes
    spec_fp: bytes
    tower: Tower
    projector: Projector
    tower_spec_fp: bytes
    """Digest (32 bytes) of everything that affects the tower's features, except weights and inputs."""
    dtype: torch.dtype
    device: torch.device
    """Device of the weights, or "meta" if only the replicas have the weights."""
    other_parts: tuple[LoadedModel, ...] = ()
    """Other parts of the same model, each with its own tower."""

    @property
    def tower_key(self) -> tuple[bytes, bytes]:
        """Key of the tower. Models with equal keys share a tower."""
        return self.tower_fp, self.tower_spec_fp

    @property
    def projector_key(self) -> tuple[bytes, bytes]:
        """Key of the projector. Models with equal keys share a projector. The key contains the spec, which
        includes the activation."""
        return self.projector_fp, self.spec_fp

    def iter_parts(self) -> Iterator[LoadedModel]:
        """Yield all parts of the model: this part, then `other_parts`."""
        yield self
        yield from self.other_parts

    def part_for(self, modality: str) -> LoadedModel | None:
        """Return the part of the model that computes a modality, or None if no tower for the modality is
        served."""
        return next((part for part in self.iter_parts() if modality in part.modalities), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlacement:
    """Dtype and device for the weights. On the device "meta", a tower checks inputs but has no weights."""

    dtype: str
    """Name of the torch dtype without the "torch." prefix."""
    device: torch.device
    compile: bool = False
    """Whether towers are compiled (`CompiledTower`)."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the towers. Raises ConfigError for an unsupported dtype."""
        return float_dtype(self.dtype)


def read_checkpoint(name: str, dtype: str) -> tuple[Checkpoint, ServedModel]:
    """Open a checkpoint without its weights. Return (checkpoint, description of its model as the service
    reports it).

    In the description, `hidden_size` is 0, because no weights are loaded. Raises CheckpointError.
    """
    checkpoint = Checkpoint.open(name)
    ids = checkpoint.identity(dtype)
    each = ((m, checkpoint.identity(dtype, modality=m)) for m in checkpoint.family.inputs)
    return checkpoint, ServedModel(
        name=name,
        family=checkpoint.family.name,
        identity=ids.identity,
        tower_fp=ids.tower_fp,
        projector_fp=ids.projector_fp,
        spec_fp=ids.spec_fp,
        dtype=dtype,
        hidden_size=0,
        modalities=tuple(
            ServedModality(name=m, identity=its.identity, spec_fp=its.spec_fp) for m, its in each
        ),
    )


def load_model(
    checkpoint: Checkpoint,
    served: ServedModel,
    placement: WeightPlacement,
    *,
    reuse_from: Iterable[LoadedModel] = (),
    epoch: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load the model that `read_checkpoint` returned. Equal towers and projectors of the models in
    `reuse_from` are shared.

    Raises CheckpointError, with the reason "changed" if the folder has changed since `read_checkpoint`.
    """
    known = [part for other in reuse_from for part in other.iter_parts()]
    parts: list[LoadedModel] = []
    for modalities in _modalities_by_tower(checkpoint, served.dtype):
        try:
            parts.append(_load_part(checkpoint, served, modalities, placement, [*known, *parts], report))
        except CheckpointError as e:
            # In a generic family, some towers may be supported and others may not.
            if not (checkpoint.family.generic and parts):
                raise
            report(f"{served.name}: {', '.join(modalities)}: not served: {e}")
    # Check again, because weights that were overwritten after the first `read_checkpoint` would be served
    # under the identity of the old weights. Digests are cached, so the second `read_checkpoint` only checks
    # whether the files have changed.
    if read_checkpoint(served.name, served.dtype)[1] != served:
        raise CheckpointError(f"{served.name} changed while it was loaded. Try again.", reason="changed")
    whole = msgspec.structs.replace(served, hidden_size=parts[0].projector.hidden_size, epoch=epoch)
    first, *rest = (replace(part, served=whole) for part in parts)
    return replace(first, other_parts=tuple(rest))


def _modalities_by_tower(checkpoint: Checkpoint, dtype: str) -> list[tuple[Modality, ...]]:
    """Return the modalities of a checkpoint, grouped by tower."""
    found: dict[tuple[bytes, bytes], list[Modality]] = {}
    for modality in checkpoint.family.inputs:
        found.setdefault(_tower_key(checkpoint, dtype, modality), []).append(modality)
    return [tuple(modalities) for modalities in found.values()]


def _tower_key(checkpoint: Checkpoint, dtype: str, modality: Modality) -> tuple[bytes, bytes]:
    spec = checkpoint.tower_spec(dtype, modality=modality)
    return checkpoint.fingerprint("tower", modality), identity.spec_fingerprint(spec)


def _load_part(
    checkpoint: Checkpoint,
    served: ServedModel,
    modalities: tuple[Modality, ...],
    placement: WeightPlacement,
    reuse_from: Iterable[LoadedModel],
    report: Callable[[str], None],
) -> LoadedModel:
    """Load the tower of `modalities` and its projector. If a model in `reuse_from` already has the tower or
    projector, it is shared."""
    reuse_from = tuple(reuse_from)
    dtype, first = placement.torch_dtype, modalities[0]
    architecture = towers.find_architecture(checkpoint.family, modalities)
    ids = checkpoint.identity(served.dtype, modality=first)
    tower_key = _tower_key(checkpoint, served.dtype, first)
    short = ids.tower_fp.hex()[:12]
    tower = next((other.tower for other in reuse_from if other.tower_key == tower_key), None)
    if tower is None:
        report(f"{served.name}: loading tower {short} as {served.dtype}")
        tower = architecture.load_tower(checkpoint, dtype, placement.device)
        if placement.compile:
            tower = CompiledTower(tower)
        else:
            if placement.device.type == "cpu" and not checkpoint.family.generic:
                replace_slow_layers(tower)
            allow_pauses(tower)
    else:
        report(f"{served.name}: tower {short} is already loaded")
    projector_key = ids.projector_fp, ids.spec_fp
    projector = next((other.projector for other in reuse_from if other.projector_key == projector_key), None)
    return LoadedModel(
        served=served,
        checkpoint=checkpoint,
        modalities=modalities,
        identity=ids.identity,
        tower_fp=ids.tower_fp,
        projector_fp=ids.projector_fp,
        spec_fp=ids.spec_fp,
        tower=tower,
        projector=projector or architecture.load_projector(checkpoint, dtype, placement.device),
        tower_spec_fp=tower_key[1],
        dtype=dtype,
        device=placement.device,
    )


class PackedLinear(nn.Module):
    """Linear layer with a copy of the weights of an `nn.Linear`, packed for oneDNN."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.contiguous(), self._packed, self._bias, "none", [], ""
        )
        return out


class QuickGelu(nn.Module):
    """Same function as transformers' `QuickGELUActivation`, with one temporary tensor instead of three."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (1.702 * rows).sigmoid_().mul_(rows)


@torch.inference_mode()
def replace_slow_layers(tower: Tower) -> None:
    """Replace the linear layers and activations of a tower on a CPU by faster modules.

    Only the tower's repeated layers are changed. A layer that this PyTorch cannot pack stays unchanged, and
    so do all layers after it.
    """
    for layer in layers_of(tower):
        try:
            _replace_submodules(layer)
        except (AttributeError, NotImplementedError, RuntimeError) as e:
            log.info(
                "%s uses PyTorch's slower linear layers, because packing failed: %s", type(layer).__name__, e
            )
            return


def _replace_submodules(module: nn.Module) -> None:
    for name, part in list(module.named_children()):
        # Do not replace subclasses, because the module that owns them may do more than call them.
        if type(part) is nn.Linear:
            setattr(module, name, PackedLinear(part))
        elif type(part) is QuickGELUActivation:
            setattr(module, name, QuickGelu())
        else:
            _replace_submodules(part)


class CompiledTower:
    """Tower whose layers are compiled when they first run, for inputs of any length.

    Each layer is compiled separately. The layers are alike, so all layers use the code that was compiled for
    the first layer. Compilation adds about ten seconds to the first batch.
    """

    failures = 0
    """Number of towers in this process that could not be compiled."""

    def __init__(self, tower: Tower) -> None:
        self.inner = tower
        """Uncompiled tower."""
        self.layers = list(layers_of(tower))
        """Compiled layers, or an empty list if compiling has failed."""
        for layer in self.layers:
            layer.compile(dynamic=True)
            # Wrap the compiled call. A hook on the layer would be compiled into the layer.
            layer._compiled_call_impl = _with_pause_check(layer._compiled_call_impl)

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Validate one media item's inputs (see `Tower.prepare`)."""
        return self.inner.prepare(inputs)

    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return each item's features (see `Tower.encode`)."""
        try:
            return self.inner.encode(items)
        except TorchDynamoException as e:
            if not self.layers:
                raise
            log.warning("%s cannot be compiled and runs uncompiled: %s", type(self.inner).__name__, e)
            CompiledTower.failures += 1
            for layer in self.layers:
                layer._compiled_call_impl = None
                layer.register_forward_pre_hook(between_layers)
            self.layers = []
            return self.inner.encode(items)


def allow_pauses(tower: Tower) -> None:
    """Allow passes of an uncompiled tower to be paused or ended between two layers."""
    for layer in layers_of(tower):
        layer.register_forward_pre_hook(between_layers)


def _with_pause_check(layer: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        between_layers()
        return layer(*args, **kwargs)

    return call


def layers_of(tower: Tower) -> Iterator[nn.Module]:
    """Yield the repeated layers of a tower."""
    for value in vars(tower).values():
        if isinstance(value, nn.Module):
            for part in value.modules():
                if isinstance(part, nn.ModuleList):
                    yield from part.children()
