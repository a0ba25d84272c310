"""CPU cores of an engine that computes on a CPU: the same with cornplug as without.

With any KV connector, vLLM reserves one more core in each worker, intended for NIXL's progress thread. On a
host with two cores none is left to reserve. vLLM then computes on both cores and every other process
interrupts its threads, which wait for each other at each operation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from cornplug.vllm_connector.compat import KV_CONNECTOR


def _reserve_as_stock(
    original: Callable[..., None], manager: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == KV_CONNECTOR:
        config = copy.copy(config)
        config.kv_transfer_config = None
    original(manager, config, *args, **kwargs)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.utils.ompmultiprocessing", "OMPProcessManager.__init__", _reserve_as_stock),
)
