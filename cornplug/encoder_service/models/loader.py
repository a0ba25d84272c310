"""Loads a model from its checkpoint: fingerprints first, then the halves that no loaded model has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import torch

from cornplug import identity
from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.models.torch_compile import CompiledTower
from cornplug.encoder_service.towers.base import Projector, Tower
from cornplug.encoder_service.towers.input_checks import float_dtype
from cornplug.encoder_service.wire.messages import ServedModality, ServedModel
from cornplug.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedModel:
    """A loaded model. `tower` and `projector` may be shared with other models."""

    served: ServedModel
    checkpoint: Checkpoint
    tower: Tower
    projector: Projector
    tower_spec_fp: bytes
    """32 bytes: a digest of everything but weights and inputs that changes features."""
    dtype: torch.dtype
    device: torch.device
    """Of the weights; "meta" where replicas have them."""

    @property
    def tower_key(self) -> tuple[bytes, bytes]:
        """Models of equal key share a tower."""
        return self.served.tower_fp, self.tower_spec_fp

    @property
    def projector_key(self) -> tuple[bytes, bytes]:
        """Models of equal key share a projector. The spec is part of it, with its activation."""
        return self.served.projector_fp, self.served.spec_fp


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlacement:
    """Dtype and device of weights. On the device "meta" a tower checks inputs, and has no weights."""

    dtype: str
    """torch's name without "torch."."""
    device: torch.device
    compile: bool = False
    """Whether towers are compiled (`CompiledTower`)."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises ConfigError for a dtype that no tower runs in."""
        return float_dtype(self.dtype)


def read(name: str, dtype: str) -> tuple[Checkpoint, ServedModel]:
    """A checkpoint as it is on disk now, and the model it would be served as, with `hidden_size` 0.

    Raises CheckpointError.
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


def load(
    checkpoint: Checkpoint,
    served: ServedModel,
    place: WeightPlacement,
    *,
    beside: Iterable[LoadedModel] = (),
    epoch: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load the model that `read` found, sharing equal halves with the models of `beside`.

    Raises CheckpointError: "changed" when the folder has changed since `read`.
    """
    dtype, others = place.torch_dtype, tuple(beside)
    architecture = towers.architecture(checkpoint.family)
    spec_fp = identity.spec_fingerprint(checkpoint.tower_spec(served.dtype))
    tower_key, projector_key = (served.tower_fp, spec_fp), (served.projector_fp, served.spec_fp)
    short = served.tower_fp.hex()[:12]
    tower = next((other.tower for other in others if other.tower_key == tower_key), None)
    if tower is None:
        report(f"{served.name}: loading tower {short} as {served.dtype}")
        tower = architecture.load_tower(checkpoint, dtype, place.device)
        tower = CompiledTower(tower) if place.compile else tower
    else:
        report(f"{served.name}: tower {short} is loaded already")
    projector = next((other.projector for other in others if other.projector_key == projector_key), None)
    if projector is None:
        projector = architecture.load_projector(checkpoint, dtype, place.device)
    # Digests are kept, so this costs a look at the files: weights that were written over between
    # fingerprint and loading would be served under the name of those before.
    if read(served.name, served.dtype)[1] != served:
        raise CheckpointError(f"{served.name} changed while it was loaded. Try again.", reason="changed")
    return LoadedModel(
        served=msgspec.structs.replace(served, hidden_size=projector.hidden_size, epoch=epoch),
        checkpoint=checkpoint,
        tower=tower,
        projector=projector,
        tower_spec_fp=spec_fp,
        dtype=dtype,
        device=place.device,
    )
