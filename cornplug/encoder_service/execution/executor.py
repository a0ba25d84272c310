"""Executors, which run one batch on one device.

    EncodeBatch (items, cached features, wanted embeddings) ──BatchExecutor.run──> BatchResult (on the CPU)

`InProcessExecutor` computes in the caller's thread, and `replicas.ReplicaExecutor` in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from cornplug.encoder_service.models.registry import LoadedModel
from cornplug.encoder_service.towers.base import TowerItem
from cornplug.encoder_service.towers.tower_turn import TowerPass, TowerTurn

_LONG_TOKENS: Final = 16_384
"""Number of tokens above which batches on a GPU wait for their kernels after each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatch:
    """One batch, which runs the tower at most once, then each projector once."""

    items: tuple[TowerItem, ...]
    """Media to compute, all different, for one tower."""
    features: tuple[torch.Tensor | None, ...]
    """Cached features of each item, on the CPU. None if the tower runs for it."""
    wanted: tuple[tuple[LoadedModel, int], ...]
    """Embeddings to compute: a model, and the index of an item. All models share one tower."""
    keep: bool
    """Whether to return `BatchResult.features`."""
    urgent: bool = False
    """Whether the batch may overtake a running batch between two layers. One such batch runs at a time."""
    share: float = 0.0
    """Fraction of the time that this batch keeps while urgent batches run."""
    abandoned: Callable[[], bool] = bool
    """Return whether no request waits for the batch any more. It then ends between two layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Tensors of a batch. Those returned by `BatchExecutor.run` are contiguous and on the CPU."""

    features: dict[int, torch.Tensor]
    """Features by index of the items that the tower ran for. Empty unless `EncodeBatch.keep` is set."""
    embeddings: tuple[torch.Tensor, ...]
    """Embeddings in the order of `EncodeBatch.wanted`."""
    paused_s: float = 0.0
    """Seconds during which urgent batches ran instead."""


class BatchExecutor(Protocol):
    """Executor of batches on one device. Thread-safe."""

    @property
    def lanes(self) -> int:
        """Number of batches to hand over together: 2 if the inputs of one batch are copied while another
        runs."""

    def ready(self) -> bool:
        """Return whether `run` would start immediately, or after the running batch."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` until `ready`, and return its value."""

    def run(self, batch: EncodeBatch) -> BatchResult:
        """Compute a batch.

        Raises ReplicaLost if the computing process has died, PassAbandoned if the batch was abandoned, and
        any error of the tower.
        """

    def load(self, models: Sequence[LoadedModel]) -> None:
        """Load more models. If it raises CheckpointError, nothing has changed."""

    def drop(self, models: Sequence[LoadedModel]) -> None:
        """Free the memory of models that no batch will use any more."""

    def close(self) -> None:
        """Close the executor. Running batches may be lost."""


class InProcessExecutor:
    """Executor in the caller's thread, one batch at a time. Urgent batches run between the layers of others.

    On CUDA it has two lanes and three streams. While one batch runs, the results of the previous batch are
    copied to pinned memory, and the inputs of the next batch from there. At most two are on the device at a
    time.

        inputs     [1][2]      [3]
        compute       [1  ][2  ][3  ]
        results            [1]  [2]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._turn = TowerTurn()
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if self._cuda else None
        """Streams for inputs and results."""

    @property
    def lanes(self) -> int:
        return 2 if self._cuda else 1

    def ready(self) -> bool:
        return True

    def wait_ready(self, timeout_s: float) -> bool:
        return True

    def load(self, models: Sequence[LoadedModel]) -> None:
        """Do nothing, because a `LoadedModel` of this process contains its weights."""

    def drop(self, models: Sequence[LoadedModel]) -> None:
        """Do nothing, because weights are freed with the last batch that uses them."""

    def close(self) -> None:
        """Do nothing."""

    def run(self, batch: EncodeBatch) -> BatchResult:
        if self._streams is None:
            with self._taken(batch) as turn:
                return replace(_to_host(compute(batch)), paused_s=turn.paused_s)
        inputs, results = self._streams
        with torch.cuda.stream(inputs):
            on_device = replace(batch, items=tuple(_to_device(item, self._device) for item in batch.items))
            copied = inputs.record_event()
        # A new thread uses device 0, and a kernel may query the current device.
        with self._taken(batch) as turn, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            # Their memory was allocated on another stream, and must not be reused while this stream reads it.
            for tensor in (t for item in on_device.items for t in item.tensors if t.is_cuda):
                tensor.record_stream(stream)
            made = compute(on_device)
            computed = stream.record_event()
        # Outside the lock: the next batch starts on the device when this one's kernels end.
        with torch.cuda.stream(results):
            results.wait_event(computed)
            on_host = _to_host(made)
            # A thread that waits for a blocking event sleeps. With another event it would keep a core busy.
            copied_back = torch.cuda.Event(blocking=True)
            copied_back.record(results)
        # `made` must exist until here, because its memory could be reused by the computing stream.
        copied_back.synchronize()
        return replace(on_host, paused_s=turn.paused_s)

    @contextmanager
    def _taken(self, batch: EncodeBatch) -> Iterator[TowerPass]:
        long = self._cuda and sum(item.tokens for item in batch.items) > _LONG_TOKENS

        def abandoned() -> bool:
            if long:
                # Otherwise all its kernels would be queued within milliseconds, before the urgent ones.
                layer = torch.cuda.Event(blocking=True)
                layer.record(torch.cuda.current_stream(self._device))
                layer.synchronize()
            return batch.abandoned()

        with self._turn.taken(urgent=batch.urgent, share=batch.share, abandoned=abandoned) as turn:
            yield turn


@torch.inference_mode()
def compute(batch: EncodeBatch) -> BatchResult:
    """Run one batch on the device that has its models' weights. The result stays there.

    On CUDA it is valid only for the current stream, until that is synchronized.
    """
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
    return BatchResult(
        embeddings=tuple(wanted),
        features={i: _present(features[i]) for i in missing} if batch.keep else {},
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
    """Return the item with its floats on the device. Integers, which towers read as shapes, stay on the
    CPU."""
    return replace(
        item,
        tensors=tuple(
            t.pin_memory().to(device, non_blocking=True) if t.is_floating_point() else t for t in item.tensors
        ),
    )


@torch.inference_mode()
def _to_host(made: BatchResult) -> BatchResult:
    """Return the same tensors, contiguous on the CPU. From a GPU they are copied to pinned memory, on the
    current stream."""
    return BatchResult(
        embeddings=tuple(map(_on_host, made.embeddings)),
        features={i: _on_host(features) for i, features in made.features.items()},
    )


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu").contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
