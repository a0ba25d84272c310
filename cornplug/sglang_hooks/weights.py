"""Weights that change under a running server: from then on it shares nothing.

What a checkpoint on disk says about an engine holds until somebody replaces the weights in
place (RL updates, a reload, memory that is given up). We cannot fingerprint what came over the
wire, so sharing ends for this server until it is restarted: reason "weights_updated". Every
process that takes part learns of it before the first byte changes: the scheduler of each rank
by the request itself, the tokenizer when it passes it on.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from cornplug.sglang_hooks.compat import Hook, logger

_replaced = threading.Event()

# Methods of the scheduler that users call by `Engine.collective_rpc` and that leave the weights alone.
_HARMLESS_RPC: Final = frozenset({"save_remote_model", "save_sharded_model"})
_WEIGHTS_TAG: Final = "weights"


def replaced() -> bool:
    """Whether this engine's weights may no longer be the checkpoint's."""
    return _replaced.is_set()


def note_replaced(how: str) -> None:
    """Stop sharing in this process."""
    if not _replaced.is_set():
        logger.warning("cornplug: weights replaced by %s; this server shares nothing until restart", how)
    _replaced.set()


def _update(_self: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    # A draft model's weights are in no identity; requests without a selector are for all.
    if getattr(request, "selector", "all") != "draft":
        note_replaced(type(request).__name__.removesuffix("ReqInput"))


def _release(_self: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    settings = resolved_view(get_server_args())
    # Without the saver nothing is given up; with the backup the same bytes come back.
    lost = settings.enable_memory_saver and not settings.enable_weights_cpu_backup
    if lost and (not request.tags or _WEIGHTS_TAG in request.tags):
        note_replaced("release_memory_occupation")


def _check(_self: Any, request: Any, *_args: Any, **_kwargs: Any) -> None:
    # Its other actions only look.
    if request.action == "reset_tensors" and request.selector != "draft":
        note_replaced("check_weights reset_tensors")


def _rpc(_self: Any, request: Any) -> None:
    if request.method not in _HARMLESS_RPC:
        note_replaced(f"collective_rpc {request.method}")


_SCHEDULER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_UPDATES: Final = (
    "begin_weight_update",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)

HOOKS: tuple[Hook, ...] = (
    *(Hook(f"{owner}.{name}", "before", _update) for owner in (_SCHEDULER, _TOKENIZER) for name in _UPDATES),
    Hook(f"{_SCHEDULER}.update_weights_from_disk", "before", _update),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk", "before", _update
    ),
    *(
        Hook(f"{owner}.{name}", "before", function)
        for owner in (_SCHEDULER, _TOKENIZER)
        for name, function in (("release_memory_occupation", _release), ("check_weights", _check))
    ),
    Hook("sglang.srt.managers.scheduler.Scheduler.handle_rpc_request", "before", _rpc),
)
