"""Hooks that compare loaded weights with the files (`engine_common.weight_comparison`).

Each rank compares before it serves, and notifies all processes of the server, because the tokenizer's process
has no weights.
"""

from __future__ import annotations

from typing import Any, Final

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import weight_comparison
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.model.model_config import engine_model


def _loaded(_result: Any, runner: Any) -> None:
    """Called after weights are loaded. If they are fetched while graphs are captured, `load_model` returns
    without them."""
    if runner.startup_weight_load is None:
        _check(runner)


def _check(runner: Any) -> None:
    # A draft model's weights are not part of any identity.
    if activation.is_on() and not runner.is_draft_worker:
        weight_comparison.check(runner.model, _checkpoint, logger)


def _checkpoint() -> Checkpoint:
    return engine_model().checkpoint


def _fetched(_result: Any, runner: Any) -> None:
    _check(runner)


_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"

HOOKS: tuple[Hook, ...] = (
    Hook(f"{_RUNNER}.load_model", "after", _loaded),
    Hook(f"{_RUNNER}.finalize_startup_weight_load", "after", _fetched),
)
