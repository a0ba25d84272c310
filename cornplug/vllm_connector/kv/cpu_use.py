"""Limits of the CPU use of vLLM's processes, so that it is as low as without a connector.

A worker polls shared memory continuously for one second after each message of its engine core. cornplug makes
an engine run steps while it waits for the encoder service or copies KV, and each of these steps would restart
that second. The worker would then use a core that the process it waits for, or another engine, needs. Here
the second counts from the last step with tokens, as in an engine without cornplug.

With any KV connector, an engine on a CPU reserves one more core in each worker, intended for NIXL's progress
thread. A host with two cores has none left to reserve. vLLM then computes on both cores and every other
process interrupts its threads, which wait for each other at each operation. Here it reserves none for
cornplug.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Final

from cornplug.vllm_connector.compat import KV_CONNECTOR

_RECHECK_MS: Final = 50
"""Maximum time that a worker waits for a notification before it checks for a message."""


def _reserve_as_stock(
    original: Callable[..., None], manager: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == KV_CONNECTOR:
        config = copy.copy(config)
        config.kv_transfer_config = None
    original(manager, config, *args, **kwargs)


class _Steps:
    """Last step of this worker process."""

    def __init__(self) -> None:
        self.computes = True
        self.computed_s = time.monotonic()
        """Start of the last step with tokens."""


_steps: Final = _Steps()


def began(*, computes: bool) -> None:
    """Record the step that this worker process begins."""
    _steps.computes = computes
    if computes:
        _steps.computed_s = time.monotonic()


def _wait(
    original: Callable[..., None], condition: Any, timeout_ms: int | None = None, *args: Any, **kwargs: Any
) -> None:
    if not _steps.computes and condition.is_reader:
        condition.last_read = min(condition.last_read, _steps.computed_s)
        timeout_ms = _RECHECK_MS if timeout_ms is None else min(timeout_ms, _RECHECK_MS)
    original(condition, timeout_ms, *args, **kwargs)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.utils.ompmultiprocessing", "OMPProcessManager.__init__", _reserve_as_stock),
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.wait", _wait),
)
