"""Resumes sharing after vLLM receives weights from a trainer that names them.

    API process, engine core   the epoch is odd: no process shares
    each rank                  start_weight_update, any number of update_weights, finish_weight_update
    engine core                gets the version, by `/finish_weight_update` or `/update_weight_version` after
                               it; asks the ranks, and holds the weights under that name (`reloads.hold`)

A transfer is one state of the weights, regardless of its number of calls, and has a name only at its end. A
failed call ends sharing until restart. So do a trainer's own methods (`--worker-extension-cls`), which could
do anything to the model. This module is used only with `engine.trust_weight_version`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from cornplug.engine_common import weights_guard
from cornplug.engine_common.shared_flags import settings
from cornplug.vllm_connector import compat
from cornplug.vllm_connector.model.loaded_weights import has_cornplug
from cornplug.vllm_connector.model.reloads import TRANSFER, Loaded, begin, excluded_engine, hold
from cornplug.vllm_connector.several_connectors import our_settings

_START: Final = "start_weight_update"
_FINISH: Final = "finish_weight_update"
_CALLS: Final = frozenset({_START, "update_weights", _FINISH})
_PATCHES: Final = "sparse_nccl"
"""vLLM's backend that changes single values of a tensor. Its result depends on previous transfers."""
_VOTE_S: Final = 60.0


@dataclass
class _Transfer:
    """A transfer that has no version yet."""

    epoch: int
    before: str
    """vLLM's previous version of the weights."""
    is_over: bool = False


def names(method: Any, config: Any) -> bool:
    """Return whether this worker method is part of a transfer that a version may name."""
    return isinstance(method, str) and method in _CALLS and _trusts(config)


def _trusts(config: Any) -> bool:
    if not has_cornplug(config):
        return False
    extra = our_settings(config.kv_transfer_config)
    if extra is None:
        extra = config.ec_transfer_config.ec_connector_extra_config
    return _trusting(json.dumps(dict(extra), sort_keys=True, default=str))


@lru_cache(maxsize=8)
def _trusting(extra: str) -> bool:
    # A settings file that is edited later must not raise an exception in the engine core.
    return settings(json.loads(extra)).engine.trust_weight_version


def transfer(original: Callable[..., Any], core: Any, method: str, *args: Any, **kwargs: Any) -> Any:
    """Wrap `EngineCore.collective_rpc` when it calls a method of `_CALLS` on each rank."""
    if method == _START:
        epoch = begin(core, method)
        setattr(core, TRANSFER, _Transfer(epoch, core.get_weight_version()))
    else:
        weights_guard.begin_update(method, compat.logger)
    done = False
    try:
        result = original(core, method, *args, **kwargs)
        done = True
    finally:
        if not done:
            setattr(core, TRANSFER, None)
            weights_guard.end_sharing(f"weights replaced by {method}, which failed", compat.logger)
    update = getattr(core, TRANSFER, None)
    if update is not None and method == _FINISH:
        update.is_over = True
    return result


def _set_weight_version(original: Callable[..., Any], core: Any, weight_version: str) -> Any:
    result = original(core, weight_version)
    update: _Transfer | None = getattr(core, TRANSFER, None)
    if update is not None and update.is_over:
        _name(core, update, weight_version)
    return result


def _name(core: Any, update: _Transfer, version: str) -> None:
    if why := weights_guard.unusable_version(version, update.before):
        compat.logger.warning("cornplug: nothing is shared until a transfer has a weight_version: %s", why)
        return
    setattr(core, TRANSFER, None)
    if why := _excluded(core) or _unfinished(core):
        weights_guard.end_sharing(f"weights replaced by a trainer: {why}", compat.logger)
    else:
        hold(core, Loaded(update.epoch, version, is_version=True))


def _excluded(core: Any) -> str:
    chosen = getattr(core.vllm_config, "weight_transfer_config", None)
    if getattr(chosen, "backend", None) == _PATCHES:
        return f"backend {_PATCHES} changes parts of tensors"
    return excluded_engine(core)


def _unfinished(core: Any) -> str:
    """Reason why a rank does not hold the weights, or "" if all do."""
    try:
        votes = core.model_executor.collective_rpc(rank_is_done, _VOTE_S)
    except (RuntimeError, TimeoutError) as e:
        # A rank that died ends the engine anyway.
        return f"the ranks did not reply: {e}"
    return "" if votes and all(votes) else "some ranks did not finish the transfer"


def rank_is_done(worker: Any) -> bool:
    """Return whether the last transfer of this rank has finished, and concerned the model itself."""
    worker = getattr(worker, "worker", worker)
    return not (worker._weight_update_active or worker._weight_update_is_draft)


WRAPS: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("vllm.v1.engine.core", "EngineCore.set_weight_version", _set_weight_version),
)
