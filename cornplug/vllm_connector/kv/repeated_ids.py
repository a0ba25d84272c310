"""Support for a request that reuses the id of a finished request.

vLLM forgets a request when it ends, but keeps an aborted request until its blocks are loaded, and asserts
that no request arrives with the same id in the meantime. A client that reuses request ids, which vLLM does
not change with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1, would stop the engine. Here the load keeps the
blocks, and vLLM forgets the request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _add_request(
    original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    held = scheduler.requests.get(request.request_id)
    # With other connectors, the end of a load does not show whose load it was.
    detach = getattr(scheduler.connector, "_detach_load", None)
    if held is not None and held.is_finished() and detach is not None and detach(held):
        scheduler._free_blocks(held)
    return original(scheduler, request, *args, **kwargs)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", _add_request),
)
