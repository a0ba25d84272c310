"""Handling of KV copies that are still in flight when vLLM sleeps, when vLLM ends, and when a request id is
reused.

An engine core in a separate process continues to run steps until all copies have ended. An engine core in its
caller's process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) runs no step after the program's last request, so copies
may be in flight when it sleeps or when the program ends.

vLLM removes a request when it ends, but keeps an aborted request until its blocks are loaded, and asserts
that no request with the same id arrives in the meantime. A client that reuses request ids would stop the
engine, if VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 makes vLLM use these ids unchanged. With this module, the
load keeps the blocks, and vLLM removes the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from cornplug.vllm_connector import compat

_LAST_SAVES_S: Final = 5.0
"""Maximum seconds to wait for unfinished saves when the program ends."""


def _add_request(
    original: Callable[..., Any], scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> Any:
    held = scheduler.requests.get(request.request_id)
    # With several connectors, the report that a load has ended does not identify the load, so it is not
    # detached.
    detach = getattr(scheduler.connector, "_detach_load", None)
    if held is not None and held.is_finished() and detach is not None and detach(held):
        scheduler._free_blocks(held)
    return original(scheduler, request, *args, **kwargs)


def _ours(connector: Any) -> Iterator[Any]:
    """Yield cornplug's KV connector, which is `connector` itself or one of its children."""
    for one in getattr(connector, "sub_connectors", [connector]):
        if hasattr(one, "_end_copies"):
            yield one


def _sleep(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        for connector in _ours(get_kv_transfer_group()):
            connector._end_copies()
    return original(worker, *args, **kwargs)


def _shutdown(original: Callable[..., Any], core: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.v1.engine.core import EngineCoreProc

    if not isinstance(core, EngineCoreProc):
        try:
            _end_saves(core)
        except Exception:  # noqa: BLE001 - any error of the engine
            compat.logger.warning("cornplug: the last KV pages were not saved", exc_info=True)
    return original(core, *args, **kwargs)


def _end_saves(core: Any) -> None:
    """Run engine steps until the saves of the last requests have ended. On a CPU, these copies wait until the
    engine is idle."""
    connectors = [] if core.scheduler.has_unfinished_requests() else list(_ours(core.scheduler.connector))
    until = time.monotonic() + _LAST_SAVES_S
    while any(one.has_pending_push_work() for one in connectors) and time.monotonic() < until:
        core.step_fn()


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker.sleep", _sleep),
    ("vllm.v1.engine.core", "EngineCore.shutdown", _shutdown),
    ("vllm.v1.core.sched.scheduler", "Scheduler.add_request", _add_request),
)
