"""Embeddings that are in an engine's own cache but not in the store, because they were evicted or never
stored.

vLLM does not encode again what it holds. An engine that runs only its encoder therefore checks the store for
each request, and saves such an embedding again.
"""

from __future__ import annotations

from cornplug.engine_common import weights_guard
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import StoreError
from cornplug.vllm_connector.ec.mm_identifiers import key_of


class LostEmbeddings:
    """Identifiers to save in the next step. Used by the engine's thread."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._run = runtime
        self._looked: dict[str, set[str]] = {}
        """Request -> identifiers that were looked up for it."""
        self._lost: dict[str, None] = {}

    def look(self, identifier: str, request_id: str) -> None:
        """Look up a held embedding in the store, once per request."""
        looked = self._looked.setdefault(request_id, set())
        key = key_of(identifier, weights_guard.epoch())
        if key is None or identifier in looked:
            return
        looked.add(identifier)
        try:
            [present] = self._run.store.contains([key], deadline_s=self._run.deadline_s)
        except StoreError:
            return  # The store would not accept the embedding either.
        if not present:
            self._lost[identifier] = None

    def finished(self, request_id: str) -> None:
        """Forget a request."""
        self._looked.pop(request_id, None)

    def drain(self) -> list[str]:
        """Return the identifiers found since the last call."""
        lost, self._lost = list(self._lost), {}
        return lost
