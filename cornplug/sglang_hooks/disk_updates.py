"""Checks loaded weights, and resumes sharing after SGLang updates them from another checkpoint folder.

Before it serves requests, each rank compares its weights with the checkpoint's files
(`engine_common.weight_comparison`). If they differ, the rank ends sharing in all processes of the server,
also in the tokenizer's process, which has no weights to compare. An update has these steps:

    tokenizer, each rank    makes the epoch odd, so that no process shares
    each rank               loads, flushes its cache, compares its memory with the files, votes
    first rank              records the folder and makes the epoch even, if all votes are yes

After an update, nothing that was computed with the previous weights remains: SGLang's flush has ended its
storage threads and emptied its trees, and each rank has dropped page hashes, placeholders and embeddings. If
a rank votes no, sharing ends until restart, because no folder may contain the running weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_state, weight_comparison, weights_guard
from cornplug.engine_common.model_identity import declares_quantization
from cornplug.engine_common.weight_comparison import differing
from cornplug.errors import CheckpointError
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS, engine_model, started_model

_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
_CALL: Final = "update_weights_from_disk"
_trained: Final[set[bool]] = set()


def _loaded(_result: Any, runner: Any) -> None:
    """Compare the loaded weights with the files, unless SGLang fetches them later, during graph capture."""
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


LOADED_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_RUNNER}.load_model", "after", _loaded),
    Hook(f"{_RUNNER}.finalize_startup_weight_load", "after", _fetched),
)


def _asked(manager: Any, obj: Any, request: Any = None) -> None:
    """Begin an update in the tokenizer process, before it passes the request on."""
    weights_guard.begin_update(_CALL, logger)


def _update(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Wrap SGLang's update of a rank's weights. Sharing resumes if all ranks vote yes."""
    if not activation.is_on():
        return original(manager, recv_req)
    began_ns = engine_state.file_clock_ns()
    epoch = weights_guard.begin_update(_CALL, logger)
    path = str(Path(recv_req.model_path).resolve())
    excluded, why = _excluded(manager, recv_req), "SGLang failed"
    try:
        result = original(manager, recv_req)
        why = excluded or _unlike(manager, recv_req, result, path, began_ns)
    finally:
        # Every rank votes, even after an error, because the other ranks wait for its vote.
        forget()
        _settle(manager.tp_cpu_group, epoch, path, began_ns, why)
    return result


def _excluded(manager: Any, recv_req: Any) -> str:
    """Return the reason why cornplug cannot identify the weights that the request loads, or "" if it can."""
    if recv_req.load_format not in READS_SAFETENSORS:
        return f"load format {recv_req.load_format!r} is not supported"
    if _trained:
        return "a trainer sent tensors before, and some of them may still be in use"
    return excluded_server(manager)


def note_trained() -> None:
    """Record that this rank's model now contains tensors that were not loaded from a folder."""
    _trained.add(True)


def excluded_server(manager: Any) -> str:
    """Return the reason why cornplug cannot identify new weights of this server, or "" if it can."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.runtime_context import get_server_args

    settings, model = resolved_view(get_server_args()), model_config_of(get_server_args())
    found = {
        "cornplug could not identify the previous weights": engine_state.current().unknown(),
        # Only the ranks of one tensor-parallel group vote together.
        "data or pipeline parallelism, or several hosts": max(
            settings.dp_size, settings.pp_size, settings.nnodes
        )
        > 1,
        "quantised weights": settings.quantization or declares_quantization(model.hf_config),
        "the server has a draft model, whose weights are replaced too": manager.draft_worker is not None,
        "the server has encoders, which keep their weights": settings.language_only
        or settings.encoder_urls
        or settings.enable_adaptive_dispatch_to_encoder,
    }
    return next((why for why, holds in found.items() if holds), "")


def _unlike(manager: Any, recv_req: Any, result: Any, path: str, began_ns: int) -> str:
    """Return the reason why this rank's weights may differ from the folder's, or "" if they match."""
    if not (result.success and recv_req.flush_cache):
        return "SGLang did not load the weights and flush its cache"
    if str(Path(recv_req.model_path).resolve()) != path:
        return "the path now refers to another folder"
    try:
        checkpoint = started_model().with_weights(path, began_ns).checkpoint
        name, compared = differing(manager.tp_worker.model_runner.model, checkpoint)
        changed = checkpoint.changed_since(began_ns)
    except CheckpointError as e:
        return str(e)
    if name is not None:
        return f"{name} in memory differs from the folder"
    if changed is not None:
        return f"{changed} changed during the update"
    return "" if compared else "no tensor could be compared"


def forget() -> None:
    """Drop the page hashes, placeholders and embeddings of the previous weights in this rank."""
    from sglang.srt.managers import mm_schedule

    from cornplug.sglang_hooks.kv import page_hash_hooks
    from cornplug.sglang_hooks.media import placeholder_tokens

    page_hash_hooks.forget_pages()
    placeholder_tokens.forget()
    # For a request from before the update, this cache has rows of the new tower under the old tower's key.
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def _settle(group: Any, epoch: int, path: str, began_ns: int, why: str) -> None:
    """Let the ranks vote on the update.

    The first rank publishes the new folder if all votes are yes. Otherwise every rank ends sharing.
    """
    vote = torch.tensor([not why, began_ns], dtype=torch.int64)
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=group)
    agreed, first_ns = vote.tolist()
    if not agreed:
        weights_guard.end_sharing(
            f"weights replaced from {path}: {why or 'another rank rejected the update'}", logger
        )
    elif torch.distributed.get_rank(group) == 0:
        engine_state.current().end_update(epoch, path, first_ns)
        logger.info("cornplug: this engine shares again, with the weights of %s", path)


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "update_weights_from_disk",
        "around",
        _update,
    ),
    Hook("sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk", "before", _asked),
)
