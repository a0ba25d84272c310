"""The interface of every tower: validated inputs -> features -> embeddings.

    wire tensors ──prepare──> TowerItem ──encode──> features ──project──> embedding
                              (CPU)                 (rows, width)         (rows, hidden)
                                  └─ shared by models ─┘       └─ per model ─┘

A family names its `TowerArchitecture` in `ModelFamily.tower_class`; several may share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.wire.messages import WireTensor
from cornplug.encoder_service.wire.tensors import dtype_name, raw_bytes
from cornplug.identity import array_digest

TowerInput: TypeAlias = WireTensor | torch.Tensor
"""One input of a tower: as bytes from another process, or a tensor that this process made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerItem:
    """One medium, checked, in the tower's dtype, on the CPU."""

    tensors: tuple[torch.Tensor, ...]
    tokens: int
    """Rows that attention sees: the unit of a batch's budget."""
    geometry: tuple[int, ...] = ()
    """Facts of the medium that the projector needs besides its features (tiles, image size)."""
    names_digest: bytes | None = None
    """Of the tensors' names, where these differ between media of one tower."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """`names_digest`, and `identity.array_digest` of each of `tensors`, for `identity.feature_key`.

        Computed by each call, and only where features are shared: it reads every byte.
        """
        names = () if self.names_digest is None else (self.names_digest,)
        return (*names, *map(_digest_of, self.tensors))


class Tower(Protocol):
    """Weights up to the cut. Called by one thread only, except `prepare`.

    Each replica, as a process, loads it from the checkpoint (`replicas.worker_main`).
    """

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Check one medium's inputs. Thread-safe.

        The item may share the memory of tensors that it was given. Raises EncoderRefused("bad_input") that
        names the field: missing, unknown, of a wrong dtype or shape, or not finite.
        """

    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Features of each item, shape (rows, width), equal to those of each item alone."""


class Projector(Protocol):
    """Weights after the cut."""

    @property
    def hidden_size(self) -> int:
        """Width of an embedding row."""

    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Embeddings, shape (rows, hidden_size) each, contiguous. `items`: the media of `features`."""


class TowerArchitecture(Protocol):
    """Loads the two halves of one family. Both raise CheckpointError that names tensors."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower: ...

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Projector: ...


def _digest_of(tensor: torch.Tensor) -> bytes:
    return array_digest(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))
