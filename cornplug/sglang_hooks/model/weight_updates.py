"""Weights that change under a running server: from then on it shares nothing.

What a checkpoint on disk says about an engine holds until somebody replaces the weights in
place (RL updates, a reload, memory that is given up). We cannot fingerprint what came over the
wire, so sharing ends for this server until it is restarted: reason "weights_updated". Every
process that takes part learns of it before the first byte changes: the scheduler of each rank
by the request itself, the tokenizer when it passes it on. What a rank finds wrong with its weights as it
loads them (`loaded_weights.py`) it tells the others by the engine's state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from cornplug.engine_common import engine_state
from cornplug.sglang_hooks.compat import Hook, logger

_replaced = threading.Event()

# Methods of the scheduler that users call by `Engine.collective_rpc` and that leave the weights alone.
_HARMLESS_RPC: Final = frozenset({"save_remote_model", "save_sharded_model"})
_WEIGHTS_TAG: Final = "weights"


def replaced() -> bool:
    """Whether this engine's weights may not be the checkpoint's, or not any longer."""
    return _replaced.is_set() or engine_state.current().replaced()


def note_replaced(how: str) -> None:
    """Stop sharing in this process."""
    if not _replaced.is_set():
        logger.warning("cornplug: weights replaced by %s; this server shares nothing until restart", how)
    _replaced.set()


def _update(_self: Any, recv_req: Any) -> None:
    # A draft model's weights are in no identity; requests without a selector are for all.
    if getattr(recv_req, "selector", "all") != "draft":
        note_replaced(type(recv_req).__name__.removesuffix("ReqInput"))


def _release(_self: Any, recv_req: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    settings = resolved_view(get_server_args())
    # Without the saver nothing is given up; with the backup the same bytes come back.
    lost = settings.enable_memory_saver and not settings.enable_weights_cpu_backup
    if lost and (not recv_req.tags or _WEIGHTS_TAG in recv_req.tags):
        note_replaced("release_memory_occupation")


def _check(_self: Any, recv_req: Any) -> None:
    # Its other actions only look.
    if recv_req.action == "reset_tensors" and recv_req.selector != "draft":
        note_replaced("check_weights reset_tensors")


def _rpc(_self: Any, recv_req: Any) -> None:
    if recv_req.method not in _HARMLESS_RPC:
        note_replaced(f"collective_rpc {recv_req.method}")


def _in_tokenizer(function: Callable[[Any, Any], None]) -> Callable[..., None]:
    """The same in the tokenizer process, where it comes with the HTTP request."""

    def passed_on(manager: Any, obj: Any, request: Any = None) -> None:
        function(manager, obj)

    return passed_on


_SCHEDULER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_MANAGERS: Final = frozenset({"update_weights_from_disk"})
"""Of the tokenizer's, those that its manager has and not the mixin."""
_CHANGES: Final = (
    ("begin_weight_update", _update),
    ("update_weights_from_disk", _update),
    ("update_weights_from_distributed", _update),
    ("update_weights_from_tensor", _update),
    ("update_weights_from_ipc", _update),
    ("release_memory_occupation", _release),
    ("check_weights", _check),
)

HOOKS: tuple[Hook, ...] = (
    *(Hook(f"{_SCHEDULER}.{name}", "before", function) for name, function in _CHANGES),
    *(
        Hook(f"{_MANAGER if name in _MANAGERS else _TOKENIZER}.{name}", "before", _in_tokenizer(function))
        for name, function in _CHANGES
    ),
    Hook("sglang.srt.managers.scheduler.Scheduler.handle_rpc_request", "before", _rpc),
)
