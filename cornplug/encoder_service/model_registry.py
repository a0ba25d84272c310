"""Registry of loaded models, by name and identity. Models share a tower or projector with equal weights.

model A ─┐                       ┌─ projector of A
model B ─┼─ tower (tower fp, …) ─┤
model C ─┘                       └─ projector of B = C (projector fp, …)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from cornplug.encoder_service.formats.messages import ServedModel
from cornplug.encoder_service.model_loader import LoadedModel, WeightPlacement, load_model, read_checkpoint
from cornplug.errors import CheckpointError, ConfigError

__all__ = ["LoadedModel", "ModelRegistry", "Report"]

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _ModelTable:
    """Immutable set of loaded models. A reload replaces the whole object."""

    by_name: dict[str, LoadedModel]
    by_identity: dict[bytes, LoadedModel]

    @classmethod
    def from_models(cls, models: Iterable[LoadedModel]) -> _ModelTable:
        by_name = {loaded.served.name: loaded for loaded in models}
        by_identity: dict[bytes, LoadedModel] = {}
        # Models with the same identity produce the same embeddings, so the first model serves all of them.
        for loaded in by_name.values():
            for modality in loaded.served.modalities:
                if (part := loaded.part_for(modality.name)) is not None:
                    by_identity.setdefault(modality.identity, part)
        return cls(by_name, by_identity)


class ModelRegistry:
    """Registry of loaded models. Any thread may read it, and one thread at a time may change it."""

    def __init__(self, *, dtype: str, device: str, compile: bool = False) -> None:
        self._placement: Final = WeightPlacement(dtype=dtype, device=torch.device(device), compile=compile)
        # An invalid dtype raises an error here, before checkpoints are read, which may take minutes.
        self.dtype: Final = self._placement.torch_dtype
        self._models = _ModelTable({}, {})
        self._checks: list[Callable[[LoadedModel], None]] = []

    @classmethod
    def open(
        cls,
        models: Sequence[str],
        *,
        dtype: str,
        device: str,
        compile: bool = False,
        report: Report = lambda line: None,
    ) -> ModelRegistry:
        """Load every model, given as a folder or as a hub id in the local cache. `report` is called with a
        line for each step.

        Raises CheckpointError. Raises ConfigError for an unknown dtype, or for a model that is listed twice.
        """
        registry = cls(dtype=dtype, device=device, compile=compile)
        for name in models:
            registry.add(name, report)
        return registry

    @property
    def dtype_name(self) -> str:
        """Name of the towers' torch dtype, without the "torch." prefix."""
        return self._placement.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._placement.device

    def add(self, name: str, report: Report = lambda line: None) -> LoadedModel:
        """Load one more model. A tower or projector with equal weights is reused."""
        if name in self._models.by_name:
            raise ConfigError("--model", f"{name} is listed twice", "List each model once.")
        report(f"{name}: reading fingerprints")
        checkpoint, found = read_checkpoint(name, self.dtype_name)
        loaded = load_model(
            checkpoint, found, self._placement, reuse_from=self.loaded_models(), report=report
        )
        self._run_checks(loaded)
        self._models = _ModelTable.from_models((*self.loaded_models(), loaded))
        return loaded

    def on_load(self, check: Callable[[LoadedModel], None]) -> None:
        """Call `check` with each loaded model now, and with each later model before it is served.

        A model for which `check` raises CheckpointError is not served.
        """
        for loaded in self.loaded_models():
            check(loaded)
        self._checks.append(check)

    def load_changed(self, names: Sequence[str]) -> list[LoadedModel]:
        """Load the named models that have changed on disk and return them, without serving them yet.

        Raises the same CheckpointErrors as `open`, and CheckpointError("other_family").
        """
        out: list[LoadedModel] = []
        for name in names:
            old = self._models.by_name[name].served
            checkpoint, found = read_checkpoint(name, self.dtype_name)
            if found.family != old.family:
                raise CheckpointError(
                    f"{name} is now a {found.family} instead of a {old.family}. Restart the service.",
                    reason="other_family",
                )
            if (found.tower_fp, found.projector_fp, found.modalities) != (
                old.tower_fp, old.projector_fp, old.modalities,
            ):  # fmt: skip
                beside = (*self.loaded_models(), *out)
                loaded = load_model(
                    checkpoint, found, self._placement, reuse_from=beside, epoch=old.epoch + 1
                )
                self._run_checks(loaded)
                out.append(loaded)
        return out

    def replace(self, fresh: Iterable[LoadedModel]) -> list[LoadedModel]:
        """Replace the models that have the same names as the models in `fresh`, all at once. Return the
        replaced models."""
        new = {loaded.served.name: loaded for loaded in fresh}
        before = self.loaded_models()
        self._models = _ModelTable.from_models(new.get(loaded.served.name, loaded) for loaded in before)
        return [loaded for loaded in before if loaded.served.name in new]

    def served_models(self) -> tuple[ServedModel, ...]:
        """Return the description of every model, in the order of the command line."""
        return tuple(loaded.served for loaded in self.loaded_models())

    def loaded_models(self) -> tuple[LoadedModel, ...]:
        """Return every model with its towers and projectors, in the order of the command line."""
        return tuple(self._models.by_name.values())

    def find_by_identity(self, model_identity: bytes) -> LoadedModel | None:
        """Return the part of a model that computes embeddings with this identity, or None."""
        return self._models.by_identity.get(model_identity)

    def find_by_name(self, name: str) -> LoadedModel | None:
        """Return the model with this name on the command line, or None."""
        return self._models.by_name.get(name)

    def shares_features(self, model: LoadedModel) -> bool:
        """Return whether the output of the model's tower should be cached for other models.

        True if `ModelFamily.shares_features` is set for the model's family, or if another served model has
        the same tower but another projector.
        """
        return model.checkpoint.family.shares_features or any(
            other.tower is model.tower and other.projector is not model.projector
            for loaded in self.loaded_models()
            for other in loaded.iter_parts()
        )

    def summary(self) -> str:
        """Return a summary for the startup line, such as "2 models, 1 tower, 2 projectors"."""
        parts = [part for loaded in self.loaded_models() for part in loaded.iter_parts()]
        counts = (
            (len(self.loaded_models()), "model"),
            (len({id(part.tower) for part in parts}), "tower"),
            (len({id(part.projector) for part in parts}), "projector"),
        )
        return ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counts)

    def _run_checks(self, loaded: LoadedModel) -> None:
        for check in self._checks:
            check(loaded)
