"""Common interface of all towers: validated inputs -> features -> embeddings.

    wire tensors ──prepare──> TowerItem ──encode──> features ──project──> embedding
                              (CPU)                 (rows, width)         (rows, hidden)
                                  └─ shared by models ─┘       └─ per model ─┘

`ModelFamily.tower_class` names the `TowerArchitecture` of a family. Several families may share one.

Modules are created on the meta device, and `fill_weights` reads only the tensors that they contain. The LLM
and unused layers therefore take no memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.encoder_service.wire.messages import WireTensor
from cornplug.encoder_service.wire.tensors import dtype_name, raw_bytes
from cornplug.errors import CheckpointError
from cornplug.identity import array_digest

_NAMED = 5
TowerInput: TypeAlias = WireTensor | torch.Tensor
"""Input of a tower: a tensor as bytes from another process, or a tensor that this process created."""


def fill_weights(
    module: nn.Module,
    located: dict[str, tuple[Path, str]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Load every parameter of `module` from the locations that `Checkpoint.locate` returned.

    Args:
        located: File and name in the file of each tensor, by normalised name.
        unused: Returns whether a tensor in the checkpoint is not needed by this module (layers after the
        cut).

    Raises CheckpointError: "bad_tensors" with the names of tensors that are missing, unknown, quantised or of
    another shape, or "unreadable" for a damaged file.
    """
    wanted = module.state_dict()
    missing = sorted(wanted.keys() - located.keys())
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}", reason="bad_tensors")
    unexpected = sorted(name for name in located.keys() - wanted.keys() if not unused(name))
    if unexpected:
        raise CheckpointError(
            f"the checkpoint has unknown tensors: {_some(unexpected)}", reason="bad_tensors"
        )
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name in wanted:
        file, stored = located[name]
        by_file[file].append((name, stored))
    loaded: dict[str, torch.Tensor] = {}
    for file, names in by_file.items():
        loaded.update(_read(file, names, dtype, device))
    wrong = [
        f"{name} {tuple(loaded[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in wanted
        if loaded[name].shape != wanted[name].shape
    ]
    if wrong:
        raise CheckpointError(f"shapes do not match config.json: {_some(wrong)}", reason="bad_tensors")
    module.load_state_dict(loaded, assign=True)
    module.eval().requires_grad_(False)


def _read(
    file: Path, names: list[tuple[str, str]], dtype: torch.dtype, device: torch.device
) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    try:
        with safe_open(file, framework="pt") as tensors:
            for name, stored in names:
                tensor = tensors.get_tensor(stored)
                if not tensor.is_floating_point():
                    raise CheckpointError(
                        f"{stored} is {tensor.dtype}: quantised towers and projectors are not supported",
                        reason="bad_tensors",
                    )
                out[name] = tensor.to(device=device, dtype=dtype, copy=True)
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"cannot read {file}: {e}", reason="unreadable") from e
    return out


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerItem:
    """Validated inputs of one medium, in the tower's dtype, on the CPU."""

    tensors: tuple[torch.Tensor, ...]
    tokens: int
    """Number of rows that attention processes for this medium. The size of a batch is limited in tokens."""
    geometry: tuple[int, ...] = ()
    """Properties of the medium that the projector needs besides its features (tiles, image size)."""
    names_digest: bytes | None = None
    """Digest of the tensors' names, or None if all media of a tower have the same names."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests that identify this item, for `identity.feature_key`: `names_digest`, if set, and
        `identity.array_digest` of each tensor.

        Each access computes the digests, which reads all bytes of the tensors. They are needed only if
        features are shared.
        """
        names = () if self.names_digest is None else (self.names_digest,)
        return (*names, *map(_digest_of, self.tensors))


class Tower(Protocol):
    """Part of the model up to the cut between tower and projector. Only one thread calls it, except
    `prepare`.

    Each replica process loads the tower from the checkpoint (`replicas.worker_main`).
    """

    def prepare(self, inputs: Mapping[str, TowerInput]) -> TowerItem:
        """Validate one medium's inputs. Thread-safe.

        The item may share the memory of tensors in `inputs`. Raises EncoderRefused("bad_input") with the name
        of a field that is missing, unknown, not finite, or of the wrong dtype or shape.
        """

    def encode(self, items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return each item's features, of shape (rows, width). They do not depend on the other items."""


class Projector(Protocol):
    """Part of the model after the cut, which computes embeddings from features."""

    @property
    def hidden_size(self) -> int:
        """Width of an embedding row."""

    def project(self, features: Sequence[torch.Tensor], items: Sequence[TowerItem]) -> list[torch.Tensor]:
        """Return the embeddings, each contiguous and of shape (rows, hidden_size). `items` has the media that
        `features` were computed from."""


class TowerArchitecture(Protocol):
    """Loader of a family's towers and projectors. Both methods raise CheckpointError with the names of
    missing or unknown tensors."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower: ...

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Projector: ...


def _digest_of(tensor: torch.Tensor) -> bytes:
    return array_digest(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))
