"""One batch on one device: the seam between the queue and whatever computes.

    Task (items, features kept already, who wants what) ──Executor.run──> Made (on the CPU)

`InProcessExecutor` computes in the caller's thread; `replica.Replica` hands the task to a process of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.towers.base import TowerItem


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatch:
    """One batch: at most one tower pass, then each projector once."""

    items: tuple[TowerItem, ...]
    """Distinct media of one tower."""
    features: tuple[torch.Tensor | None, ...]
    """For each item what is kept of it, on the CPU; None: the tower runs for it."""
    wanted: tuple[tuple[LoadedModel, int], ...]
    """The embeddings to make: a model, and the index of an item. All models have one tower."""
    keep: bool
    """Whether `BatchResult.features` is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """What a task gave: contiguous tensors on the CPU."""

    features: dict[int, torch.Tensor]
    """By index, of the items that the tower ran for; empty unless the task says `keep`."""
    embeddings: tuple[torch.Tensor, ...]
    """In the order of `EncodeBatch.wanted`."""


class BatchExecutor(Protocol):
    """Computes tasks on one device. Thread-safe."""

    @property
    def lanes(self) -> int:
        """Tasks worth holding at once: 2 where inputs travel to a device while the last task runs."""

    def ready(self) -> bool:
        """Whether `run` would begin now, or once the task before has ended."""

    def wait_ready(self, timeout_s: float) -> bool:
        """`ready`, waited for."""

    def run(self, batch: EncodeBatch) -> BatchResult:
        """Compute. Raises ReplicaLost when what computes has died, and whatever the tower fails with."""

    def load(self, models: Sequence[LoadedModel]) -> None:
        """Make these ready beside what is loaded. Raises CheckpointError; then nothing has changed."""

    def drop(self, models: Sequence[LoadedModel]) -> None:
        """No task will want these any more: free their memory."""

    def close(self) -> None:
        """End it. Tasks under way may be lost."""


class InProcessExecutor:
    """Computes in the caller's thread, one task at a time.

    On CUDA there are two lanes: while one task computes, the next one's inputs go to the
    device from pinned memory on a stream of their own. So no more than two are ever there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._computing = threading.Lock()
        self._copy_stream = torch.cuda.Stream(device) if self._cuda else None

    @property
    def lanes(self) -> int:
        return 2 if self._cuda else 1

    def ready(self) -> bool:
        return True

    def wait_ready(self, timeout_s: float) -> bool:
        return True

    def load(self, models: Sequence[LoadedModel]) -> None:
        """Nothing to do: a `LoadedModel` of this process carries its weights."""

    def drop(self, models: Sequence[LoadedModel]) -> None:
        """Nothing to do: weights go with the last task that has them."""

    def close(self) -> None:
        """Nothing to end."""

    def run(self, batch: EncodeBatch) -> BatchResult:
        if self._copy_stream is None:
            with self._computing:
                return compute(batch)
        with torch.cuda.stream(self._copy_stream):
            on_device = replace(batch, items=tuple(_to_device(item, self._device) for item in batch.items))
            copied = self._copy_stream.record_event()
        # A thread begins on device 0, and a kernel may ask which one is current.
        with self._computing, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            # Their memory was taken on another stream, and may not be given away while this one reads.
            for tensor in (t for item in on_device.items for t in item.tensors if t.is_cuda):
                tensor.record_stream(stream)
            return compute(on_device)


@torch.inference_mode()
def compute(batch: EncodeBatch) -> BatchResult:
    """Run one task here and now, wherever its models' weights are."""
    missing = [i for i, kept in enumerate(batch.features) if kept is None]
    features = list(batch.features)
    if missing:
        tower = batch.wanted[0][0].tower
        features_of_missing = tower.encode([batch.items[i] for i in missing])
        for i, new in zip(missing, features_of_missing, strict=True):
            features[i] = new
    wanted: list[torch.Tensor] = [torch.empty(0)] * len(batch.wanted)
    for positions in _by_projector(batch.wanted):
        indices = [batch.wanted[position][1] for position in positions]
        projector = batch.wanted[positions[0]][0].projector
        out = projector.project([_present(features[i]) for i in indices], [batch.items[i] for i in indices])
        for position, embedding in zip(positions, out, strict=True):
            wanted[position] = embedding
    keep = missing if batch.keep else []
    # On the CPU before the next task begins, so that a GPU's memory is free again.
    host = _to_host([*wanted, *(_present(features[i]) for i in keep)])
    return BatchResult(
        embeddings=tuple(host[: len(wanted)]), features=dict(zip(keep, host[len(wanted) :], strict=True))
    )


def _by_projector(wanted: Sequence[tuple[LoadedModel, int]]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for position, (model, _) in enumerate(wanted):
        groups.setdefault(id(model.projector), []).append(position)
    return list(groups.values())


def _present(features: torch.Tensor | None) -> torch.Tensor:
    assert features is not None
    return features


def _to_device(item: TowerItem, device: torch.device) -> TowerItem:
    """Its numbers on the device; integers, which towers read as shapes, stay on the CPU."""
    return replace(
        item,
        tensors=tuple(
            t.pin_memory().to(device, non_blocking=True) if t.is_floating_point() else t for t in item.tensors
        ),
    )


def _to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous on the CPU; from a GPU by one wait for all, through pinned memory."""
    if not any(t.is_cuda for t in tensors):
        return [t.to("cpu").contiguous() for t in tensors]
    out = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors]
    torch.cuda.current_stream(next(t.device for t in tensors if t.is_cuda)).synchronize()
    return out
