"""What is loaded: models by identity; one tower for all that have equal weights.

model A ─┐                       ┌─ projector of A
model B ─┼─ tower (tower fp, …) ─┤
model C ─┘                       └─ projector of B = C (projector fp, …)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cornplug import identity
from cornplug.checkpoint import Checkpoint
from cornplug.encoder_service import towers
from cornplug.encoder_service.protocol import ServedModality, ServedModel
from cornplug.encoder_service.towers.base import Projector, Tower
from cornplug.encoder_service.towers.tensors import float_dtype
from cornplug.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loaded:
    """One model, ready. `tower` and `projector` may be other models' too."""

    served: ServedModel
    checkpoint: Checkpoint
    tower: Tower
    projector: Projector
    tower_spec_fp: bytes
    """32 bytes: everything but weights and inputs that changes features."""
    dtype: torch.dtype


class Registry:
    """Loads once, then only answers. Safe to read from several threads."""

    def __init__(self, *, dtype: str, device: str) -> None:
        self.dtype_name: Final = dtype
        self._dtype = float_dtype(dtype)
        self.device: Final = torch.device(device)
        self._by_name: dict[str, Loaded] = {}
        self._by_identity: dict[bytes, Loaded] = {}
        self._towers: dict[tuple[bytes, bytes], Tower] = {}
        self._projectors: dict[tuple[bytes, bytes], Projector] = {}

    @classmethod
    def open(
        cls,
        models: Sequence[str],
        *,
        dtype: str,
        device: str,
        report: Callable[[str], None] = lambda line: None,
    ) -> Registry:
        """Load every model (directory, or hub id in the local cache). `report` gets a line for each step.

        Raises CheckpointError, or ConfigError for an unknown dtype or a model named twice.
        """
        registry = cls(dtype=dtype, device=device)
        for name in models:
            registry.add(name, report)
        return registry

    def add(self, name: str, report: Callable[[str], None] = lambda line: None) -> Loaded:
        """Load one more model, reusing a tower or projector with equal weights."""
        if name in self._by_name:
            raise ConfigError("--model", f"{name} is named twice", "Name each model once.")
        report(f"{name}: reading fingerprints")
        checkpoint = Checkpoint.open(name)
        family = checkpoint.family
        ids = checkpoint.identity(self.dtype_name)
        spec_fp = identity.spec_fingerprint(checkpoint.tower_spec(self.dtype_name))
        architecture = towers.architecture(family)
        tower = self._towers.get((ids.tower_fp, spec_fp))
        if tower is None:
            report(f"{name}: loading tower {ids.tower_fp.hex()[:12]} as {self.dtype_name}")
            tower = architecture.load_tower(checkpoint, self._dtype, self.device)
            self._towers[ids.tower_fp, spec_fp] = tower
        else:
            report(f"{name}: tower {ids.tower_fp.hex()[:12]} is loaded already")
        # The whole spec: equal weights behind another activation are another projector.
        projector = self._projectors.get((ids.projector_fp, ids.spec_fp))
        if projector is None:
            projector = architecture.load_projector(checkpoint, self._dtype, self.device)
            self._projectors[ids.projector_fp, ids.spec_fp] = projector
        loaded = Loaded(
            served=ServedModel(
                name=name,
                family=family.name,
                identity=ids.identity,
                tower_fp=ids.tower_fp,
                projector_fp=ids.projector_fp,
                spec_fp=ids.spec_fp,
                dtype=self.dtype_name,
                hidden_size=projector.hidden_size,
                modalities=self._modalities(checkpoint),
            ),
            checkpoint=checkpoint,
            tower=tower,
            projector=projector,
            tower_spec_fp=spec_fp,
            dtype=self._dtype,
        )
        self._by_name[name] = loaded
        # Of models with one identity any gives the same embedding: the first serves them all.
        for modality in loaded.served.modalities:
            self._by_identity.setdefault(modality.identity, loaded)
        return loaded

    def _modalities(self, checkpoint: Checkpoint) -> tuple[ServedModality, ...]:
        family = checkpoint.family
        each = ((name, checkpoint.identity(self.dtype_name, modality=name)) for name in family.inputs)
        return tuple(ServedModality(name=m, identity=ids.identity, spec_fp=ids.spec_fp) for m, ids in each)

    def served(self) -> tuple[ServedModel, ...]:
        """Every model, in the order given."""
        return tuple(loaded.served for loaded in self._by_name.values())

    def loaded(self) -> tuple[Loaded, ...]:
        """Every model with its halves, in the order given."""
        return tuple(self._by_name.values())

    def by_identity(self, model_identity: bytes) -> Loaded | None:
        """The model that makes these embeddings, of whichever modality, whatever it is called."""
        return self._by_identity.get(model_identity)

    def by_name(self, name: str) -> Loaded | None:
        """The model named so on the command line."""
        return self._by_name.get(name)

    def summary(self) -> str:
        """For the start-up line: "2 models, 1 tower, 2 projectors"."""
        counts = (
            (len(self._by_name), "model"), (len(self._towers), "tower"), (len(self._projectors), "projector"),
        )  # fmt: skip
        return ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counts)
