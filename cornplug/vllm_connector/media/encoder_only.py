"""Support for engines that run only their encoder.

The first model runner of such an engine (0.32, 0.33) returns an output without the connector's part, so the
outcomes of saves would be lost. `WRAPS` adds them.

vLLM does not encode again what it holds. An embedding can be in an engine's own cache but not in the store,
because it was evicted or never stored. Such an engine therefore checks the store for each request, and saves
the embedding again.
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


def _make_empty_output(original: Callable[..., Any], scheduler_output: Any) -> Any:
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    from vllm.v1.outputs import ECConnectorOutput

    from cornplug.vllm_connector.media.metadata import CornplugECMetadata

    output = original(scheduler_output)
    connector: Any = get_ec_transfer() if has_ec_transfer() else None
    if not isinstance(getattr(connector, "_connector_metadata", None), CornplugECMetadata):
        return output  # A step of another connector.
    acks = connector.build_connector_worker_meta()
    if acks is None:
        return output
    # vLLM returns the same object for all steps without tokens.
    return replace(output, ec_connector_output=ECConnectorOutput(ec_connector_worker_meta=acks))


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_model_runner", "make_empty_encoder_model_runner_output", _make_empty_output),
)
