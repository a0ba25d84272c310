"""vLLM's CPU platform with one process for engine core and worker, as on a GPU.

A `vllm.general_plugins` entry point for tests. On a CPU vLLM gives even a single worker a process of its own,
so that it can bind OpenMP's threads. A test wants the executor of production, and no third process that
imports vLLM, which is a quarter of a start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_registered = False


def register() -> None:
    """Patches vLLM's CPU platform, once a process."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.check_and_update_config = classmethod(_keeping_executor(CpuPlatform.check_and_update_config))


def _keeping_executor(original: Callable[[Any], None]) -> Callable[[type, Any], None]:
    """vLLM's check of a config on a CPU, which then has the executor that it had before."""

    def check_and_update_config(cls: type, config: Any) -> None:
        executor = config.parallel_config.distributed_executor_backend
        original(config)
        config.parallel_config.distributed_executor_backend = executor

    return check_and_update_config
