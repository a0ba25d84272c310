"""Copies of KV end before a worker's memory goes away in sleep.

An engine core in a process of its own sleeps only when no copy is open. One that runs in the program that
uses it (`VLLM_ENABLE_V1_MULTIPROCESSING=0`) makes no step after the last request: copies may be under way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def _sleep(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    if has_kv_transfer_group():
        group = get_kv_transfer_group()
        for connector in getattr(group, "sub_connectors", [group]):
            if hasattr(connector, "_end_copies"):
                connector._end_copies()
    return original(worker, *args, **kwargs)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.worker.gpu_worker", "Worker.sleep", _sleep),
)
