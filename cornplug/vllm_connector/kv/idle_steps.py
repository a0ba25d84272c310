"""Steps without tokens, after which vLLM's worker processes do not spin.

A worker polls shared memory without a pause for one second after each message of its engine core. cornplug
has an engine step while it waits for the encoder service or copies KV, which would renew that second: the
worker of an engine that waits would take a core from the process that it waits for, and from the next
request of another engine. After a step without tokens the worker therefore waits for vLLM's notification.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

_RECHECK_MS: Final = 50
"""Longest that a worker waits for a notification before it looks for a message by itself."""

_state: Final = {"computes": True}


def began(*, computes: bool) -> None:
    """Note the step that this worker process begins."""
    _state["computes"] = computes


def _wait(
    original: Callable[..., None], condition: Any, timeout_ms: int | None = None, *args: Any, **kwargs: Any
) -> None:
    if not _state["computes"] and condition.is_reader:
        condition.last_read = -math.inf
        timeout_ms = _RECHECK_MS if timeout_ms is None else min(timeout_ms, _RECHECK_MS)
    original(condition, timeout_ms, *args, **kwargs)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.wait", _wait),
)
