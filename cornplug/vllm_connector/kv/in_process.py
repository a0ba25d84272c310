"""An engine core in the program that uses it (`VLLM_ENABLE_V1_MULTIPROCESSING=0`).

A core in a process of its own keeps stepping until all copies have ended. This one makes no step after the
program's last request: copies may be under way when it sleeps or when the program ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from cornplug.vllm_connector import compat

_LAST_SAVES_S: Final = 5.0
"""Time that a program's end may take to finish its saves."""


def _ours(connector: Any) -> Iterator[Any]:
    """This package's KV connector, if it is this one or one of several."""
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
        except Exception:  # noqa: BLE001 - an engine that has failed raises what it likes
            compat.logger.warning("cornplug: the last KV pages were not saved", exc_info=True)
    return original(core, *args, **kwargs)


def _end_saves(core: Any) -> None:
    """Step until the saves of the last requests have ended. Copies on a CPU had waited for an idle engine."""
    connectors = [] if core.scheduler.has_unfinished_requests() else list(_ours(core.scheduler.connector))
    until = time.monotonic() + _LAST_SAVES_S
    while any(one.has_pending_push_work() for one in connectors) and time.monotonic() < until:
        core.step_fn()


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker.sleep", _sleep),
    ("vllm.v1.engine.core", "EngineCore.shutdown", _shutdown),
)
