"""Limits on the CPU use of vLLM's processes, so that it is as low as without a connector.

A vLLM worker polls shared memory continuously for one second after each message from its engine core.
cornplug makes an engine run steps while it waits for the encoder service or copies KV, and each of these
steps would restart that second. The worker would then use a CPU core that is needed by the process that it
waits for, or by another engine. With this module, the second counts from the last step with tokens, as in an
engine without cornplug.

With any KV connector, an engine on a CPU reserves one more core per worker, intended for NIXL's progress
thread. A host with two cores has no core to reserve. vLLM then computes on both cores, and every other
process interrupts vLLM's threads, which wait for each other at each operation. With this module, vLLM does
not reserve a core for cornplug.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Final

from cornplug.vllm_connector.compat import KV_CONNECTOR

_RECHECK_MS: Final = 50
"""Maximum milliseconds that a worker waits for a notification before it checks for a message itself."""


def _reserve_as_stock(
    original: Callable[..., None], manager: Any, config: Any, *args: Any, **kwargs: Any
) -> None:
    transfer = config.kv_transfer_config
    if transfer is not None and transfer.kv_connector == KV_CONNECTOR:
        config = copy.copy(config)
        config.kv_transfer_config = None
    original(manager, config, *args, **kwargs)


class _Steps:
    """Activity of this worker process: whether its last step computed tokens, and when the last step that
    computed tokens began."""

    def __init__(self) -> None:
        self.computes = True
        self.computed_s = time.monotonic()
        """Time when the last step with tokens began."""


_steps: Final = _Steps()


def began(*, computes: bool) -> None:
    """Record that this worker process begins a step. `computes` is whether the step computes tokens."""
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
