"""Support for engines that run only their multimodal encoder.

In such an engine, vLLM's first model runner (0.32, 0.33) returns an output without the encoder-cache
connector's part, so the outcomes of saves would be lost. `WRAPS` adds that part to the output.

vLLM does not encode a medium again if its embedding is in vLLM's own cache. The store may lack this
embedding, because it was evicted or never stored. An engine that runs only its encoder therefore checks the
store for each request, and saves the embedding again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cornplug.engine_common import weights_guard
from cornplug.engine_common.runtime import EngineRuntime
from cornplug.errors import StoreError
from cornplug.vllm_connector.media.mm_identifiers import key_of


class LostEmbeddings:
    """Finds embeddings that are in the engine's own cache but not in the store, to save them again. Used by
    the engine's thread."""

    def __init__(self, runtime: EngineRuntime) -> None:
        self._run = runtime
        self._looked: dict[str, set[str]] = {}
        """Identifiers that were looked up for a request, by request id."""
        self._lost: dict[str, None] = {}

    def look(self, identifier: str, request_id: str) -> None:
        """Check whether the store has an embedding that is in the engine's own cache, once per request."""
        looked = self._looked.setdefault(request_id, set())
        key = key_of(identifier, weights_guard.epoch())
        if key is None or identifier in looked:
            return
        looked.add(identifier)
        try:
            [present] = self._run.store.contains([key], deadline_s=self._run.deadline_s)
        except StoreError:
            return  # The store would not accept the embedding now either.
        if not present:
            self._lost[identifier] = None

    def finished(self, request_id: str) -> None:
        """Remove the record of a finished request's lookups."""
        self._looked.pop(request_id, None)

    def drain(self) -> list[str]:
        """Return the identifiers of embeddings that checks since the last call did not find in the store."""
        lost, self._lost = list(self._lost), {}
        return lost


def _make_empty_output(original: Callable[..., Any], scheduler_output: Any) -> Any:
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    from vllm.v1.outputs import ECConnectorOutput

    from cornplug.vllm_connector.media.metadata import CornplugECMetadata

    output = original(scheduler_output)
    connector: Any = get_ec_transfer() if has_ec_transfer() else None
    if not isinstance(getattr(connector, "_connector_metadata", None), CornplugECMetadata):
        return output  # The step belongs to another connector.
    acks = connector.build_connector_worker_meta()
    if acks is None:
        return output
    # vLLM returns the same object for all steps without tokens.
    return replace(output, ec_connector_output=ECConnectorOutput(ec_connector_worker_meta=acks))


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_model_runner", "make_empty_encoder_model_runner_output", _make_empty_output),
)
