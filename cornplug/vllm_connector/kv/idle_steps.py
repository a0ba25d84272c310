"""Keeps steps without tokens from making vLLM's worker processes spin.

A worker polls shared memory continuously for one second after each message of its engine core. cornplug makes
an engine run steps while it waits for the encoder service or copies KV, and each of these steps would restart
that second. The worker would then use a core that the process it waits for, or another engine, needs. Here
the second counts from the last step with tokens, as in an engine without cornplug.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

_RECHECK_MS: Final = 50
"""Maximum time that a worker waits for a notification before it checks for a message."""


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
    ("vllm.distributed.device_communicators.shm_broadcast", "SpinCondition.wait", _wait),
)
