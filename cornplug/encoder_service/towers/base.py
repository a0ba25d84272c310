"""Interface of every tower: validated inputs -> features -> embeddings.

    wire tensors ──prepare──> TowerItem ──encode──> features ──project──> embedding
                              (CPU)                 (rows, width)         (rows, hidden)
                                  └─ shared by models ─┘       └─ per model ─┘

A family names its `TowerArchitecture` in `ModelFamily.tower_class`. Several families may share one.
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
"""One input of a tower: bytes from another process, or a tensor that this process created."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerItem:
    """One validated medium in the tower's dtype, on the CPU."""

    tensors: tuple[torch.Tensor, ...]
    tokens: int
    """Number of rows that attention processes, the unit of a batch's budget."""
    geometry: tuple[int, ...] = ()
    """Properties of the medium that the projector needs besides its features (tiles, image size)."""
    names_digest: bytes | None = None
    """Digest of the tensors' names, if these differ between media of one tower."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """`names_digest`, and `identity.array_digest` of each of `tensors`, for `identity.feature_key`.

        Every access computes them, which reads every byte. They are used only if features are shared.
        """
        names = () if self.names_digest is None else (self.names_digest,)
        return (*names, *map(_digest_of, self.tensors))


class Tower(Protocol):
    """Weights up to the cut. Called by one thread only, except `prepare`.

    Each replica process loads it from the checkpoint (`replicas.worker_main`).
    """

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Validate one medium's inputs. Thread-safe.

        The item may share the memory of the given tensors. Raises EncoderRefused("bad_input") that names a
        field that is missing, unknown, not finite, or of the wrong dtype or shape.
        """

    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return each item's features, (rows, width), equal to those of the item alone."""


class Projector(Protocol):
    """Weights after the cut."""

    @property
    def hidden_size(self) -> int:
        """Width of an embedding row."""

    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return the embeddings, shape (rows, hidden_size) each, contiguous. `items` are the media of
        `features`."""


class TowerArchitecture(Protocol):
    """Loader of the two parts of one family. Both methods raise CheckpointError that names tensors."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower: ...

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Projector: ...


def _digest_of(tensor: torch.Tensor) -> bytes:
    return array_digest(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))
