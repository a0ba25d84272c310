"""`GET /v1/models`: what is served, by what it is computed from."""

from __future__ import annotations

import pydantic

from cornplug.encoder_service.registry import Loaded, Registry
from cornplug.families import Modality


class ModelRow(pydantic.BaseModel):
    """One served model; fingerprints in hex. An embedding of it has shape (rows, hidden_size)."""

    name: str
    family: str
    modalities: list[Modality]
    identity: str
    tower_fp: str
    projector_fp: str
    spec_fp: str
    dtype: str
    hidden_size: int


class ModelList(pydantic.BaseModel):
    models: list[ModelRow]


class Status(pydantic.BaseModel):
    status: str = pydantic.Field(examples=["ok"])


def listed(registry: Registry) -> ModelList:
    """Every model, in the order given at start."""
    return ModelList(models=[_row(loaded) for loaded in registry.loaded()])


def _row(loaded: Loaded) -> ModelRow:
    served = loaded.served
    return ModelRow(
        name=served.name,
        family=served.family,
        modalities=list(loaded.checkpoint.family.inputs),
        identity=served.identity.hex(),
        tower_fp=served.tower_fp.hex(),
        projector_fp=served.projector_fp.hex(),
        spec_fp=served.spec_fp.hex(),
        dtype=served.dtype,
        hidden_size=served.hidden_size,
    )
