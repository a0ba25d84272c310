"""Hooks on SGLang's calls that replace a server's weights in place.

Each of these calls ends sharing (`weights_guard`), with two exceptions (`weight_epochs.py`): a successful
update from a checkpoint, and updates with tensors if a trainer's versions are trusted.

Every process is notified before the first byte changes. The scheduler of each rank is notified when it
receives the request, and the tokenizer when it passes the request on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from cornplug.engine_common import weights_guard
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger

# Scheduler methods that users call with `Engine.collective_rpc` and that do not change the weights.
_HARMLESS_RPC: Final = frozenset({"save_remote_model", "save_sharded_model"})
_WEIGHTS_TAG: Final = "weights"

_SCHEDULER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER: Final = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"


def trusts_versions() -> bool:
    """Return whether a trainer's version may identify this server's weights."""
    return activation.is_on() and activation.config().engine.trust_weight_version


def changes_model(recv_req: Any) -> bool:
    """Return whether a request changes the model itself, and not only a draft model.

    A request that does not select a model changes all models.
    """
    return bool(getattr(recv_req, "selector", "all") != "draft")


def _before_update(_self: Any, recv_req: Any) -> None:
    # No identity covers a draft model's weights.
    if changes_model(recv_req):
        _end_sharing(type(recv_req).__name__.removesuffix("ReqInput"))


def _end_sharing(call: str) -> None:
    """End sharing. If trainers' versions are trusted, only pause sharing until the weights have a version
    again."""
    if trusts_versions():
        weights_guard.begin_update(call, logger)
    else:
        weights_guard.record_replacement(call, logger)


def _before_release(_self: Any, recv_req: Any) -> None:
    if discards_weights(recv_req):
        _end_sharing("release_memory_occupation")


def discards_weights(recv_req: Any) -> bool:
    """Return whether a request that releases memory discards the weights."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    settings = resolved_view(get_server_args())
    # Without the memory saver, nothing is discarded. With the CPU backup, SGLang restores the same bytes.
    lost = settings.enable_memory_saver and not settings.enable_weights_cpu_backup
    return bool(lost and (not recv_req.tags or _WEIGHTS_TAG in recv_req.tags))


def _before_check_weights(_self: Any, recv_req: Any) -> None:
    # All other actions of this call only read weights.
    if recv_req.action == "reset_tensors" and recv_req.selector != "draft":
        weights_guard.record_replacement("check_weights reset_tensors", logger)


def _before_rpc(_self: Any, recv_req: Any) -> None:
    if recv_req.method not in _HARMLESS_RPC:
        weights_guard.record_replacement(f"collective_rpc {recv_req.method}", logger)


def _tokenizer_hook(function: Callable[[Any, Any], None]) -> Callable[..., None]:
    """Return a hook that calls `function` in the tokenizer process, where the HTTP request arrives."""

    def passed_on(manager: Any, obj: Any, request: Any = None) -> None:
        function(manager, obj)

    return passed_on


_HOOKED_CALLS: Final = (
    ("begin_weight_update", _before_update),
    ("update_weights_from_distributed", _before_update),
    ("update_weights_from_tensor", _before_update),
    ("update_weights_from_ipc", _before_update),
    ("release_memory_occupation", _before_release),
    ("check_weights", _before_check_weights),
)

HOOKS: tuple[Hook, ...] = (
    *(Hook(f"{_SCHEDULER}.{name}", "before", function) for name, function in _HOOKED_CALLS),
    *(Hook(f"{_TOKENIZER}.{name}", "before", _tokenizer_hook(function)) for name, function in _HOOKED_CALLS),
    Hook("sglang.srt.managers.scheduler.Scheduler.handle_rpc_request", "before", _before_rpc),
)
