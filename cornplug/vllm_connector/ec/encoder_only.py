"""Passes on a worker connector's reports in the first model runner of an engine that runs only its encoder.

That runner (0.32, 0.33) returns an output without the connector's part, and the outcomes of saves would be
lost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def _make_empty_output(original: Callable[..., Any], scheduler_output: Any) -> Any:
    from vllm.distributed.ec_transfer import get_ec_transfer, has_ec_transfer
    from vllm.v1.outputs import ECConnectorOutput

    from cornplug.vllm_connector.ec.metadata import CornplugECMetadata

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
