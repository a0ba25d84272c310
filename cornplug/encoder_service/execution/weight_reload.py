"""Reloads replaced weights without a restart, in all executors or in none.

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
from collections.abc import Callable, Sequence, Set
from typing import Final

from cornplug.encoder_service.execution.executor import BatchExecutor
from cornplug.encoder_service.model_loader import LoadedModel
from cornplug.encoder_service.model_registry import ModelRegistry
from cornplug.encoder_service.wire.messages import ServedModel
from cornplug.errors import CheckpointError, EncoderRefused

MAX_RETIRED_S: Final = 600.0
"""Maximum seconds for which replaced weights stay loaded for requests that started before the reload."""
_POLL_S: Final = 0.1

log = logging.getLogger(__name__)


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
