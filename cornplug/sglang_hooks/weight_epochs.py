"""Checks loaded weights, and resumes sharing after a server's weights were updated from another checkpoint
folder or by a trainer.

Before it serves requests, each rank compares its weights with the checkpoint's files
(`engine_common.weights_guard`). If they differ, the rank ends sharing in all processes of the server,
including the tokenizer process, which has no weights. An update from a folder has these steps:

    tokenizer, each rank    makes the epoch (update counter) odd, so that no process shares
    each rank               loads, flushes its cache, compares its memory with the files, and votes
    first rank              records the folder and makes the epoch even if all votes are yes

After an update, no results of the previous weights remain: SGLang's flush has ended its storage threads and
emptied its trees, and each rank has dropped page hashes, placeholders and embeddings. If a rank votes no,
there may be no folder with the running weights, so sharing ends until the server restarts.

A trainer's update is one `update_weights_from_ipc`, or a session (`begin_weight_update` to
`end_weight_update`) of any number of calls. It resumes sharing only with `engine.trust_weight_version`, and
has these steps:

    tokenizer, each rank    makes the epoch odd, so that no process shares
    each rank               receives the calls of the update
    each rank               at the end, drops what the previous weights computed, and votes on the version
    first rank              records the version and makes the epoch even if all ranks vote for one version

The weights have a version only after the last call of a session. Any call of the session may contain the
version, and so may `/update_weight_version` after the session. If the calls contain different versions, the
weights have no version. If nothing was computed since SGLang's last flush, no KV of the previous weights is
left. Otherwise the epoch stays odd until the next flush. A failed call ends sharing until the server
restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from cornplug.checkpoints.checkpoint import Checkpoint
from cornplug.engine_common import engine_state, weights_guard
from cornplug.engine_common.model_identity import declares_quantisation
from cornplug.engine_common.weights_guard import find_difference
from cornplug.errors import CheckpointError
from cornplug.identity import digest
from cornplug.sglang_hooks import activation
from cornplug.sglang_hooks.compat import Hook, logger
from cornplug.sglang_hooks.model.model_config import READS_SAFETENSORS, engine_model, started_model
from cornplug.sglang_hooks.model.weight_updates import changes_model, discards_weights, trusts_versions

_RUNNER: Final = "sglang.srt.model_executor.model_runner.ModelRunner"
_DISK_CALL: Final = "update_weights_from_disk"
_trained: Final[set[bool]] = set()

_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_FLUSHES: Final = "sglang.srt.managers.scheduler_components.flush_wrapper.SchedulerFlushWrapper"
_HOOKED_CALLS: Final = (
    "begin_weight_update",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def _on_weights_loaded(_result: Any, runner: Any) -> None:
    """Compare the loaded weights with the files, unless SGLang fetches the weights later, during graph
    capture."""
    if runner.startup_weight_load is None:
        _check_loaded(runner)


def _check_loaded(runner: Any) -> None:
    # No identity covers a draft model's weights.
    if activation.is_on() and not runner.is_draft_worker:
        weights_guard.check_loaded_weights(runner.model, _checkpoint, logger)


def _checkpoint() -> Checkpoint:
    return engine_model().checkpoint


def _on_weights_fetched(_result: Any, runner: Any) -> None:
    _check_loaded(runner)


LOADED_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_RUNNER}.load_model", "after", _on_weights_loaded),
    Hook(f"{_RUNNER}.finalize_startup_weight_load", "after", _on_weights_fetched),
)


# -- updates from a folder -------------------------------------------------------------------


def _begin_in_tokenizer(manager: Any, obj: Any, request: Any = None) -> None:
    """Begin an update in the tokenizer process, before it passes the request on."""
    weights_guard.begin_update(_DISK_CALL, logger)


def _wrap_update_from_disk(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Wrap SGLang's update of a rank's weights. Sharing resumes if all ranks vote yes."""
    if not activation.is_on():
        return original(manager, recv_req)
    began_ns = engine_state.file_clock_ns()
    epoch = weights_guard.begin_update(_DISK_CALL, logger)
    path = str(Path(recv_req.model_path).resolve())
    excluded, why = _request_exclusion(manager, recv_req), "SGLang failed"
    try:
        result = original(manager, recv_req)
        why = excluded or _difference_from_folder(manager, recv_req, result, path, began_ns)
    finally:
        # Every rank votes, even after an error, because the other ranks wait for its vote.
        _drop_derived_state()
        _vote_disk_update(manager.tp_cpu_group, epoch, path, began_ns, why)
    return result


def _request_exclusion(manager: Any, recv_req: Any) -> str:
    """Return the reason why cornplug cannot identify the weights that the request loads, or "" if it can."""
    if recv_req.load_format not in READS_SAFETENSORS:
        return f"load format {recv_req.load_format!r} is not supported"
    if _trained:
        return "a trainer sent tensors before, and some of them may still be in use"
    return _server_exclusion(manager)


def _note_trained() -> None:
    """Record that this rank's model now contains tensors that were not loaded from a folder."""
    _trained.add(True)


def _server_exclusion(manager: Any) -> str:
    """Return the reason why cornplug cannot identify new weights of this server, or "" if it can."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.runtime_context import get_server_args

    settings, model = resolved_view(get_server_args()), model_config_of(get_server_args())
    found = {
        "cornplug could not identify the previous weights": engine_state.current().has_unknown_weights(),
        # Only the ranks of one tensor-parallel group vote together.
        "data or pipeline parallelism, or several hosts": max(
            settings.dp_size, settings.pp_size, settings.nnodes
        )
        > 1,
        "quantised weights": settings.quantization or declares_quantisation(model.hf_config),
        "the server has a draft model, whose weights are replaced too": manager.draft_worker is not None,
        "the server has encoders, which keep their weights": settings.language_only
        or settings.encoder_urls
        or settings.enable_adaptive_dispatch_to_encoder,
    }
    return next((why for why, holds in found.items() if holds), "")


def _difference_from_folder(manager: Any, recv_req: Any, result: Any, path: str, began_ns: int) -> str:
    """Return why this rank's weights may differ from the folder's weights, or "" if they match."""
    if not (result.success and recv_req.flush_cache):
        return "SGLang did not load the weights and flush its cache"
    if str(Path(recv_req.model_path).resolve()) != path:
        return "the path now refers to another folder"
    try:
        checkpoint = started_model().with_weights(path, began_ns).checkpoint
        name, compared = find_difference(manager.tp_worker.model_runner.model, checkpoint)
        changed = checkpoint.find_changed_file(began_ns)
    except CheckpointError as e:
        return str(e)
    if name is not None:
        return f"{name} in memory differs from the folder"
    if changed is not None:
        return f"{changed} changed during the update"
    return "" if compared else "no tensor could be compared"


def _drop_derived_state() -> None:
    """Drop the page hashes, placeholders and embeddings of the previous weights in this rank."""
    from sglang.srt.managers import mm_schedule

    from cornplug.sglang_hooks.kv_pages import page_hash_index
    from cornplug.sglang_hooks.media import placeholder_tokens

    page_hash_index.forget_pages()
    placeholder_tokens.forget_all()
    # For a request that began before the update, this cache has rows of the new tower under the old tower's
    # key.
    if mm_schedule.embedding_cache is not None:
        mm_schedule.embedding_cache.clear()


def _vote_disk_update(group: Any, epoch: int, path: str, began_ns: int, why: str) -> None:
    """Let the ranks vote on whether all of them loaded the weights of the folder `path`.

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
        logger.info("cornplug: this server has resumed sharing with the weights in %s", path)


DISK_HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
        "update_weights_from_disk",
        "around",
        _wrap_update_from_disk,
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        "before",
        _begin_in_tokenizer,
    ),
)


# -- updates by a trainer ---------------------------------------------------------------------


@dataclass
class _TrainerUpdate:
    """Update of this rank's weights after which sharing has not resumed yet."""

    epoch: int
    version_before: str
    """Version that SGLang reported for the weights before the update."""
    versions: frozenset[str]
    """Versions that the update's calls contained."""
    has_failed: bool = False
    is_over: bool = False
    waits_for_flush: bool = False

    def version(self) -> str | None:
        """Return the update's version, or None unless its calls contained exactly one version."""
        return next(iter(self.versions)) if len(self.versions) == 1 else None


@dataclass
class _RankState:
    """State of weight updates in this rank's process."""

    update: _TrainerUpdate | None = None
    flushed_at_pass: int | None = None
    """Number of forward passes that SGLang had run at its last flush, or None before the first flush."""


_rank: Final = _RankState()


def _wrap_weight_change(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Wrap each call that replaces weights of this rank."""
    if not (trusts_versions() and changes_model(recv_req)):
        return original(manager, recv_req)
    update = _current_update(recv_req)
    result = _run_call(original, manager, recv_req, update)
    if given := getattr(recv_req, "weight_version", None):
        update.versions |= {given}
    if result.success and getattr(recv_req, "flush_cache", False):
        _rank.flushed_at_pass = manager.scheduler.forward_ct
    if manager._session is None:
        _finish_update(manager, update)
    return result


def _wrap_session_end(original: Callable[..., Any], manager: Any, recv_req: Any) -> Any:
    """Wrap the call that ends a trainer's weight update session."""
    update = _rank.update
    if update is None or not trusts_versions():
        return original(manager, recv_req)
    result = _run_call(original, manager, recv_req, update)
    _finish_update(manager, update)
    return result


def _current_update(recv_req: Any) -> _TrainerUpdate:
    """Return the update to which a call belongs. The first call begins an update."""
    _note_trained()
    epoch = weights_guard.begin_update(type(recv_req).__name__.removesuffix("ReqInput"), logger)
    if _rank.update is None or _rank.update.is_over:
        _rank.update = _TrainerUpdate(epoch, _current_version(), frozenset())
    return _rank.update


def _run_call(original: Callable[..., Any], manager: Any, recv_req: Any, update: _TrainerUpdate) -> Any:
    """Run a call. If the call fails, end sharing, because it may have replaced some of the weights.

    A rank on which the call failed still votes, because the other ranks wait for its vote.
    """
    done = False
    try:
        result = original(manager, recv_req)
        done = result.success
    finally:
        if not done:
            update.has_failed = True
            weights_guard.end_sharing(f"{type(recv_req).__name__} failed", logger)
    return result


def _current_version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def _finish_update(manager: Any, update: _TrainerUpdate) -> None:
    """Vote on an update after its last call has finished, and again if its version is set later."""
    update.is_over = True
    _vote_trainer_update(manager, update, has_no_old_kv=_has_no_old_kv(manager, update))


def _has_no_old_kv(manager: Any, update: _TrainerUpdate) -> bool:
    """Return whether this rank holds no KV that was computed with the previous weights.

    If nothing was computed since the last flush, this flushes the cache again. The second flush takes little
    time. It drops KV that SGLang may have fetched for waiting requests since the first flush.
    """
    nothing_new = _rank.flushed_at_pass == manager.scheduler.forward_ct
    return bool(update.version() and nothing_new and manager.flush_cache(empty_cache=False))


def _vote_trainer_update(manager: Any, update: _TrainerUpdate, *, has_no_old_kv: bool) -> None:
    """Let the ranks vote on an update, and resume sharing if they agree on its version.

    The first rank publishes the version. Sharing ends if a rank rejects the update or received another
    version. Sharing stays paused if the update has no usable version, or if a rank still has to flush its
    cache.
    """
    excluded = "one of the calls failed" if update.has_failed else _server_exclusion(manager)
    why = weights_guard.version_problem(update.version(), update.version_before)
    if len(update.versions) > 1:
        why = f"its calls had {len(update.versions)} different versions"
    if has_no_old_kv:
        _drop_derived_state()
    name = int.from_bytes(digest("cornplug-version-vote-v1", repr(update.version()).encode())[:7])
    vote = torch.tensor([not excluded, not why, has_no_old_kv, name, -name], dtype=torch.int64)
    torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MIN, group=manager.tp_cpu_group)
    may, named, empty, least, most = vote.tolist()
    update.waits_for_flush = False
    if not may or least != -most:
        _rank.update = None
        why = excluded or (
            "another rank rejected the update" if not may else "the ranks received different versions"
        )
        weights_guard.end_sharing(f"weights replaced by a trainer: {why}", logger)
    elif not named:
        logger.warning(
            "cornplug: this server shares nothing until an update has a usable weight_version: %s", why
        )
    elif not empty:
        update.waits_for_flush = True
        logger.info("cornplug: this server resumes sharing after a call of /flush_cache")
    else:
        _rank.update = None
        if torch.distributed.get_rank(manager.tp_cpu_group) == 0:
            engine_state.current().end_named_update(update.epoch, str(update.version()))
            logger.info(
                "cornplug: this server has resumed sharing with the trainer's weights %s", update.version()
            )


def _before_wrapper_created(_wrapper: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Make SGLang's handler of `/flush_cache` call `_wrap_flush`, which wraps SGLang's own function.

    This hooks the handler's constructor. Another module already hooks `Scheduler.flush_cache`, and SGLang
    supports only one hook per function and process.
    """
    return (_wrapper,), {**kwargs, "flush_cache": partial(_wrap_flush, kwargs["flush_cache"])}


def _wrap_flush(flush: Any, *args: Any, **kwargs: Any) -> Any:
    done, scheduler = flush(*args, **kwargs), flush.__self__
    if done:
        _rank.flushed_at_pass = scheduler.forward_ct
        update = _rank.update
        if update is not None and update.waits_for_flush:
            _vote_trainer_update(scheduler.weight_updater, update, has_no_old_kv=True)
    return done


def _wrap_version_update(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Wrap `/update_weight_version`, which sets the version of the current update.

    The update may still be in progress, or may have ended without a version.
    """
    result = original(scheduler, recv_req)
    update = _rank.update
    if update is None or update.waits_for_flush:
        return result
    if update.is_over:
        update.versions = frozenset({recv_req.new_version})
        _finish_update(scheduler.weight_updater, update)
    else:
        update.versions |= {recv_req.new_version}
    return result


def _before_release(_self: Any, recv_req: Any) -> None:
    """Drop the pending update when SGLang releases the weights."""
    if discards_weights(recv_req):
        _rank.update = None


TRAINER_HOOKS: tuple[Hook, ...] = (
    *(Hook(f"{_UPDATER}.{name}", "around", _wrap_weight_change) for name in _HOOKED_CALLS),
    Hook(f"{_UPDATER}.end_weight_update", "around", _wrap_session_end),
    Hook(f"{_UPDATER}.release_memory_occupation", "before", _before_release),
    Hook(f"{_FLUSHES}.__init__", "before", _before_wrapper_created),
    Hook(f"{_SCHEDULER}.handle_update_weight_version", "around", _wrap_version_update),
)
