"""Executors, which run batches on a device.

    EncodeBatch (items, cached features, wanted embeddings) ──BatchExecutor.run──> BatchResult (on the CPU)

`InProcessExecutor` runs batches in the caller's thread, and `replica.ReplicaExecutor` in another process.

`WeightReloader` reloads replaced weights without a restart, in all executors or in none.

    read fingerprints ─> load changed models ─> every executor ─> one assignment
                              (a failure up to here changes nothing)    └─> old models freed
                                                                            when unused

Requests in progress complete with the weights with which they started. Their results are saved under the keys
of those weights.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch

from cornplug.encoder_service.formats.messages import ServedModel
from cornplug.encoder_service.model_registry import LoadedModel, ModelRegistry
from cornplug.encoder_service.towers.base import PassScheduler, TowerItem, TowerPass
from cornplug.errors import CheckpointError, EncoderRefused

_LONG_TOKENS: Final = 16_384
"""Number of tokens above which a batch on a GPU waits for its kernels after each layer."""
MAX_RETIRED_S: Final = 600.0
"""Maximum seconds for which replaced weights stay loaded for requests that started before the reload."""
_POLL_S: Final = 0.1
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatch:
    """One batch. It needs at most one pass of the tower, and then one pass of each projector."""

    items: tuple[TowerItem, ...]
    """Media items to compute, all different, for one tower."""
    features: tuple[torch.Tensor | None, ...]
    """Cached features of each item, on the CPU. None for an item for which the tower must run."""
    targets: tuple[tuple[LoadedModel, int], ...]
    """Embeddings to compute, as (model, index of an item). All models share one tower."""
    returns_features: bool
    """Whether to return `BatchResult.features`."""
    urgent: bool = False
    """Whether the batch may pause a running batch between two layers. Only one urgent batch runs at a
    time."""
    share: float = 0.0
    """Fraction of the device's time that this batch gets while urgent batches run."""
    is_abandoned: Callable[[], bool] = bool
    """Function that returns whether no request waits for the batch any more. If so, the batch ends between
    two layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """Output of a batch. `BatchExecutor.run` returns contiguous tensors on the CPU."""

    features: dict[int, torch.Tensor]
    """Features of the items for which the tower ran, by index. Empty unless `EncodeBatch.returns_features` is
    set."""
    embeddings: tuple[torch.Tensor, ...]
    """Embeddings in the order of `EncodeBatch.targets`."""
    waited_s: float = 0.0
    """Seconds for which the batch waited for the device before its first layer."""
    paused_s: float = 0.0
    """Seconds for which the batch was paused while urgent batches ran."""


class BatchExecutor(Protocol):
    """Interface of objects that run batches on one device. Thread-safe."""

    @property
    def lanes(self) -> int:
        """Number of concurrent calls of `run`. The number is 2 if the inputs of one batch are copied while
        another batch runs."""

    def is_ready(self) -> bool:
        """Return whether `run` would start a batch immediately or after the running batch."""

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until `is_ready` returns True, for at most `timeout_s` seconds, and return its value."""

    def run(self, batch: EncodeBatch) -> BatchResult:
        """Run a batch and return its result.

        Raises ReplicaLost if the computing process has died, PassAbandoned if the batch was abandoned, or any
        error of the tower.
        """

    def load(self, models: Sequence[LoadedModel]) -> None:
        """Load additional models. If this raises CheckpointError, the executor is unchanged."""

    def unload(self, models: Sequence[LoadedModel]) -> None:
        """Free the memory of models that no later batch will use."""

    def close(self) -> None:
        """Close the executor. Running batches may be lost."""


class InProcessExecutor:
    """Runs one batch at a time in the caller's thread. Urgent batches run between the layers of other
    batches.

    On CUDA it has two lanes and three streams. While one batch runs, the results of the previous batch are
    copied to pinned memory, and the inputs of the next batch are copied from pinned memory. At most two
    batches are on the device at a time.

        inputs     [1][2]      [3]
        compute       [1  ][2  ][3  ]
        results            [1]  [2]
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self._scheduler = PassScheduler()
        self._streams = (torch.cuda.Stream(device), torch.cuda.Stream(device)) if self._cuda else None
        """CUDA streams that copy inputs to the device and results from it. None on a CPU."""

    @property
    def lanes(self) -> int:
        return 2 if self._cuda else 1

    def is_ready(self) -> bool:
        return True

    def wait_ready(self, timeout_s: float) -> bool:
        return True

    def load(self, models: Sequence[LoadedModel]) -> None:
        """Do nothing, because a `LoadedModel` in this process already has its weights."""

    def unload(self, models: Sequence[LoadedModel]) -> None:
        """Do nothing, because the memory of weights is freed with the last batch that uses them."""

    def close(self) -> None:
        """Do nothing."""

    def run(self, batch: EncodeBatch) -> BatchResult:
        if self._streams is None:
            with self._acquire_device(batch) as turn:
                on_host = _result_to_host(compute_batch(batch))
            return replace(on_host, waited_s=turn.waited_s, paused_s=turn.paused_s)
        inputs, results = self._streams
        with torch.cuda.stream(inputs):
            on_device = replace(
                batch, items=tuple(_item_to_device(item, self._device) for item in batch.items)
            )
            copied = inputs.record_event()
        # Set the device. In a new thread, the device is 0 by default, and a kernel may query it.
        with self._acquire_device(batch) as turn, torch.cuda.device(self._device):
            stream = torch.cuda.current_stream(self._device)
            stream.wait_event(copied)
            # The inputs were allocated on another stream. Keep their memory until this stream has read them.
            for tensor in (t for item in on_device.items for t in item.tensors if t.is_cuda):
                tensor.record_stream(stream)
            made = compute_batch(on_device)
            computed = stream.record_event()
        # The lock is released here. The next batch starts on the device when these kernels end.
        with torch.cuda.stream(results):
            results.wait_event(computed)
            on_host = _result_to_host(made)
            # Use a blocking event. A thread that waits for any other event keeps a core busy.
            copied_back = torch.cuda.Event(blocking=True)
            copied_back.record(results)
        # Keep `made` alive until here. Otherwise the computing stream could reuse its memory.
        copied_back.synchronize()
        return replace(on_host, waited_s=turn.waited_s, paused_s=turn.paused_s)

    @contextmanager
    def _acquire_device(self, batch: EncodeBatch) -> Iterator[TowerPass]:
        long = self._cuda and sum(item.tokens for item in batch.items) > _LONG_TOKENS

        def abandoned() -> bool:
            if long:
                # Otherwise all kernels of this batch would be queued within milliseconds, before the kernels
                # of urgent batches.
                layer = torch.cuda.Event(blocking=True)
                layer.record(torch.cuda.current_stream(self._device))
                layer.synchronize()
            return batch.is_abandoned()

        with self._scheduler.acquire(urgent=batch.urgent, share=batch.share, is_abandoned=abandoned) as turn:
            yield turn


@torch.inference_mode()
def compute_batch(batch: EncodeBatch) -> BatchResult:
    """Run one batch on the device that has its models' weights. The result stays on the device.

    On CUDA, only the current stream may use the result until the stream is synchronized.
    """
    missing = [i for i, kept in enumerate(batch.features) if kept is None]
    features = list(batch.features)
    if missing:
        tower = batch.targets[0][0].tower
        features_of_missing = tower.encode([batch.items[i] for i in missing])
        for i, new in zip(missing, features_of_missing, strict=True):
            features[i] = new
    wanted: list[torch.Tensor] = [torch.empty(0)] * len(batch.targets)
    for positions in _group_by_projector(batch.targets):
        indices = [batch.targets[position][1] for position in positions]
        projector = batch.targets[positions[0]][0].projector
        out = projector.project(
            [_require_features(features[i]) for i in indices], [batch.items[i] for i in indices]
        )
        for position, embedding in zip(positions, out, strict=True):
            wanted[position] = embedding
    return BatchResult(
        embeddings=tuple(wanted),
        features={i: _require_features(features[i]) for i in missing} if batch.returns_features else {},
    )


@torch.inference_mode()
def _result_to_host(result: BatchResult) -> BatchResult:
    """Return the result with contiguous tensors on the CPU. Tensors on a GPU are copied to pinned memory on
    the current stream."""
    return BatchResult(
        embeddings=tuple(map(_tensor_to_host, result.embeddings)),
        features={i: _tensor_to_host(features) for i, features in result.features.items()},
    )


class WeightReloader:
    """Reloads the models of a registry, one reload at a time. Thread-safe."""

    def __init__(
        self,
        registry: ModelRegistry,
        executors: Sequence[BatchExecutor],
        identities_in_use: Callable[[], Set[bytes]],
    ) -> None:
        """Create a reloader. `identities_in_use` returns the model identities of the requests in progress."""
        self._registry = registry
        self._executors = tuple(executors)
        self._identities_in_use = identities_in_use
        self._reloading = threading.Lock()

    def reload(self, name: str | None) -> tuple[ServedModel, ...]:
        """Load and serve the weights that are now on disk, for the model `name` or for all models if None.

        Returns the new descriptions of the models that changed. Raises EncoderRefused("unknown_model"), or
        EncoderRefused("overloaded") during another reload. Raises CheckpointError if a model cannot be
        loaded. In this case, all models are served as before.
        """
        if name is not None and self._registry.find_by_name(name) is None:
            raise EncoderRefused(f"model: {name!r} is not served", reason="unknown_model")
        if not self._reloading.acquire(blocking=False):
            raise EncoderRefused("another reload is in progress", reason="overloaded")
        try:
            return self._reload(
                [name] if name is not None else [m.name for m in self._registry.served_models()]
            )
        finally:
            self._reloading.release()

    def _reload(self, names: Sequence[str]) -> tuple[ServedModel, ...]:
        changed = self._registry.load_changed(names)
        served = {model.identity for model in self._registry.served_models()}
        loaded_by: list[BatchExecutor] = []
        try:
            for executor in self._executors:
                executor.load(changed)
                loaded_by.append(executor)
        except CheckpointError:
            for executor in loaded_by:
                executor.unload([loaded for loaded in changed if loaded.served.identity not in served])
            raise
        old = self._registry.replace(changed)
        for loaded in changed:
            row = loaded.served
            log.info("reloaded %s: epoch %d, identity %s", row.name, row.epoch, row.identity.hex()[:12])
        if old:
            threading.Thread(
                target=self._free_unused, args=(old,), name="cornplug-forget", daemon=True
            ).start()
        return tuple(loaded.served for loaded in changed)

    def _free_unused(self, old: Sequence[LoadedModel]) -> None:
        """Wait until no request uses the replaced models, then free them."""
        ids = {modality.identity for loaded in old for modality in loaded.served.modalities}
        end = time.monotonic() + MAX_RETIRED_S
        while ids & self._identities_in_use() and time.monotonic() < end:
            time.sleep(_POLL_S)
        with self._reloading:
            served = {model.identity for model in self._registry.served_models()}
            gone = [loaded for loaded in old if loaded.served.identity not in served]
            for executor in self._executors:
                executor.unload(gone)


def _group_by_projector(targets: Sequence[tuple[LoadedModel, int]]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for position, (model, _) in enumerate(targets):
        groups.setdefault(id(model.projector), []).append(position)
    return list(groups.values())


def _require_features(features: torch.Tensor | None) -> torch.Tensor:
    assert features is not None
    return features


def _item_to_device(item: TowerItem, device: torch.device) -> TowerItem:
    """Return the item with its values (floats and raw pixels) on the device. Other integer tensors stay on
    the CPU, because towers read them as shapes."""
    return replace(
        item,
        tensors=tuple(
            t.pin_memory().to(device, non_blocking=True)
            if t.is_floating_point() or t.dtype == torch.uint8
            else t
            for t in item.tensors
        ),
    )


def _tensor_to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.to("cpu").contiguous()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
