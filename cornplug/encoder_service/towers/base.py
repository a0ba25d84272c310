"""Interface of every tower: validated inputs -> features -> embeddings.

    wire tensors ──prepare──> TowerItem ──encode──> features ──project──> embedding
                              (CPU)                 (rows, width)         (rows, hidden)
                                  └─ shared by models ─┘       └─ per model ─┘

A family names its `TowerArchitecture` in `ModelFamily.tower_class`; several may share one.

Modules are built on the meta device, and `fill_weights` reads only the tensors that they have. Neither an LLM
nor unused layers take memory.
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
"""Input of a tower: bytes from another process, or a tensor that this process created."""


def fill_weights(
    module: nn.Module,
    located: dict[str, tuple[Path, str]],
    *,
    dtype: torch.dtype,
    device: torch.device,
    unused: Callable[[str], bool] = lambda name: False,
) -> None:
    """Load every parameter of `module` from the location that `Checkpoint.locate` found.

    Args:
        located: normalised name -> (file, name in the file).
        unused: names in the checkpoint that this module does not need (layers past the cut).

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
    """Loader of the two parts of one family. Both methods raise CheckpointError, which names the missing or
    surplus tensors."""

    @staticmethod
    def load_tower(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Tower: ...

    @staticmethod
    def load_projector(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Projector: ...


def _digest_of(tensor: torch.Tensor) -> bytes:
    return array_digest(dtype_name(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor))
