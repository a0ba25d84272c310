"""Weights that change under a running engine: from then on it shares nothing.

What a checkpoint on disk says about an engine holds until somebody replaces the weights in
place (sleep level 2, reload, RL update). We cannot fingerprint what came over the wire, so
sharing ends for this engine until it is restarted: reason "weights_updated".
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cornplug.vllm_connector import compat

_REPLACING = frozenset(
    {
        "reload_weights",
        "update_weights",
        "start_weight_update",
        "finish_weight_update",
        "load_weights",
        "update_config",
    }
)
_replaced = threading.Event()


def replaced() -> bool:
    """Whether this engine's weights may no longer be the checkpoint's."""
    return _replaced.is_set()


def note_replaced(how: str) -> None:
    """Stop sharing in this process."""
    if not _replaced.is_set():
        compat.logger.warning(
            "cornplug: weights replaced by %s; this engine shares nothing until restart", how
        )
    _replaced.set()


def _collective_rpc(original: Callable[..., Any], core: Any, method: Any, *args: Any, **kwargs: Any) -> Any:
    # A callable could do anything to the model; a name outside the list cannot load weights.
    # While the engine starts (it has no scheduler yet) the calls are its own.
    started = getattr(core, "scheduler", None) is not None
    if started and (not isinstance(method, str) or method in _REPLACING):
        note_replaced(method if isinstance(method, str) else "a collective_rpc callable")
    return original(core, method, *args, **kwargs)


def _sleep(original: Callable[..., Any], core: Any, level: int = 1, *args: Any, **kwargs: Any) -> Any:
    if level >= 2:
        note_replaced("sleep level 2")
    return original(core, level, *args, **kwargs)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore.collective_rpc", _collective_rpc),
    ("vllm.v1.engine.core", "EngineCore.sleep", _sleep),
)
